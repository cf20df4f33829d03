"""The books of the three allocators: nothing is lost, nothing is given twice, nothing exceeds the budget."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.allocators import Allocator, Arena, Blocks, Concatenated, Preallocated
from benchmarks.capacity import Length, Line, Machine

TOKEN_BYTES = 4096
BUDGET_BYTES = 64 * 16 * TOKEN_BYTES


def allocators() -> list[Allocator]:
    """One of each."""
    return [
        Preallocated(BUDGET_BYTES, TOKEN_BYTES, 100),
        Concatenated(BUDGET_BYTES, TOKEN_BYTES, 4),
        Blocks(BUDGET_BYTES, TOKEN_BYTES, 16),
    ]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 90)), max_size=40))
def test_memory_is_kept_book_of(steps: list[tuple[int, int]]) -> None:
    for allocator in allocators():
        for key, tokens in steps:
            if key not in allocator.tokens:
                allocator.admit(key, tokens)
            elif tokens % 3:
                allocator.grow(key)
            else:
                allocator.leave(key)
            assert allocator.used_bytes <= allocator.held_bytes <= BUDGET_BYTES, allocator.name
        for key in list(allocator.tokens):
            allocator.leave(key)
        assert allocator.held_bytes == 0, allocator.name


def test_an_arena_gives_no_byte_twice_and_joins_its_gaps() -> None:
    arena = Arena(100)
    pieces = {arena.take(10): 10 for _ in range(10)}
    assert sorted(pieces) == list(range(0, 100, 10))
    assert arena.take(1) is None
    for start in (20, 40, 30):
        arena.give(start, 10)
    assert arena.free_bytes == 30
    assert arena.take(30) == 20


def test_preallocation_holds_the_longest_and_blocks_what_is_there() -> None:
    reserved, _, blocks = allocators()
    for allocator in (reserved, blocks):
        assert allocator.admit(1, 17)
    assert reserved.held_bytes == 100 * TOKEN_BYTES
    assert blocks.held_bytes == 32 * TOKEN_BYTES


@pytest.mark.parametrize("allocator", allocators(), ids=lambda each: each.name)
def test_every_token_is_generated_once_however_often_a_sequence_is_sent_back(allocator: Allocator) -> None:
    requests = [Length(10 + 7 * number % 50, 5 + 11 * number % 40) for number in range(60)]
    line = Line(allocator, requests, Machine())
    run = line.serve()
    served = [each for each in requests if allocator.serves(each.total)]
    assert line.tokens == sum(each.answer for each in served)
    assert run.refused == len(requests) - len(served)
    assert not allocator.tokens
    assert max(sample.held_bytes for sample in run.samples) <= BUDGET_BYTES
