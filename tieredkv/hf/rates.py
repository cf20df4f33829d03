"""Whether to load a prefix or to compute it again, from what both took so far.

Imports: nothing.
"""

from __future__ import annotations

import threading

LEAST_TOKENS = 64
"""A forward of fewer tokens says little of how fast a prefill is."""

_NEWEST = 0.5
"""Weight of the newest measurement."""


class Rates:
    """Measured seconds of a token: prefilled, and loaded from disk. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.prefill_seconds: float | None = None
        self.load_seconds: float | None = None

    def prefilled(self, tokens: int, seconds: float) -> None:
        """A forward of so many tokens, over all rows, took so long."""
        if tokens >= LEAST_TOKENS:
            with self._lock:
                self.prefill_seconds = _mixed(self.prefill_seconds, seconds / tokens)

    def loaded(self, tokens: int, seconds: float) -> None:
        """Loading so many tokens took so long."""
        with self._lock:
            self.load_seconds = _mixed(self.load_seconds, seconds / max(tokens, 1))

    @property
    def loading_pays(self) -> bool:
        """Whether to load: until both were measured yes, since only a load tells what a load takes."""
        with self._lock:
            if self.prefill_seconds is None or self.load_seconds is None:
                return True
            return self.load_seconds < self.prefill_seconds


def _mixed(old: float | None, new: float) -> float:
    return new if old is None else (1 - _NEWEST) * old + _NEWEST * new
