"""Rows: the order of bytes is planes, then heads, each contiguous."""

from __future__ import annotations

import torch

from tieredkv.block import Plane
from tieredkv.tiers import pack_rows, row_bytes, unpack_rows

SPEC = (Plane("k", torch.int16, 2, (4, 3)), Plane("v", torch.int32, 2, (5, 1)))


def test_a_row_is_plane_after_plane_and_head_after_head() -> None:
    k = torch.arange(2 * 3 * 12, dtype=torch.int16).view(2, 3, 4, 3)
    v = torch.arange(2 * 3 * 5, dtype=torch.int32).view(2, 3, 5, 1)
    rows = torch.zeros((3, row_bytes(SPEC)), dtype=torch.uint8)
    pack_rows(SPEC, (k, v), rows)
    for block in range(3):
        wanted = k[:, block].contiguous().numpy().tobytes() + v[:, block].contiguous().numpy().tobytes()
        assert rows[block].numpy().tobytes() == wanted


def test_unpacking_is_the_inverse_into_any_stride() -> None:
    rows = torch.randint(0, 256, (3, row_bytes(SPEC)), dtype=torch.uint8)
    wide = tuple(plane.empty(6) for plane in SPEC)
    out = tuple(plane[:, ::2] for plane in wide)
    unpack_rows(SPEC, rows, out)
    again = torch.empty_like(rows)
    pack_rows(SPEC, out, again)
    assert torch.equal(rows, again)
