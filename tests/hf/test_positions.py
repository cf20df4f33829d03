"""Positions: a prompt that is fed twice is refused, and every legal continuation passes."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from tieredkv.errors import PositionError
from tieredkv.hf.positions import Positions


def at(*rows: range | list[int]) -> dict[str, Any]:
    return {"position_ids": torch.tensor([list(row) for row in rows])}


def accept(positions: Positions, keywords: Any, past: int, new: int) -> None:
    positions.check(keywords, past, new)
    positions.accept()


def started(*lengths: int) -> Positions:
    """Left-padded rows of these lengths, after their prefill."""
    positions, longest = Positions(), max(lengths)
    rows = [[max(i - (longest - n), 0) for i in range(longest)] for n in lengths]
    accept(positions, at(*rows), 0, longest)
    return positions


def test_a_continuation_passes() -> None:
    positions = started(5)
    accept(positions, at([5]), 5, 1)
    accept(positions, at([6, 7, 8]), 6, 3)
    assert positions.exempt == 0


@pytest.mark.parametrize("again", [range(5), range(4, 5), range(1, 4)])
def test_a_prompt_fed_twice_is_refused(again: range) -> None:
    positions = started(5)
    with pytest.raises(PositionError, match="crop"):
        positions.check(at(again), 5, len(again))


def test_a_gap_is_refused() -> None:
    with pytest.raises(PositionError):
        started(5).check(at([9]), 5, 1)


def test_the_whole_text_with_one_more_token_is_refused() -> None:
    with pytest.raises(PositionError, match="use_cache"):
        started(5).check(at(range(6)), 5, 6)


def test_positions_that_repeat_are_the_models_own() -> None:
    """A tree of candidates has several tokens at one position."""
    positions = started(5)
    accept(positions, at([5, 6, 6, 7]), 5, 4)
    assert positions.exempt == 0


def test_a_forward_that_goes_on_after_one_that_was_taken_back_is_refused() -> None:
    positions = Positions()
    accept(positions, at(range(5)), 0, 5)
    positions.take_back()
    for _ in range(2):
        with pytest.raises(PositionError, match="taken back"):
            positions.check(at([5]), 0, 1)
    accept(positions, at(range(5)), 0, 5)
    accept(positions, at([5]), 5, 1)


def test_a_refusal_changes_nothing() -> None:
    positions = started(5)
    with pytest.raises(PositionError):
        positions.check(at(range(5)), 5, 5)
    accept(positions, at([5, 6]), 5, 2)


def test_left_padded_rows_continue_each_at_their_own_position() -> None:
    positions = started(5, 3)
    accept(positions, at([5], [3]), 5, 1)
    with pytest.raises(PositionError):
        positions.check(at([5], [3]), 6, 1)


def test_a_row_that_finished_early_is_excused_by_one_that_continues() -> None:
    positions = started(5, 5)
    accept(positions, at([5], [1]), 5, 1)


@pytest.mark.parametrize("keywords", [None, {}, {"position_ids": None}, at(range(3)), {"position_ids": torch.zeros(3)}])
def test_what_cannot_be_seen_is_counted(keywords: Any) -> None:
    positions = started(5)
    accept(positions, keywords, 5, 1)
    assert positions.exempt == 1


def test_after_a_crop_the_positions_go_back() -> None:
    positions = started(8)
    positions.cropped(3)
    accept(positions, at([5, 6]), 5, 2)


@pytest.mark.parametrize("removed", [1, 2, 4, 7])
def test_a_crop_into_a_tree_of_candidates_forgets_the_position(removed: int) -> None:
    """A path through the tree was accepted: its last token's position is not told by how many tokens went."""
    positions = started(5)
    accept(positions, at([5, 6, 6, 7, 7, 7]), 5, 6)
    positions.cropped(removed)
    accept(positions, at([6]), 11 - removed, 1)
    positions.cropped(1)
    accept(positions, at([6, 7]), 11 - removed, 2)


def test_a_crop_over_jumps_of_rows_forgets_the_position() -> None:
    positions = started(5, 5)
    accept(positions, at([5], [1]), 5, 1)
    accept(positions, at([2], [2]), 6, 1)
    positions.cropped(2)
    accept(positions, at([5], [5]), 5, 1)


def test_within_consecutive_positions_a_crop_keeps_watch() -> None:
    positions = started(8, 5)
    accept(positions, at([8], [5]), 8, 1)
    accept(positions, at([9, 10], [6, 7]), 9, 2)
    positions.cropped(4)
    with pytest.raises(PositionError):
        positions.check(at([6], [3]), 7, 1)
    accept(positions, at([7], [4]), 7, 1)
    positions.take_back()
    positions.cropped(2)
    accept(positions, at([5, 6], [2, 3]), 5, 2)


def test_a_whole_text_again_is_told_of_what_passes_it() -> None:
    with pytest.raises(PositionError, match=r"assisted or prompt-lookup decoding"):
        started(5).check(at(range(9)), 5, 9)
    with pytest.raises(PositionError) as caught:
        started(5).check(at([2, 3]), 5, 2)
    assert "assisted" not in str(caught.value)


def test_rows_follow_a_selection() -> None:
    positions = started(6, 4)
    positions.select([1, 1])
    accept(positions, at([4], [4]), 6, 1)
    with pytest.raises(PositionError):
        positions.check(at([6], [6]), 7, 1)


def test_after_a_rollback_the_last_positions_hold_again() -> None:
    positions = started(5)
    accept(positions, at([5, 6, 7]), 5, 3)
    positions.take_back()
    accept(positions, at([5]), 5, 1)


def test_an_empty_cache_starts_anywhere() -> None:
    positions = started(5)
    positions.forget()
    accept(positions, at(range(100, 103)), 0, 3)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=10), st.lists(st.integers(0, 6), min_size=1, max_size=3))
def test_every_way_to_cut_a_sequence_passes(pieces: list[int], padding: list[int]) -> None:
    positions, past = Positions(), 0
    for new in [max(padding) + 1, *pieces]:
        rows = [[max(i - pad, 0) for i in range(past, past + new)] for pad in padding]
        accept(positions, at(*rows), past, new)
        past += new
    assert positions.exempt == 0
