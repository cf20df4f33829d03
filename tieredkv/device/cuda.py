"""One NVIDIA GPU: worker threads that wait for the host's events and enqueue copies on CUDA streams of their own.

A worker holds each operation's work, and so its tensors, until the CUDA event behind it is done: that is why no tensor
needs `record_stream`. The only file of the package, with `device_for`, that names torch.cuda.

Imports: device.base, device.bounce, device.event, device.memory, device.worker.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from tieredkv.device.base import Finish, Region
from tieredkv.device.bounce import Bounce
from tieredkv.device.event import Event, settled_event
from tieredkv.device.memory import PinnedMemory, normal_empty
from tieredkv.device.worker import Operation, Work, Worker, WorkerDevice, WorkerStream

T = TypeVar("T")


@functools.cache
def has_flash(device: torch.device) -> bool:
    """Whether torch's own flash attention runs on this GPU: it was built, and is for compute capability 8.0 and up."""
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(device) >= (8, 0)


class CudaEvent(Event):
    """Settled once enqueued; done once the GPU is past it."""

    __slots__ = ("_begin", "_held", "end")

    def __init__(self, name: str = "") -> None:
        super().__init__(name)
        self.end: torch.cuda.Event | None = None
        self._begin: torch.cuda.Event | None = None
        self._held: Work | None = None

    def enqueued(self, begin: torch.cuda.Event, end: torch.cuda.Event, work: Work | None) -> None:
        """Take note of the CUDA events around the work, and hold the work until the second is done."""
        self._begin, self.end, self._held = begin, end, work

    def done(self) -> bool:
        if not self.settled or (self.end is not None and not self.end.query()):  # type: ignore[no-untyped-call]
            return False
        self._held = None
        return True

    def join(self) -> None:
        super().join()
        if self.end is not None:
            self.end.synchronize()
        self._held = None

    @property
    def seconds(self) -> float:
        if self._begin is None or self.end is None:
            return 0.0
        return float(self._begin.elapsed_time(self.end)) / 1e3


class CopyClock:
    """Knows when the copies of the operation at hand begin: what the host does before them is none of their time."""

    def __init__(self) -> None:
        self._here = threading.local()  # each lane's thread has an operation at hand of its own

    def is_at(self, begin: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
        """The calling thread's operation: `begin` is to be recorded before its first copy."""
        self._here.waiting = begin, stream

    def begins(self) -> None:
        """A copy comes next, or nothing does."""
        waiting = getattr(self._here, "waiting", None)
        if waiting is not None:
            self._here.waiting = None
            begin, stream = waiting
            begin.record(stream)


class CopyLane:
    """One CUDA stream, its operations in flight, and how one is enqueued. Used by one worker thread.

    Args:
        device: the GPU.
        clock: is told of each operation, and tells when its copies begin.
    """

    def __init__(self, device: torch.device, clock: CopyClock) -> None:
        self._clock = clock
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]
        self._in_flight: deque[CudaEvent] = deque()

    def issue(self, operation: Operation, work: Work) -> None:
        """Enqueue the work behind the CUDA events of `operation.after`."""
        begin, end = timed_event(), timed_event()
        with torch.cuda.stream(self._stream):
            for event in operation.after:
                make_wait(self._stream, event)
            self._clock.is_at(begin, self._stream)
            try:
                work()
            except BaseException:
                self._stream.synchronize()  # copies enqueued before the failure may still read its tensors
                raise
            self._clock.begins()
            end.record(self._stream)
        event = operation.event
        if isinstance(event, CudaEvent):
            event.enqueued(begin, end, work)
            self._in_flight.append(event)
        while self._in_flight and self._in_flight[0].done():
            self._in_flight.popleft()

    def drain(self) -> None:
        """Wait for the GPU and let go of every tensor."""
        self._stream.synchronize()
        while self._in_flight:
            self._in_flight.popleft().done()


def timed_event() -> torch.cuda.Event:
    """A CUDA event of which the time can be asked."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def make_wait(stream: torch.cuda.Stream, event: Event) -> None:
    """Make what is enqueued on `stream` from now on wait for the event; blocks for the host's own events only."""
    if isinstance(event, CudaEvent):
        Event.join(event)  # until it is enqueued
        event.raise_error()
        if event.end is not None:
            stream.wait_event(event.end)
    else:
        event.wait()


def recorded(device: torch.device) -> Event:
    """An event that is done once everything enqueued on the calling thread's current stream is."""
    event, end = CudaEvent("record"), timed_event()
    end.record(torch.cuda.current_stream(device))
    event.enqueued(end, end, None)
    return settled_event(event)


class FinishLane:
    """What follows copies, on a CUDA stream of its own. Used by one worker thread.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]

    def issue(self, operation: Operation, work: Work) -> None:
        """Enqueue the work behind the copies as soon as those are enqueued, and wait for the end of all of it.

        So the GPU goes from a copy to its checksums without the host in between.
        """
        with torch.cuda.stream(self._stream):
            for event in operation.after:
                make_wait(self._stream, event)
            try:
                work()
            finally:
                self._stream.synchronize()


class CudaStream(WorkerStream):
    """Copies in one direction, and a second thread for what follows them: the first one goes on to the next copy."""

    overlaps_finish = True

    def __init__(self, name: str, device: torch.device, clock: CopyClock) -> None:
        self._lane = CopyLane(device, clock)
        super().__init__(name, Worker(name, self._lane.issue, self._lane.drain))
        self._finisher = Worker(f"{name}-finish", FinishLane(device).issue)
        self._open: deque[Event] = deque()
        self._lock = threading.Lock()

    def queue(self, work: Callable[[], T], finish: Finish[T] | None, operation: Operation) -> Event:
        results: list[T] = []
        event = copied = super().queue(work if finish is None else lambda: results.append(work()), None, operation)
        if finish is not None:
            event = Event(copied.name)

            def took() -> float:
                copied.join()
                return copied.seconds

            try:
                self._finisher.submit(
                    Operation(lambda: finish(results.pop(), took), event, (copied,), operation.priority)
                )
            except BaseException:
                copied.join()  # whoever is told that nothing was submitted gives back what it uses
                raise
        with self._lock:
            while self._open and self._open[0].done():
                self._open.popleft()
            self._open.append(event)
        return event

    @property
    def workers(self) -> tuple[Worker, ...]:
        return (self.worker, self._finisher)

    @property
    def pending(self) -> int:
        return sum(not event.done() for event in tuple(self._open))

    def new_event(self, name: str) -> Event:
        return CudaEvent(name)


class CudaDevice(WorkerDevice):
    """One GPU.

    Args:
        device: which, "cuda" for the current one.
        pin_limit_bytes: the most host memory to pin at one time, or None for half of the host's memory.
    """

    def __init__(self, device: torch.device | str = "cuda", *, pin_limit_bytes: int | None = None) -> None:
        wanted = torch.device(device)
        index = torch.cuda.current_device() if wanted.index is None else wanted.index
        self.kind = "cuda"
        self.torch_device = torch.device("cuda", index)
        self.addresses_host = False
        self._pinned = PinnedMemory(pin_limit_bytes)
        clock = CopyClock()
        self._bounce = Bounce(self._pinned, functools.partial(recorded, self.torch_device), clock.begins)
        up, down = (CudaStream(name, self.torch_device, clock) for name in ("up", "down"))
        super().__init__(up, down, WorkerStream("disk"))

    def run(
        self,
        work: Callable[[], T],
        *,
        name: str = "",
        reads: Sequence[Region] = (),
        writes: Sequence[Region] = (),
        after: Sequence[Event] = (),
    ) -> T:
        stream = torch.cuda.current_stream(self.torch_device)
        for event in after:
            make_wait(stream, event)
        return work()

    def record(self) -> Event:
        return recorded(self.torch_device)

    def synchronize(self) -> None:
        super().synchronize()
        torch.cuda.synchronize(self.torch_device)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return normal_empty(shape, dtype, self.torch_device)

    def host_empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self._pinned.empty(shape, dtype)

    @property
    def bounce(self) -> Bounce | None:
        return self._bounce

    @property
    def pinned_bytes(self) -> int:
        return self._pinned.pinned_bytes

    @property
    def pin_failures(self) -> tuple[str, ...]:
        return tuple(self._pinned.failures)

    def free_bytes(self) -> int:
        # What torch has reserved and not handed out can be taken as well.
        unused = torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(self.torch_device)
        return torch.cuda.mem_get_info(self.torch_device)[0] + unused

    def total_bytes(self) -> int:
        return torch.cuda.mem_get_info(self.torch_device)[1]
