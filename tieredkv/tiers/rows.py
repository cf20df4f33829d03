"""Blocks as rows of bytes, the order in which they lie on disk and are checksummed.

A row is one block of one layer: for each plane in order, `[kv_heads, *inner]` contiguous.

Imports: block only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from tieredkv.block import Plane, Planes


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


def _views(spec: Sequence[Plane], rows: torch.Tensor) -> Iterator[torch.Tensor]:
    """Per plane a view `[kv_heads, n, *inner]` of contiguous rows; works since planes are whole 8-byte words."""
    offset = 0
    for plane in spec:
        part = rows[:, offset : offset + plane.block_bytes].view(plane.dtype)  # [n, kv_heads * inner]
        yield part.view(rows.shape[0], plane.kv_heads, *plane.inner).transpose(0, 1)
        offset += plane.block_bytes
