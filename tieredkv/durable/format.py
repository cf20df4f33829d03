"""What a published file says about itself, and how much of that is believed.

A file is a safetensors file with the layout of tiers.cold_layout: one tensor `layer.<i>` `[blocks, row_bytes]` for each
layer, so that one layer of neighbouring blocks is one piece, and the whole file in order is one too. Its blocks follow
each other in one sequence. Beside the identity the header says, for each block:

    hashes     64 hex digits each, joined; the parent of a block is the one before it, of the first one `parent`
    tokens     how many it holds, joined by commas
    checksums  base64 of int64 `[blocks, layers]`, little-endian
    salt       hex digest of the salt of all of them, or ""

The file's name is `<hash of its last block>-<first 16 digits of the header's SHA-256>[-<16 of the salt>].safetensors`:
a changed header is seen without a second place to look at, and two writers of the same blocks with the same bytes make
the same file, while other bytes under the same hashes make another.

Imports: block, tiers, durable.identity.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import math
import re
import struct
from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from tieredkv.block import Plane
from tieredkv.durable.identity import FORMAT, FORMAT_VERSION, BlockRecord, Identity
from tieredkv.tiers.cold_layout import ALIGN_BYTES, spill_layout

LONGEST_HEADER_BYTES = 64 << 20
SUFFIX = ".safetensors"

_NAME = re.compile(r"([0-9a-f]{64})-([0-9a-f]{16})(?:-[0-9a-f]{1,16})?\.safetensors")
_HASH_DIGITS = 64
_METADATA = '{"__metadata__":'
_JSON = json.JSONDecoder()


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why a file is not used.

    Args:
        kind: "damaged" (ours, and not as it was written), "foreign" (another model's, version's or program's) or
            "unreadable" (the system does not give it now, and it may be good: it stays where it is).
        why: for people.
    """

    kind: Literal["damaged", "foreign", "unreadable"]
    why: str


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class StoredFile:
    """A file of the index; identity is the object.

    Args:
        name: its file name.
        identity: what its blocks agree on.
        hashes: of its blocks, each the parent of the next.
        parent: the hash before the first of them, or "".
        salt: as in `BlockRecord`, the same for all.
        header_bytes: where the first row lies.
        file_bytes: its size.
        tokens, checksums: as they stand in the header; read by `record` only, since few records are asked for.
    """

    name: str
    identity: Identity
    hashes: tuple[str, ...]
    parent: str
    salt: str
    header_bytes: int
    file_bytes: int
    tokens: str
    checksums: str

    def offset(self, layer: int, position: int) -> int:
        """Where one layer of the block at `position` lies."""
        identity = self.identity
        before = identity.starts[layer] * len(self.hashes)
        return self.header_bytes + before + position * identity.row_bytes[layer]

    @property
    def token_count(self) -> int:
        """Tokens of all its blocks."""
        return sum(int(tokens) for tokens in self.tokens.split(","))

    def record(self, position: int) -> BlockRecord:
        """The record of the block at `position`."""
        layers = len(self.identity.layers)
        checksums = struct.unpack_from(f"<{layers}q", base64.b64decode(self.checksums), 8 * layers * position)
        tokens = int(self.tokens.split(",")[position])
        parent = self.hashes[position - 1] if position else self.parent
        return BlockRecord(self.hashes[position], parent, tokens, self.salt, checksums)


def encode_header(identity: Identity, records: Sequence[BlockRecord]) -> tuple[bytes, StoredFile]:
    """The first bytes of a file of these blocks, each the parent of the next and of one salt, and its entry."""
    checksums = b"".join(struct.pack(f"<{len(record.checksums)}q", *record.checksums) for record in records)
    metadata = identity.metadata | {
        "hashes": "".join(record.hash for record in records),
        "parent": records[0].parent,
        "tokens": ",".join(str(record.tokens) for record in records),
        "salt": records[0].salt,
        "checksums": base64.b64encode(checksums).decode(),
    }
    layout = spill_layout(identity.layers, len(records), metadata)
    salt = f"-{records[0].salt[:16]}" if records[0].salt else ""
    name = f"{records[-1].hash}-{_digest(layout.header)}{salt}{SUFFIX}"
    return layout.header, _stored(identity, name, metadata, len(layout.header))


def header_bytes(start: bytes) -> int | None:
    """How long the header is, from a file's first bytes; None when that cannot be one of ours."""
    if len(start) < 8:
        return None
    total = 8 + int(struct.unpack_from("<Q", start)[0])
    return total if total <= LONGEST_HEADER_BYTES and total % ALIGN_BYTES == 0 else None


def is_ours(name: str) -> bool:
    """Whether a file name is one that this format gives."""
    return _NAME.fullmatch(name) is not None


def read_metadata(name: str, header: bytes) -> Mapping[str, str] | Refusal:
    """What a whole header of ours says; `name` proves that it is as it was written."""
    match = _NAME.fullmatch(name)
    if match is None:
        return Refusal("foreign", "its name is not one of ours")
    if header_bytes(header) != len(header):
        return Refusal("damaged", "its header has no such length")
    if _digest(header) != match[2]:
        return Refusal("damaged", "its header is not the one it was named after")
    try:
        # What stands after it says where the layers are, which the metadata says already.
        text = header[8:].decode()
        metadata, _ = _JSON.raw_decode(text, text.index(_METADATA) + len(_METADATA))
        version = (metadata["format"], metadata["format_version"])
    except (ValueError, KeyError, TypeError):
        return Refusal("foreign", "its header is of another program")
    if version != (FORMAT, str(FORMAT_VERSION)):
        return Refusal("foreign", f"its format is {version[0]}, version {version[1]}")
    return dict(metadata)


def decode_header(identity: Identity, name: str, header: bytes, file_bytes: int) -> StoredFile | Refusal:
    """The entry of a file, if it is one of `identity` and whole as far as header and size tell."""
    metadata = read_metadata(name, header)
    if isinstance(metadata, Refusal):
        return metadata
    for key, wanted in identity.metadata.items():
        if metadata.get(key) != wanted:
            return Refusal("foreign", f"its {key} is {metadata.get(key)!r}")
    try:
        file = _stored(identity, name, metadata, len(header))
    except KeyError as missing:
        return Refusal("foreign", f"its header says no {missing}")
    if file.file_bytes != file_bytes:
        return Refusal("damaged", f"it has {file_bytes} bytes instead of {file.file_bytes}")
    return file


def identity_of(metadata: Mapping[str, str]) -> Identity | Refusal:
    """The identity that a header names; its dtypes must be torch's."""
    try:
        layers = tuple(
            tuple(
                Plane(name, _dtype(dtype), int(heads), tuple(int(size) for size in inner))
                for name, dtype, heads, inner in planes
            )
            for planes in json.loads(metadata["geometry"])
        )
        return Identity(metadata["fingerprint"], layers, int(metadata["block_size"]), metadata["codec"])
    except (ValueError, KeyError, TypeError) as cause:
        return Refusal("foreign", f"its geometry cannot be read ({cause})")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown dtype {name}")
    return dtype


def _stored(identity: Identity, name: str, metadata: Mapping[str, str], header_bytes: int) -> StoredFile:
    joined = metadata["hashes"]
    count = math.ceil(len(joined) / _HASH_DIGITS)
    return StoredFile(
        name=name,
        identity=identity,
        hashes=tuple(joined[start : start + _HASH_DIGITS] for start in range(0, len(joined), _HASH_DIGITS)),
        parent=metadata["parent"],
        salt=metadata["salt"],
        header_bytes=header_bytes,
        file_bytes=header_bytes + count * identity.block_bytes,
        tokens=metadata["tokens"],
        checksums=metadata["checksums"],
    )


def _digest(header: bytes) -> str:
    return hashlib.sha256(header).hexdigest()[:16]
