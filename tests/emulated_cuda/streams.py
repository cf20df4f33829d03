"""Streams and events of the emulated GPU: queues of what was asked and not yet done.

Imports: nothing but what it is part of.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from emulated_cuda.gpu import EmulatedGpu


class FakeStream:
    """A queue of what was asked and not yet done."""

    def __init__(self, gpu: EmulatedGpu) -> None:
        self.gpu, self.items = gpu, deque[Callable[[], object]]()
        self.queued = self.done = 0
        self._entered: list[contextlib.AbstractContextManager[None]] = []
        gpu.streams.append(self)

    def push(self, item: Callable[[], object]) -> None:
        with self.gpu.lock:
            self.items.append(item)
            self.queued += 1

    def advance(self, until: int) -> None:
        """Do what was queued before the count reached `until`."""
        with self.gpu.lock:
            while self.done < until:
                item = self.items.popleft()
                item()
                self.done += 1

    def wait_event(self, event: FakeEvent) -> None:
        if event.mark is not None:
            stream, position = event.mark
            self.push(lambda: stream.advance(position))

    def __enter__(self) -> None:
        self._entered.append(self.gpu.on_stream(self))
        self._entered[-1].__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._entered.pop().__exit__(*raised)

    def wait_stream(self, other: FakeStream) -> None:
        position = other.queued
        self.push(lambda: other.advance(position))

    def synchronize(self) -> None:
        if self.done < self.queued:
            self.gpu.waited("stream")
            self.advance(self.queued)


class FakeEvent:
    """A place in a stream."""

    def __init__(self, gpu: EmulatedGpu) -> None:
        self.gpu = gpu
        self.mark: tuple[FakeStream, int] | None = None

    def record(self, stream: FakeStream) -> None:
        self.mark = (stream, stream.queued)

    def query(self) -> bool:
        self.gpu.wander()
        return self.mark is None or self.mark[0].done >= self.mark[1]

    def synchronize(self) -> None:
        if self.mark is not None and self.mark[0].done < self.mark[1]:
            self.gpu.waited("event")
            self.mark[0].advance(self.mark[1])

    def elapsed_time(self, other: FakeEvent) -> float:
        if other.mark is None or other.mark[0].done < other.mark[1]:
            raise RuntimeError("both events must be completed before their time is asked")
        return 1.0
