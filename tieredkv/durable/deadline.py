"""Calls that are given up after a time, for disks that answer late or never.

Imports: nothing of the package.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

MOST_CALLS = 8


class TimedCalls:
    """Runs calls on threads of their own, so that one that never returns stops nobody.

    A call that was given up goes on in the background: it must write only where nobody else looks. When `MOST_CALLS`
    of them hang, the next is given up at once.

    Args:
        seconds: how long to wait for a call; None runs it on the calling thread, however long it takes.
    """

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self._free = threading.BoundedSemaphore(MOST_CALLS)

    def run(self, call: Callable[[], T]) -> T:
        """What `call` returns or raises.

        Raises:
            TimeoutError: it takes too long.
        """
        return call() if self.seconds is None else self.start(call).result(self.seconds)

    def start(self, call: Callable[[], T]) -> Future[T]:
        """Begin a call, with a limit or without, and go on; `result(seconds)` of what comes back waits for it.

        Raises:
            TimeoutError: too many earlier calls hang, or no thread can be started.
        """
        if self.seconds is not None and not self._free.acquire(blocking=False):
            raise TimeoutError(f"{MOST_CALLS} earlier calls still wait for the disk")
        future: Future[T] = Future()
        try:
            threading.Thread(target=self._carry_out, args=(call, future), name="tieredkv-read", daemon=True).start()
        except RuntimeError as cause:  # no more threads
            self._end()
            raise TimeoutError("no thread can be started") from cause
        return future

    def _carry_out(self, call: Callable[[], T], future: Future[T]) -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # it belongs to the one who waits
            future.set_exception(error)
        finally:
            self._end()

    def _end(self) -> None:
        if self.seconds is not None:
            self._free.release()
