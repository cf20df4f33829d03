"""Placement: who leaves hot first, how many blocks a window touches, how new blocks are divided."""

from __future__ import annotations

import random

import hypothesis.strategies as st
from hypothesis import given

from tieredkv.block import Block
from tieredkv.placement import Candidate, fitting_window, leaving_order, split_new_blocks, window_blocks

BLOCK = 16


def candidate(number: int, distance: int, last_access: int = 5, priority: int = 0) -> Candidate:
    return Candidate(Block(number, sealed=True, hot=number), distance, last_access, priority)


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
