"""Calls that are given up after a time, for disks that answer late or never.

Imports: nothing of the package.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

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
        self._lock = threading.Lock()
        self._begun: set[Future[Any]] = set()

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
        future: Future[T] = Future()
        try:
            self._begin(future)
            threading.Thread(target=self._carry_out, args=(call, future), name="tieredkv-read", daemon=True).start()
        except BaseException as cause:
            if future.cancel():  # else its thread is at it, and ends it
                self._begun.discard(future)
            if isinstance(cause, RuntimeError):  # no more threads
                raise TimeoutError("no thread can be started") from cause
            raise
        return future

    def _begin(self, future: Future[T]) -> None:
        with self._lock:
            if self.seconds is not None and len(self._begun) >= MOST_CALLS:
                raise TimeoutError(f"{MOST_CALLS} earlier calls still wait for the disk")
            self._begun.add(future)

    def _carry_out(self, call: Callable[[], T], future: Future[T]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = call()
        except BaseException as error:  # it belongs to the one who waits
            self._begun.discard(future)
            future.set_exception(error)
        else:
            self._begun.discard(future)
            future.set_result(result)
