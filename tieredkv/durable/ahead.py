"""A long read in steps, a few ahead of whoever uses them, by one thread.

A thread for each step would be waited for at each start: with both cores busy that took a third of a restore.

Imports: durable.deadline.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from tieredkv.durable.deadline import TimedCalls


class ReadAhead:
    """Carries out steps in their order until it is as many ahead as it may be.

    Args:
        calls: what runs the thread; all steps together are one call.
        steps: what to do, one after the other; each writes only where nobody looks before `wait` has returned for it.
        ahead: how many steps may be carried out beyond the one that was waited for last.

    Raises:
        TimeoutError: no thread is to be had.
    """

    def __init__(self, calls: TimedCalls, steps: Sequence[Callable[[], None]], ahead: int) -> None:
        self._steps = steps
        self._ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._allowed = threading.Semaphore(ahead)
        self._stopped = False
        try:
            self._call = calls.start(self._run)
        except BaseException:  # Ctrl-C, when the thread may be at it already, and nobody is there to stop it
            self._stopped = True
            self._allowed.release()
            raise

    def wait(self, seconds: float | None) -> None:
        """Until the next step is done; from here on one more may be begun. Raises what the step raised.

        Raises:
            TimeoutError: it takes longer than `seconds`.
        """
        self._allowed.release()
        try:
            failure = self._ended.get(timeout=seconds)
        except queue.Empty as late:
            raise TimeoutError("a read has not ended") from late
        if failure is not None:
            raise failure

    def stop(self, seconds: float | None) -> None:
        """Begin no more steps, and wait for the one that runs, `seconds` at most."""
        self._stopped = True
        self._allowed.release()
        with suppress(TimeoutError):
            self._call.result(seconds)

    def _run(self) -> None:
        for step in self._steps:
            self._allowed.acquire()
            if self._stopped:
                return
            try:
                step()
            except BaseException as failure:  # it belongs to the one who waits
                self._ended.put(failure)
                return
            self._ended.put(None)
