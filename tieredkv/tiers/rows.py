"""Blocks as rows of bytes, the order in which they lie on disk and are checksummed.

A row is one block of one layer: for each plane in order, `[kv_heads, *inner]` contiguous.

Imports: block only.
"""

from __future__ import annotations

import array
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch

from tieredkv.block import Plane, Planes

LEAST_PIECE_BYTES = 2048
"""Below this, naming a piece of memory to the system costs more than copying it once more."""


def row_bytes(planes: Sequence[Plane]) -> int:
    """Bytes of one block of a layer."""
    return sum(plane.block_bytes for plane in planes)


def pack_rows(spec: Sequence[Plane], planes: Planes, rows: torch.Tensor) -> None:
    """Gather planes, tensors `[kv_heads, n, *inner]` of any stride and device, into uint8 rows `[n, row_bytes]`."""
    for view, plane in zip(_views(spec, rows), planes, strict=True):
        view.copy_(plane)


def unpack_rows(spec: Sequence[Plane], rows: torch.Tensor, planes: Planes) -> None:
    """Scatter uint8 rows `[n, row_bytes]` into planes, tensors `[kv_heads, n, *inner]` of any stride and device."""
    for view, plane in zip(_views(spec, rows), planes, strict=True):
        plane.copy_(view)


def row_addresses(planes: Planes) -> list[array.array[int]] | None:
    """`row_pieces` as addresses: for each block address and bytes of each piece. Whoever reads keeps the tensors."""
    laid = []
    for plane in planes:
        heads, _, *inner = plane.shape
        size = plane.element_size()
        piece_bytes = math.prod(inner) * size
        if not plane.is_cpu or piece_bytes < LEAST_PIECE_BYTES or not plane[0, :1].is_contiguous():
            return None
        laid.append((plane.data_ptr(), heads, piece_bytes, plane.stride(0) * size, plane.stride(1) * size))
    return _addresses(planes[0].shape[1], tuple(laid))


@lru_cache(maxsize=16)
def _addresses(blocks: int, laid: tuple[tuple[int, int, int, int, int], ...]) -> list[array.array[int]]:
    """From each plane's first address, heads, bytes of a piece and strides; staging buffers are few, and stay."""
    found = [array.array("Q") for _ in range(blocks)]
    for first, heads, piece_bytes, head_bytes, block_bytes in laid:
        for block, pieces in enumerate(found):
            start = first + block * block_bytes
            pieces.extend([n for h in range(heads) for n in (start + h * head_bytes, piece_bytes)])
    return found


def row_pieces(planes: Planes) -> list[list[memoryview]] | None:
    """The memory of planes, tensors `[kv_heads, n, *inner]`: for each block its pieces in row order, one for each head.

    Returns:
        Writable views of the tensors' own memory, so that a file is read straight into them; None where that is not to
        be had (another device, a head that is not contiguous) or does not pay (small pieces).
    """
    pieces: list[list[memoryview]] = [[] for _ in range(planes[0].shape[1])]
    for plane in planes:
        heads, blocks, *inner = plane.shape
        elements, size = math.prod(inner), plane.element_size()
        piece_bytes = elements * size
        if not plane.is_cpu or piece_bytes < LEAST_PIECE_BYTES or not plane[0, :1].is_contiguous():
            return None
        head_bytes, block_bytes = plane.stride(0) * size, plane.stride(1) * size
        span = (heads - 1) * plane.stride(0) + (blocks - 1) * plane.stride(1) + elements
        memory = plane.as_strided((span,), (1,)).view(torch.uint8).numpy().data
        for block, found in enumerate(pieces):
            first = block * block_bytes
            starts = (first + head * head_bytes for head in range(heads))
            found += [memory[start : start + piece_bytes] for start in starts]
    return pieces


def _views(spec: Sequence[Plane], rows: torch.Tensor) -> Iterator[torch.Tensor]:
    """Per plane a view `[kv_heads, n, *inner]` of contiguous rows; works since planes are whole 8-byte words."""
    offset = 0
    for plane in spec:
        part = rows[:, offset : offset + plane.block_bytes].view(plane.dtype)  # [n, kv_heads * inner]
        yield part.view(rows.shape[0], plane.kv_heads, *plane.inner).transpose(0, 1)
        offset += plane.block_bytes
