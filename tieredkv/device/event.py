"""The completion of one operation: what a stream hands out at submission, and what later operations wait for.

Lock-free apart from one latch per event, because an event is settled by a worker thread, awaited by any thread, and may
be dropped by the garbage collector inside any of them.

Imports: errors only.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from tieredkv.errors import ClosedError


class Event:
    """One submitted operation's completion. Safe to use from any thread; holds no tensors.

    Attributes:
        name: the operation's label, for messages.
        settled: a stream no longer needs to hold back what comes after: the work ran (on CUDA: is enqueued) or failed.
        started_at: `time.perf_counter()` at the work's start.
        ended_at: `time.perf_counter()` at the work's end.
    """

    __slots__ = (
        "__weakref__",
        "_callbacks",
        "_error",
        "_latch",
        "_pid",
        "ended_at",
        "name",
        "settled",
        "started_at",
    )

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.settled = False
        self.started_at = self.ended_at = 0.0
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._pid = os.getpid()
        self._latch = threading.Lock()
        self._latch.acquire()

    def done(self) -> bool:
        """Whether the operation has ended, well or badly. Never blocks, never raises."""
        return self.settled

    def wait(self) -> None:
        """Block the host until the operation is done. What it wrote may be read on the host afterwards.

        Raises the operation's own exception, at every call, with the thread's traceback as a note; ClosedError in a
        child process for what its parent left unfinished. An interrupt (Ctrl-C) is raised when the operation is over:
        whoever waited gives back what it uses. A work must not wait for a later one of its own stream.
        """
        self.join_through()
        self.raise_error()

    @property
    def seconds(self) -> float:
        """How long the work took from its start to its end; valid once done, 0.0 for what never started."""
        return self.ended_at - self.started_at

    @property
    def error(self) -> BaseException | None:
        """What the operation raised, once it is settled."""
        return self._error

    def join(self) -> None:
        """Block until done and say nothing of how it ended; for streams, which look at `error` themselves."""
        if self.settled:
            return
        if os.getpid() != self._pid:
            raise ClosedError(
                f"Operation {self.name!r} was submitted before this process was forked.",
                wanted="an operation of this process",
                got=f"one of process {self._pid}, whose threads were not copied",
                change="create the cache in the process that uses it",
            )
        with self._latch:
            return

    def join_through(self) -> None:
        """`join`, also where it is interrupted; what interrupted it is raised afterwards."""
        try:
            self.join()
        except BaseException:
            self.join()
            raise

    def raise_error(self) -> None:
        """Raise what the settled operation raised, if it did."""
        if self._error is not None:
            # Afresh each time: a raise appends the frames of the one who waits, which hold tensors.
            raise self._error.with_traceback(None)

    def settle(self, error: BaseException | None = None) -> None:
        """Mark as run or failed, once, and release everyone who waits; for streams."""
        self._error = error
        self.settled = True
        self._latch.release()
        self._call_back()

    def when_settled(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, from the thread that settles the event, or now if it is settled; for streams.

        The callback must not raise and must not block.
        """
        self._callbacks.append(callback)
        if self.settled:
            self._call_back()

    def _call_back(self) -> None:
        # Both the settling and a late subscriber may get here; pop() hands each callback to exactly one of them.
        while True:
            try:
                callback = self._callbacks.pop()
            except IndexError:
                return
            callback()


def settled_event(event: Event) -> Event:
    """The same event, done at this moment."""
    event.started_at = event.ended_at = time.perf_counter()
    event.settle()
    return event
