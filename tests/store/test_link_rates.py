"""Measured rates are of work that is done: held against a device of known speed, which lags behind the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest
from support import feed, small, store_of, tiny, tokens

from tieredkv.device import CpuDevice, Event, Region
from tieredkv.device.event import settled_event
from tieredkv.store import links

T = TypeVar("T")


class Late(Event):
    """Whoever waits for it waits until a moment."""

    __slots__ = ("ready_at",)

    def __init__(self, ready_at: float) -> None:
        super().__init__("late")
        self.ready_at = ready_at

    def wait(self) -> None:
        time.sleep(max(self.ready_at - time.perf_counter(), 0.0))


class Behind(CpuDevice):
    """Measurements are given to it in no time, and done one after the other.

    Args:
        seconds: that each takes; the very first takes ten times as long.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds, self._ready_at = seconds, 0.0

    def run(
        self,
        work: Callable[[], T],
        *,
        name: str = "",
        reads: Sequence[Region] = (),
        writes: Sequence[Region] = (),
        after: Sequence[Event] = (),
    ) -> T:
        if name == "measure":
            factor = 1 if self._ready_at else 10
            self._ready_at = max(self._ready_at, time.perf_counter()) + factor * self._seconds
        return super().run(work, name=name, after=after)

    def record(self) -> Event:
        return settled_event(Late(self._ready_at))


def test_a_rate_is_of_work_that_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of work that was handed over; and what the first time takes longer does not count."""
    monkeypatch.setattr(links, "LEAST_SECONDS", 0.5)
    model = tiny()
    with small(model, None, warm=0, device=Behind(0.05)) as cache:
        feed(model, tokens(20), cache)
        nbytes = sum(plane.nbytes for pair in store_of(cache).hot.planes for plane in pair)
        assert 0.7 < cache.measure_links()["hot"] / (nbytes / 0.05) <= 1.01
