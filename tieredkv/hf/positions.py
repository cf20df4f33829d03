"""Checks that a forward's positions continue what the cache holds, where they can be seen.

A prompt that is fed a second time, because the cache already covers it, gives wrong text without an error. The
positions arrive with `update` from transformers 5.24 on. Refused is only what cannot be right: in every row the last
new position is not above the last stored one, or is farther ahead than there are new tokens, or consecutive positions
begin at or below the last stored one. (A row that finished early leaves masked tokens behind, and later continues at a
lower position: right, so one such row excuses nothing but one row that continues excuses the batch.)

Imports: errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tieredkv.errors import PositionError


class Positions:
    """The last position of each row, as far as it is known."""

    def __init__(self) -> None:
        self._last: torch.Tensor | None = None  # [rows]
        self._next: torch.Tensor | None = None
        self._before: torch.Tensor | None = None
        self._lost: torch.Tensor | None = None  # of the forward that was taken back
        # How many of the last tokens have consecutive positions in every row: a crop within them is told by numbers.
        self._run = self._next_run = self._run_before = 0
        self.exempt = 0

    def check(self, keywords: Any, past: int, new: int) -> None:
        """Look at a forward's positions before it is planned.

        Args:
            keywords: the attention's keywords, or None.
            past: tokens of each row so far.
            new: tokens the forward adds.

        Raises:
            PositionError: they do not continue the cache in any row, or continue a forward that was taken back.
        """
        self._next, self._next_run = None, 0
        positions = keywords.get("position_ids") if isinstance(keywords, dict) else None
        if not isinstance(positions, torch.Tensor) or positions.ndim != 2 or positions.shape[1] != new:
            self.exempt += 1
            return
        if not past:
            self._check_lost(positions)
        if new == 1 and positions.device.type != "cpu":
            # Looking would make the host wait for the device at every token; the fault shows in prefills.
            return
        following = positions[:, -1]
        last = self._last
        run = 1 if new == 1 else _run_of(positions)
        if last is not None and past:
            step = following - last
            wrong = (step <= 0) | (step > new)
            if new > 1:
                consecutive = (positions.diff() == 1).all(1)
                wrong |= consecutive & (positions[:, 0] <= last)
            if bool(wrong.all()):
                raise _no_continuation(positions, last, past)
            if run == new and bool((positions[:, 0] == last + 1).all()):
                run += self._run
        self._next, self._next_run = following, run

    def _check_lost(self, positions: torch.Tensor) -> None:
        """A forward that ended without an error and was still taken back came from a model with fewer layers."""
        lost = self._lost
        if lost is not None and lost.shape[0] == positions.shape[0] and bool((positions[:, 0] == lost + 1).all()):
            raise PositionError(
                "This forward continues one that did not reach every layer of the cache, and was taken back.",
                wanted="positions from 0 on, as the cache is empty",
                got=f"positions from {positions[:, 0].tolist()} on",
                change="use one cache per model (this one may have fewer layers than the cache); after an interrupt "
                "feed the whole prompt again",
            )

    def accept(self) -> None:
        """The forward was planned: its last positions are the row's last ones."""
        self._before, self._last, self._next, self._lost = self._last, self._next, None, None
        self._run_before, self._run = self._run, self._next_run

    def take_back(self) -> None:
        """The forward was rolled back."""
        self._last, self._before, self._lost = self._before, None, self._last
        self._run = self._run_before

    def cropped(self, tokens: int) -> None:
        """The last `tokens` tokens of each row went away."""
        if tokens < self._run and self._last is not None:
            self._last, self._run = self._last - tokens, self._run - tokens
        elif tokens:
            # Padding, a row that finished early, a tree of candidates: what the position was there is not known.
            self._last, self._run = None, 0

    def select(self, rows: Sequence[int]) -> None:
        """Rows were reordered, repeated or dropped."""
        if self._last is not None:
            if self._last.shape[0] == 1:
                return
            self._last = self._last[list(rows)]

    def forget(self) -> None:
        """The cache is empty."""
        self._last = self._next = self._before = self._lost = None
        self._run = self._next_run = self._run_before = 0


def _run_of(positions: torch.Tensor) -> int:
    """How many of the last positions, [rows, new], are consecutive in every row."""
    breaks = (positions.diff() != 1).any(0).nonzero()
    return positions.shape[1] - (int(breaks[-1]) + 1 if len(breaks) else 0)


def _no_continuation(positions: torch.Tensor, last: torch.Tensor, past: int) -> PositionError:
    new = positions.shape[1]
    change = (
        "if the cache already covers the prompt, crop it by one token first (cache.crop(-1)) or pass only the new "
        "tokens (use_cache=False passes all of them each time); if it holds another text, reset it"
    )
    if new > 1 and not positions[:, 0].any():
        change += ", as before assisted or prompt-lookup decoding, which pass the whole text at their first step"
    return PositionError(
        "The positions of this forward do not continue the cache.",
        wanted=f"{new} new tokens from above position {last.tolist()} on, ending at most {new} further",
        got=f"positions {positions[:, 0].tolist()} to {positions[:, -1].tolist()} with {past} tokens stored",
        change=change,
    )
