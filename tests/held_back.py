"""Streams that are held back, and what goes on beside that in a thread of its own. Imports: tieredkv."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from tieredkv.store import BlockStore, Holder


def places(holder: Holder) -> list[str]:
    """The fastest tier of each block of the first row."""
    return [block.location for block in holder.table.rows[0]]


@contextlib.contextmanager
def gate(store: BlockStore, stream: str) -> Iterator[Callable[[], None]]:
    """A stream does nothing until what this gives is called, at the end of the `with` at the latest."""
    started, go = threading.Event(), threading.Event()

    def closed() -> None:
        started.set()
        go.wait(60)

    getattr(store.device, stream).submit(closed, priority=2)
    assert started.wait(60)
    try:
        yield go.set
    finally:
        go.set()


class Beside:
    """Something done in a thread of its own."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._thread = threading.Thread(target=work)
        self._thread.start()

    def is_at_it_after(self, seconds: float) -> bool:
        """Whether it is not over by then."""
        self._thread.join(seconds)
        return self._thread.is_alive()

    def end(self) -> None:
        """Wait for its end."""
        assert not self.is_at_it_after(60)
