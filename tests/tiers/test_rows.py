"""Rows: the order of bytes is planes, then heads, each contiguous."""

from __future__ import annotations

import torch

from tieredkv.block import Plane
from tieredkv.tiers import pack_rows, row_bytes, unpack_rows
from tieredkv.tiers.rows import LEAST_PIECE_BYTES, row_pieces

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


def test_pieces_are_the_memory_of_a_row_in_order() -> None:
    spec = (Plane("k", torch.bfloat16, 3, (64, 16)), Plane("v", torch.float32, 2, (32, 20)))
    wide = tuple(plane.empty(7).zero_() for plane in spec)
    out = tuple(plane[:, 1:6] for plane in wide)
    rows = torch.randint(0, 256, (5, row_bytes(spec)), dtype=torch.uint8)
    pieces = row_pieces(out)
    assert pieces is not None
    for row, found in zip(rows, pieces, strict=True):
        data, start = row.numpy().tobytes(), 0
        for piece in found:
            piece[:] = data[start : start + len(piece)]
            start += len(piece)
        assert start == len(data)
    again = torch.empty_like(rows)
    pack_rows(spec, out, again)
    assert torch.equal(rows, again)
    assert all(not plane[:, [0, 6]].any() for plane in wide)


def test_pieces_are_not_named_where_they_are_small_or_scattered() -> None:
    large = Plane("k", torch.uint8, 2, (LEAST_PIECE_BYTES, 2))
    small = Plane("v", torch.uint8, 2, (LEAST_PIECE_BYTES - 8, 1))
    assert row_pieces((large.empty(2),)) is not None
    assert row_pieces((large.empty(2), small.empty(2))) is None
    assert row_pieces((large.empty(2)[:, :, :, ::2],)) is None
    assert row_pieces((large.empty(2, "meta"),)) is None
