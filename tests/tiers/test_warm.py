"""The warm tier's pieces."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tieredkv.block import Plane
from tieredkv.errors import BudgetError, MismatchError
from tieredkv.tiers import WarmTier
from tieredkv.tiers.warm import LARGEST_PIECE_BYTES, piece_sizes

LAYERS = [(Plane("k", torch.float32, 2, (16, 3)), Plane("v", torch.float32, 2, (16, 5)))] * 2
BLOCK_BYTES = 2 * 4 * 2 * 16 * 8


class Host:
    """Host memory that notes what was asked of it."""

    def __init__(self) -> None:
        self.asked_bytes: list[int] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        made = torch.empty(shape, dtype=dtype)
        self.asked_bytes.append(made.nbytes)
        return made


def growing(slots: int) -> tuple[WarmTier, Host]:
    host = Host()
    tier = WarmTier(LAYERS, slots, host.empty, pieces="growing", first_piece_bytes=4 * BLOCK_BYTES)
    return tier, host


def fill(tier: WarmTier, slots: list[int]) -> None:
    tier.write(0, slots, tuple(plane.empty(len(slots)).fill_(1) for plane in LAYERS[0]))


def test_growing_pieces_are_taken_as_blocks_arrive() -> None:
    tier, host = growing(15)
    fill(tier, tier.slots.allocate_many(4))
    assert host.asked_bytes == [4 * BLOCK_BYTES]
    fill(tier, tier.slots.allocate_many(1))
    assert host.asked_bytes == [4 * BLOCK_BYTES, 8 * BLOCK_BYTES]
    fill(tier, tier.slots.allocate_many(10))
    assert host.asked_bytes == [size * BLOCK_BYTES for size in (4, 8, 2, 1)]
    assert tier.reserved_bytes == tier.budget_bytes == 15 * BLOCK_BYTES


def test_a_freed_slot_is_used_again_before_another_piece_is_taken() -> None:
    tier, host = growing(15)
    slots = tier.slots.allocate_many(4)
    fill(tier, slots)
    tier.slots.release(slots[1])
    fill(tier, [tier.slots.allocate()])
    assert len(host.asked_bytes) == 1


def test_one_piece_holds_everything() -> None:
    host = Host()
    tier = WarmTier(LAYERS, 15, host.empty)
    assert tier.reserved_bytes == 0
    fill(tier, tier.slots.allocate_many(1))
    assert host.asked_bytes == [15 * BLOCK_BYTES]
    assert tier.runs(list(range(15))) == [(0, 0, 15)]


def test_a_run_does_not_cross_a_piece() -> None:
    tier, _ = growing(15)
    assert tier.runs(list(range(2, 14))) == [(0, 2, 2), (2, 4, 8), (10, 12, 2)]
    tier.run(0, 4, 8)
    for start, blocks in ((3, 2), (4, 9), (-1, 1), (14, 2), (4, 0)):
        with pytest.raises(MismatchError):
            tier.run(0, start, blocks)


@pytest.mark.parametrize("pieces", ["one", "growing"])
def test_no_slots_is_a_tier_that_holds_nothing(pieces: str) -> None:
    tier = WarmTier(LAYERS, 0, Host().empty, pieces=pieces)  # type: ignore[arg-type]
    assert tier.free_blocks() == 0
    with pytest.raises(BudgetError):
        tier.slots.allocate()
    tier.close()


@given(slots=st.integers(0, 5000), block_bytes=st.integers(1, 1 << 27))
def test_pieces_cover_the_slots_and_stay_just_below_powers_of_two(slots: int, block_bytes: int) -> None:
    sizes = piece_sizes(slots, block_bytes)
    assert sum(sizes) == slots
    for size in sizes:
        piece_bytes = size * block_bytes
        rounded = 1 << (piece_bytes - 1).bit_length()
        assert size == 1 or (rounded - piece_bytes < block_bytes and piece_bytes <= LARGEST_PIECE_BYTES)
