"""Placement: who leaves hot first, how many blocks a window touches, how new blocks are divided."""

from __future__ import annotations

import random

import hypothesis.strategies as st
from hypothesis import given

from tieredkv.block import Block
from tieredkv.placement import (
    AGEING_FORWARDS,
    Candidate,
    fitting_window,
    leaving,
    leaving_order,
    promotion_slots,
    split_new_blocks,
    waiting_order,
    window_blocks,
)

BLOCK = 16


def candidate(
    number: int,
    distance: int,
    last_access: int = 5,
    priority: int = 0,
    owner: int | None = None,
    sink: bool = False,
) -> Candidate:
    return Candidate(Block(number, sealed=True, hot=number), distance, last_access, priority, owner, sink)


def order(*candidates: Candidate, window: int = 32) -> list[int]:
    return [c.block.id for c in leaving_order(candidates, window)]


def test_outside_the_window_goes_before_inside() -> None:
    inside, outside = candidate(0, 31, priority=-9, last_access=0), candidate(1, 32, priority=9, last_access=9)
    assert order(inside, outside) == [1, 0]


def test_then_priority_then_idleness_then_distance_then_id() -> None:
    low = candidate(0, 40, priority=-1)
    idle = candidate(1, 40, last_access=2)
    far = candidate(2, 90)
    near = candidate(3, 40)
    twin = candidate(4, 40)
    assert order(twin, near, far, idle, low) == [0, 1, 2, 3, 4]


@given(st.lists(st.tuples(st.integers(-40, 90), st.integers(0, 3), st.integers(0, 2)), max_size=12), st.randoms())
def test_the_order_does_not_depend_on_how_candidates_come(
    found: list[tuple[int, int, int]], rng: random.Random
) -> None:
    candidates = [candidate(number, *values) for number, values in enumerate(found)]
    shuffled = list(candidates)
    rng.shuffle(shuffled)
    assert order(*candidates) == order(*shuffled)


@given(st.integers(1, 200), st.integers(1, 300))
def test_window_blocks_is_the_most_that_a_window_can_touch(window: int, end: int) -> None:
    touched = (end - 1) // BLOCK - max(end - window, 0) // BLOCK + 1
    assert touched <= window_blocks(window, BLOCK)
    worst = max((e - 1) // BLOCK - (e - window) // BLOCK + 1 for e in range(window, window + BLOCK))
    assert window_blocks(window, BLOCK) == worst


def test_the_default_window_leaves_each_row_a_slot_to_write() -> None:
    assert fitting_window(1000, 1, BLOCK) == 2048
    assert fitting_window(8, 2, BLOCK) == 3 * BLOCK
    assert fitting_window(1, 1, BLOCK) == 1
    assert fitting_window(5, 0, BLOCK) == 4 * BLOCK


@given(st.integers(0, 50), st.integers(0, 50), st.integers(-20, 60))
def test_new_blocks_are_divided(new: int, needed: int, room: int) -> None:
    through, hot = split_new_blocks(new, needed, room)
    assert through + hot == new
    assert hot >= min(needed, new)
    assert hot == new or hot == needed + max(room, 0)


def test_sinks_go_last() -> None:
    assert order(candidate(0, 900, sink=True), candidate(1, 3), candidate(2, 40)) == [2, 1, 0]


def test_a_block_of_several_places_stays_as_long_as_any_of_them_wants() -> None:
    one = candidate(3, 90, last_access=1, priority=2, owner=1)
    other = Candidate(one.block, 10, 7, 0, 2, True)
    for seen in (one.shared_with(other), other.shared_with(one)):
        assert seen == Candidate(one.block, 10, 7, 2, None, True)
    assert one.shared_with(one) == one, "two rows of one cache"


def test_a_cache_above_its_quota_gives_up_its_own_first() -> None:
    found = [candidate(0, 90, owner=1), candidate(1, 80, owner=2), candidate(2, 70, owner=2), candidate(3, 60)]

    def ids(owner: int, surplus: int, deficit: int) -> list[int]:
        return [c.block.id for c in leaving(found, owner, surplus, deficit)]

    assert ids(2, 0, 2) == [0, 1]
    assert ids(2, 1, 2) == [1, 0]
    assert ids(2, 2, 0) == [1, 2], "whatever is free"
    assert ids(2, 5, 3) == [1, 2, 0], "all it has, and the rest from others"
    assert ids(1, -3, 0) == []


def test_what_waits_goes_by_priority_and_then_by_age() -> None:
    found = leaving_order([candidate(0, 90, priority=1), candidate(1, 80), candidate(2, 70)], 32)

    def ids(**since: int) -> list[int]:
        waiting = {int(name[1:]): forward for name, forward in since.items()}
        return [c.block.id for c in waiting_order(found, waiting, 100)]

    assert ids() == [1, 2, 0]
    assert ids(b0=100 - AGEING_FORWARDS + 1) == [1, 2, 0]
    assert ids(b0=100 - 2 * AGEING_FORWARDS) == [0, 1, 2], "it has waited long enough"
    assert ids(b2=100 - AGEING_FORWARDS) == [2, 1, 0]


def test_promotion_stops_below_the_watermark() -> None:
    for total in (1, 5, 16, 200):
        assert promotion_slots(total, 0.85) < max(int(0.85 * total), 1)
    assert promotion_slots(200, 0.85) == 170 - 12


def test_the_default_window_leaves_room_for_sinks() -> None:
    assert fitting_window(8, 1, BLOCK, sink_blocks=3) == 4 * BLOCK
