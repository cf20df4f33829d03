"""Blocks as rows of bytes, the order in which they lie on disk and are checksummed.

A row is one block of one layer: for each plane in order, `[kv_heads, *inner]` contiguous.

Imports: block, errors.
"""

from __future__ import annotations

import array
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from tieredkv.block import Plane, Planes
from tieredkv.errors import MismatchError

LEAST_PIECE_BYTES = 2048
"""Below this, naming a piece of memory to the system costs more than copying it once more."""


def row_bytes(planes: Sequence[Plane]) -> int:
    """Bytes of one block of a layer."""
    return sum(plane.block_bytes for plane in planes)


def check_rows(rows: torch.Tensor, shape: tuple[int, ...], layer: int) -> None:
    """Refuse what is not contiguous uint8 of this shape on the CPU: rows of a layer, `[n, row_bytes]` or one of them.

    Raises:
        MismatchError: it is something else.
    """
    if rows.shape != shape or rows.dtype != torch.uint8 or not rows.is_contiguous() or not rows.is_cpu:
        raise MismatchError(
            f"These are not the rows of layer {layer} that were asked for.",
            wanted=f"contiguous uint8 {shape} on cpu",
            got=f"{'' if rows.is_contiguous() else 'strided '}{rows.dtype} {tuple(rows.shape)} on {rows.device}",
            change="give rows of this size, packed as tiers.rows does",
        )


def pack_rows(spec: Sequence[Plane], planes: Planes, rows: torch.Tensor) -> None:
    """Gather planes, tensors `[kv_heads, n, *inner]` of any stride and device, into uint8 rows `[n, row_bytes]`."""
    for view, plane in zip(_views(spec, rows), planes, strict=True):
        view.copy_(plane)


def unpack_rows(spec: Sequence[Plane], rows: torch.Tensor, planes: Planes) -> None:
    """Scatter uint8 rows `[n, row_bytes]` into planes, tensors `[kv_heads, n, *inner]` of any stride and device."""
    for view, plane in zip(_views(spec, rows), planes, strict=True):
        plane.copy_(view)


def row_pieces(planes: Planes) -> list[list[memoryview]] | None:
    """The memory of planes, tensors `[kv_heads, n, *inner]`: for each block its pieces in row order, one for each head.

    Returns:
        Writable views of the tensors' own memory, so that a file is read straight into them; None where that is not to
        be had (another device, a head that is not contiguous) or does not pay (small pieces).
    """
    if (laid := _laid(planes)) is None:
        return None
    pieces: list[list[memoryview]] = [[] for _ in range(planes[0].shape[1])]
    for plane, lies in zip(planes, laid, strict=True):
        span = lies.starts(len(pieces) - 1)[-1] + lies.piece_bytes
        memory = plane.as_strided((span // plane.element_size(),), (1,)).view(torch.uint8).numpy().data
        for block, found in enumerate(pieces):
            found += [memory[start : start + lies.piece_bytes] for start in lies.starts(block)]
    return pieces


def row_addresses(planes: Planes) -> list[array.array[int]] | None:
    """`row_pieces` as addresses: for each block address and bytes of each piece. Whoever reads keeps the tensors."""
    if (laid := _laid(planes)) is None:
        return None
    return _addresses(planes[0].shape[1], laid, tuple(plane.data_ptr() for plane in planes))


@lru_cache(maxsize=16)
def _addresses(blocks: int, laid: tuple[_Laid, ...], firsts: tuple[int, ...]) -> list[array.array[int]]:
    """From where each plane begins; staging buffers are few, and stay."""
    found = [array.array("Q") for _ in range(blocks)]
    for lies, first in zip(laid, firsts, strict=True):
        for block, pieces in enumerate(found):
            pieces.extend([n for start in lies.starts(block) for n in (first + start, lies.piece_bytes)])
    return found


class _Laid(NamedTuple):
    """How the pieces of a plane lie, one for each head of each block."""

    heads: int
    piece_bytes: int
    head_bytes: int
    block_bytes: int

    def starts(self, block: int) -> list[int]:
        """Where a block's pieces begin, in bytes from the plane's begin."""
        return [block * self.block_bytes + head * self.head_bytes for head in range(self.heads)]


def _laid(planes: Planes) -> tuple[_Laid, ...] | None:
    found = []
    for plane in planes:
        size = plane.element_size()
        piece_bytes = math.prod(plane.shape[2:]) * size
        if not plane.is_cpu or piece_bytes < LEAST_PIECE_BYTES or not plane[0, :1].is_contiguous():
            return None
        found.append(_Laid(plane.shape[0], piece_bytes, plane.stride(0) * size, plane.stride(1) * size))
    return tuple(found)


def _views(spec: Sequence[Plane], rows: torch.Tensor) -> Iterator[torch.Tensor]:
    """Per plane a view `[kv_heads, n, *inner]` of contiguous rows; works since planes are whole 8-byte words."""
    offset = 0
    for plane in spec:
        part = rows[:, offset : offset + plane.block_bytes].view(plane.dtype)  # [n, kv_heads * inner]
        yield part.view(rows.shape[0], plane.kv_heads, *plane.inner).transpose(0, 1)
        offset += plane.block_bytes
