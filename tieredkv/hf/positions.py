"""Checks that a forward's positions continue what the cache holds, where they can be seen.

A prompt that is fed a second time, because the cache already covers it, gives wrong text without an error. The
positions arrive with `update` from transformers 5.24 on. Refused is only what cannot be right: in every row the last
new position is not above the last stored one, or is farther ahead than there are new tokens. (A row that finished
early leaves masked tokens behind, and later continues at a lower position: right, so one such row excuses nothing but
one row that continues excuses the batch.)

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
        self.exempt = 0

    def check(self, keywords: Any, past: int, new: int) -> None:
        """Look at a forward's positions before it is planned.

        Args:
            keywords: the attention's keywords, or None.
            past: tokens of each row so far.
            new: tokens the forward adds.

        Raises:
            PositionError: they do not continue the cache in any row.
        """
        self._next = None
        positions = keywords.get("position_ids") if isinstance(keywords, dict) else None
        if not isinstance(positions, torch.Tensor) or positions.ndim != 2 or positions.shape[1] != new:
            self.exempt += 1
            return
        if new == 1 and positions.device.type != "cpu":
            # Looking would make the host wait for the device at every token; the fault shows in prefills.
            self._next = None
            return
        following = positions[:, -1]
        last = self._last
        if last is not None and past:
            step = following - last
            if bool(((step <= 0) | (step > new)).all()):
                raise PositionError(
                    "The positions of this forward do not continue the cache.",
                    wanted=f"{new} new tokens ending above position {last.tolist()}, at most {new} further",
                    got=f"last new position {following.tolist()} with {past} tokens stored",
                    change="if the cache already covers the prompt, crop it by one token first (cache.crop(-1)) or "
                    "pass only the new tokens; if it holds another text, reset it",
                )
        self._next = following

    def accept(self) -> None:
        """The forward was planned: its last positions are the row's last ones."""
        self._before, self._last, self._next = self._last, self._next, None

    def take_back(self) -> None:
        """The forward was rolled back."""
        self._last, self._before = self._before, None

    def cropped(self, tokens: int) -> None:
        """The last `tokens` tokens of each row went away."""
        if self._last is not None and tokens:
            self._last = self._last - tokens

    def select(self, rows: Sequence[int]) -> None:
        """Rows were reordered, repeated or dropped."""
        if self._last is not None:
            if self._last.shape[0] == 1:
                return
            self._last = self._last[list(rows)]

    def forget(self) -> None:
        """The cache is empty."""
        self._last = self._next = self._before = None
