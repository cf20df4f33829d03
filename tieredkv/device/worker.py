"""Streams that are worker threads: one queue, one thread, started at the first operation.

The garbage collector may stop a worker from inside any allocation of any thread, so that stopping takes no lock: it
sets a flag and puts a token into a `SimpleQueue`, whose `put` is re-entrant. For the same reason a thread knows its
`Worker` only, never the device, which can then be collected.

Imports: errors, device.base, device.event.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from tieredkv.device.base import Device, Finish, Region, Stream
from tieredkv.device.event import Event
from tieredkv.errors import ClosedError

T = TypeVar("T")

EXIT_SECONDS = 2.0
"""How long garbage collection and interpreter exit wait for an operation that is running."""

Work = Callable[[], object]


@dataclasses.dataclass(eq=False, slots=True)
class Operation:
    """One queued work. `work` is None as soon as it is done, so that nothing keeps its tensors."""

    work: Work | None
    event: Event
    after: tuple[Event, ...] = ()
    priority: int = 0
    nbytes: int = 0
    garbage: tuple[torch.Tensor, ...] = ()
    submitted_at: float = dataclasses.field(default_factory=time.perf_counter)
    is_subscribed: bool = False

    def end(self, error: BaseException | None) -> None:
        """Let go of everything, then tell everyone who waits."""
        self.work, self.after, self.garbage = None, (), ()
        self.event.settle(error)


Issue = Callable[[Operation, Work], None]
"""Carries out one operation's work on the worker's thread; what it raises is the operation's failure."""


def issue_on_host(operation: Operation, work: Work) -> None:
    """Do the work here, once everything before it is done to the last byte (a CUDA event settles earlier)."""
    for event in operation.after:
        event.wait()
    work()


def nothing() -> None:
    """What a worker of the host has to do when it ends."""


class Worker:
    """A queue of operations and the thread that takes from it.

    Args:
        name: for the thread and for messages.
        issue: carries out one operation.
        drain: called on the thread when it ends.
    """

    def __init__(self, name: str, issue: Issue = issue_on_host, drain: Work = nothing) -> None:
        self.name = name
        self._issue = issue
        self._drain = drain
        self._inbox: queue.SimpleQueue[Operation | None] = queue.SimpleQueue()  # None only wakes
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._pid = os.getpid()
        self._submitted = self._executed = self._cancelled = 0
        self._last: dict[int, Event] = {}

    @property
    def pending(self) -> int:
        """Operations put in and not yet ended."""
        return self._submitted - self._executed - self._cancelled

    def check_open(self) -> None:
        """Raise ClosedError when no operation can be taken."""
        if os.getpid() != self._pid:
            got = f"stream {self.name!r} of process {self._pid}, whose threads were not copied by the fork"
        elif self._stopping:
            got = f"closed stream {self.name!r}"
        else:
            return
        raise ClosedError(
            "An operation was submitted to a device that cannot run it.",
            wanted="a device that was made in this process and is open",
            got=got,
            change="create a new cache",
        )

    def submit(self, operation: Operation) -> None:
        """Queue an operation; its event is settled in any case, by a cancellation at the latest."""
        self.check_open()
        with self._lock:
            if self._stopping:
                self.check_open()
            if self._thread is None:
                self._start()
            self._submitted += 1
            self._inbox.put(operation)
            # Last, so that an interrupt in between leaves no event here that never ends.
            self._last[operation.priority] = operation.event
        if self._stopping:  # by the garbage collector, and the thread may be past its last look into the queue
            self._cancel_queued()

    def wait_idle(self) -> None:
        """Block until everything submitted so far is done."""
        for event in list(self._last.values()):
            event.join()

    def stop(self) -> None:
        """Make the thread end after the operation it is at. Takes no lock, does not wait."""
        self._stopping = True
        self._inbox.put(None)

    def join(self, seconds: float | None = None) -> None:
        """Wait for a stopped thread and cancel what it left."""
        if self._thread is not None:
            # It may be the calling one, or being started at this moment: then it ends by itself.
            with contextlib.suppress(RuntimeError):
                self._thread.join(seconds)
        self._cancel_queued()

    def close(self) -> None:
        """Stop and wait. Not for the garbage collector."""
        with self._lock:  # no thread is being started, and none will be
            self.stop()
        self.join()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._loop, name=f"tieredkv-{self.name}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._thread = None
            raise

    def _loop(self) -> None:
        give_torch_one_core()
        lanes: dict[int, deque[Operation]] = {}
        with torch.no_grad():
            while (operation := self._next(lanes)) is not None:
                self._execute(operation)
            for lane in lanes.values():
                for left in lane:
                    self._cancel(left)
            self._cancel_queued()  # here too: a work that is joined elsewhere may wait for one of these
            self._drain()

    def _next(self, lanes: dict[int, deque[Operation]]) -> Operation | None:
        """The next operation to run, blocking until there is one; None when stopped."""
        while not self._stopping:
            while not self._inbox.empty():
                self._sort_in(lanes)
            for priority in sorted(lanes, reverse=True):
                if self._is_ready(lanes[priority][0]):
                    operation = lanes[priority].popleft()
                    if not lanes[priority]:
                        del lanes[priority]
                    return operation
            self._sort_in(lanes)
        return None

    def _sort_in(self, lanes: dict[int, deque[Operation]]) -> None:
        operation = self._inbox.get()
        if operation is not None:
            lanes.setdefault(operation.priority, deque()).append(operation)

    def _is_ready(self, operation: Operation) -> bool:
        """Whether all that comes before is settled; if not, this worker is woken when it may be."""
        missing = [event for event in operation.after if not event.settled]
        if missing and not operation.is_subscribed:
            operation.is_subscribed = True
            wake = self._inbox
            for event in missing:
                event.when_settled(lambda: wake.put(None))
        return not missing

    def _execute(self, operation: Operation) -> None:
        event, work = operation.event, operation.work
        error = next((before.error for before in operation.after if before.error is not None), None)
        if error is None and work is not None:
            event.started_at = time.perf_counter()
            try:
                self._issue(operation, work)
            except BaseException as raised:  # whatever it is belongs to those who wait, and must not end the thread
                error = _without_frames(raised)
            event.ended_at = time.perf_counter()
        del work
        self._executed += 1  # by this thread only: a lock would be contended with every submission
        operation.end(error)

    def _cancel(self, operation: Operation) -> None:
        with self._lock:
            self._cancelled += 1
        operation.end(
            ClosedError(
                f"Operation {operation.event.name!r} was still queued when its device was closed.",
                wanted="an open device",
                got=f"closed stream {self.name!r}",
                change="synchronize before closing if the operation matters",
            )
        )

    def _cancel_queued(self) -> None:
        while True:
            try:
                operation = self._inbox.get_nowait()
            except queue.Empty:
                break
            if operation is not None:
                self._cancel(operation)
        self._inbox.put(None)  # it may have been the token for the thread that was taken out


def _without_frames(error: BaseException) -> BaseException:
    """The error with its traceback as text: frames keep functions alive, and these the tensors they close over."""
    error.add_note("In a stream's thread:\n" + "".join(traceback.format_exception(error)).rstrip())
    cause: BaseException | None = error
    while cause is not None:
        cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__
    return error


def give_torch_one_core() -> None:
    """Make torch use one core on the calling new thread, and what it used before on threads started later.

    `set_num_threads` changes the calling thread and the default of new threads, but no thread that has used torch
    before. Without this each stream would start as many OpenMP threads as there are cores, against the computing ones.
    """
    usual = torch.get_num_threads()
    if usual > 1:
        torch.set_num_threads(1)
        restore = threading.Thread(target=torch.set_num_threads, args=(usual,), daemon=True)
        try:
            restore.start()
        except RuntimeError:  # the interpreter is going down: there will be no new threads to set a default for
            return
        restore.join()


def finished(work: Callable[[], T], finish: Finish[T] | None, event: Event) -> Work:
    """The work and, where what it does is done when it returns, what is to follow it."""
    if finish is None:
        return work

    def both() -> None:
        result = work()
        seconds = time.perf_counter() - event.started_at
        finish(result, lambda: seconds)

    return both


class WorkerStream(Stream):
    """A stream in front of one worker."""

    def __init__(self, name: str, worker: Worker | None = None) -> None:
        super().__init__(name)
        self.worker = worker or Worker(name)

    @property
    def pending(self) -> int:
        return self.worker.pending

    def submit(
        self,
        work: Callable[[], T],
        *,
        name: str = "",
        reads: Sequence[Region] = (),
        writes: Sequence[Region] = (),
        after: Sequence[Event] = (),
        priority: int = 0,
        nbytes: int = 0,
        garbage: Sequence[torch.Tensor] = (),
        finish: Finish[T] | None = None,
    ) -> Event:
        return self.queue(work, finish, Operation(None, self.new_event(name), tuple(after), priority, nbytes))

    def queue(self, work: Callable[[], T], finish: Finish[T] | None, operation: Operation) -> Event:
        """Hand an operation, still without its work, to a worker; the event that is done after both."""
        operation.work = finished(work, finish, operation.event)
        self.worker.submit(operation)
        return operation.event

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Its threads."""
        return (self.worker,)

    def new_event(self, name: str) -> Event:
        """The event of the next operation."""
        return Event(name)


class WorkerDevice(Device):
    """What devices share whose streams are workers: the end of their threads."""

    def __init__(self, up: WorkerStream, down: WorkerStream, disk: WorkerStream) -> None:
        self.up, self.down, self.disk = up, down, disk
        self._workers = (*up.workers, *down.workers, *disk.workers)
        self._pid = os.getpid()
        weakref.finalize(self, _stop_all, self._workers, self._pid)

    def synchronize(self) -> None:
        for worker in self._workers:
            worker.wait_idle()

    def close(self) -> None:
        if os.getpid() == self._pid:
            for worker in self._workers:
                worker.stop()
            for worker in self._workers:
                worker.close()

    def poison(self, tensors: Sequence[torch.Tensor], region: Region, *, by_compute: bool = False) -> None:
        """Nothing: only a simulated accelerator writes into free slots."""

    def host_access(self, *, name: str = "", reads: Sequence[Region] = (), writes: Sequence[Region] = ()) -> None:
        """Nothing: only a simulated accelerator follows accesses."""


def _stop_all(workers: Sequence[Worker], pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked child has none of the threads
    for worker in workers:
        worker.stop()
    for worker in workers:
        worker.join(EXIT_SECONDS)
