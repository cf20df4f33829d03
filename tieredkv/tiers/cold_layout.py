"""The bytes of a spill file: a safetensors file whose header and size are known before its first block.

    u64 header length | JSON header, padded with spaces to a multiple of 4096 | layer 0 rows | layer 1 rows | …

Layer i is the uint8 tensor `layer.<i>`, `[blocks, row_bytes]`: one layer's neighbouring blocks are one read. What a
row holds is said in tiers.rows; geometry, codec and fingerprint stand in the header's `__metadata__`.

Imports: block, tiers.rows.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Mapping, Sequence
from itertools import accumulate

from tieredkv.block import Plane
from tieredkv.tiers.rows import row_bytes

FORMAT_VERSION = 1
ALIGN_BYTES = 4096


@dataclasses.dataclass(frozen=True)
class SpillLayout:
    """Where everything lies in a file of `blocks` blocks.

    Args:
        blocks: blocks the file has room for.
        header: the file's first bytes, up to the first row.
        row_bytes: per layer the bytes of a row.
        offsets: per layer the position of its first row in the file.
        file_bytes: size of the file.
    """

    blocks: int
    header: bytes
    row_bytes: tuple[int, ...]
    offsets: tuple[int, ...]
    file_bytes: int

    def offset(self, layer: int, index: int) -> int:
        """Position of one block's row in the file."""
        return self.offsets[layer] + index * self.row_bytes[layer]


def spill_layout(layers: Sequence[tuple[Plane, ...]], blocks: int, metadata: Mapping[str, str]) -> SpillLayout:
    """The layout of a file for `blocks` blocks of these layers."""
    rows = tuple(row_bytes(planes) for planes in layers)
    ends = list(accumulate((blocks * size for size in rows), initial=0))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    for layer, size in enumerate(rows):
        header[f"layer.{layer}"] = {
            "dtype": "U8",
            "shape": [blocks, size],
            "data_offsets": [ends[layer], ends[layer + 1]],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGN_BYTES)
    start = 8 + len(text)
    return SpillLayout(
        blocks, struct.pack("<Q", len(text)) + text, rows, tuple(start + end for end in ends[:-1]), start + ends[-1]
    )


def spill_metadata(
    layers: Sequence[tuple[Plane, ...]], *, block_size: int, codec: str, fingerprint: str
) -> dict[str, str]:
    """What a file says about itself; safetensors allows strings only, so geometry is JSON."""
    geometry = [
        [[plane.name, str(plane.dtype).removeprefix("torch."), plane.kv_heads, list(plane.inner)] for plane in planes]
        for planes in layers
    ]
    return {
        "format": "tieredkv.spill",
        "format_version": str(FORMAT_VERSION),
        "block_size": str(block_size),
        "codec": codec,
        "fingerprint": fingerprint,
        "geometry": json.dumps(geometry, separators=(",", ":")),
    }
