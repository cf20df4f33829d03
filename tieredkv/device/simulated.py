"""An accelerator made of ordinary memory, for tests: copies that come late, and an error for every missing wait.

Its "device" memory is separate tensors on the CPU. Streams are worker threads with a latency, a bandwidth and random
delays; what an operation is about to overwrite is NaN until then, and so is what is freed. Vector clocks (see
`device.clocks`) treat computing as asynchronous, as it is on a GPU, although it is done inline.

Imports: device.base, device.bounce, device.clocks, device.event, device.memory, device.worker.
"""

from __future__ import annotations

import dataclasses
import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch

from tieredkv.device.base import Finish, Lock, Region, holds
from tieredkv.device.bounce import Bounce
from tieredkv.device.clocks import Clock, Clocks
from tieredkv.device.event import Event, settled_event
from tieredkv.device.memory import Ledger, PinnedMemory, normal_empty
from tieredkv.device.worker import Operation, Work, Worker, WorkerDevice, WorkerStream, finished

T = TypeVar("T")

COMPUTE = ("compute", 0)


@dataclasses.dataclass(frozen=True, slots=True)
class Traced:
    """One operation as it was submitted; `stream` is "up", "down", "disk", "compute" or "host"."""

    stream: str
    name: str
    reads: tuple[Region, ...]
    writes: tuple[Region, ...]


class ClockedEvent(Event):
    """An event from which a host thread learns, when it sees it done, what came before."""

    __slots__ = ("clock", "clocks")

    def __init__(self, name: str, clocks: Clocks, clock: Clock) -> None:
        super().__init__(name)
        self.clocks, self.clock = clocks, clock

    def done(self) -> bool:
        is_done = super().done()
        if is_done:
            self.clocks.learn(self.clock)
        return is_done

    def wait(self) -> None:
        try:
            self.join_through()
        finally:
            self.clocks.learn(self.clock)
        self.raise_error()


class Link:
    """How long a stream's operations take, and when each is carried out. Used by one worker thread.

    Args:
        latency_seconds: of each operation.
        bytes_per_second: for an operation's `nbytes`.
        max_delay_seconds: the most that is added to an operation at random.
        rng: draws the delays.
    """

    def __init__(
        self, latency_seconds: float, bytes_per_second: float, max_delay_seconds: float, rng: random.Random
    ) -> None:
        self._latency_seconds = latency_seconds
        self._bytes_per_second = bytes_per_second
        self._max_delay_seconds = max_delay_seconds
        self._rng = rng
        self._free_at = 0.0

    def issue(self, operation: Operation, work: Work) -> None:
        """Garble the destination, let the time pass, then do the work."""
        ready_at = max([operation.submitted_at, *(event.ended_at for event in operation.after)])
        for event in operation.after:
            event.join()
            event.raise_error()
        for tensor in operation.garbage:
            garble(tensor)
        # From when the link was free, not from now: sleeping too long must not add up over operations.
        start = max(self._free_at, ready_at)
        self._free_at = start + self._latency_seconds + operation.nbytes / self._bytes_per_second
        self._free_at += self._rng.uniform(0.0, self._max_delay_seconds)
        operation.event.started_at = start
        if (left_seconds := self._free_at - time.perf_counter()) > 0:
            time.sleep(left_seconds)
        if isinstance(operation.event, ClockedEvent):
            operation.event.clocks.learn(operation.event.clock)  # for what the work itself submits
        work()


class SimulatedStream(WorkerStream):
    """A worker stream whose operations are checked by the clocks as they are submitted."""

    def __init__(self, name: str, link: Link, clocks: Clocks, trace: list[Traced] | None) -> None:
        super().__init__(name, Worker(name, link.issue))
        self._clocks = clocks
        self._trace = trace

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
        self.worker.check_open()
        with self._clocks.lock:
            clock = self._clocks.step((self.name, priority), name or self.name, reads, writes, known(after))
            if finish is not None:  # on a GPU it is no part of the stream: only the event is after it
                clock = self._clocks.step((f"{self.name} finish", priority), name or self.name, reads, writes, [clock])
            event = ClockedEvent(name, self._clocks, clock)
            whole = finished(work, finish, event)
            try:
                self.worker.submit(Operation(whole, event, tuple(after), priority, nbytes, tuple(garbage)))
            except BaseException:
                self._clocks.learn(clock)  # it never runs: nobody has to wait for it
                raise
            if self._trace is not None:
                self._trace.append(Traced(self.name, name, tuple(reads), tuple(writes)))
        return event


class SimulatedAccelerator(WorkerDevice):
    """A device for tests.

    Args:
        seed: of the random delays.
        latency_seconds: of each operation of up, down and disk.
        bytes_per_second: of each of the three, for operations that say their `nbytes`.
        max_delay_seconds: the most that is added at random to an operation, which shuffles the streams.
        memory_bytes: device memory; an allocation past it raises torch.OutOfMemoryError, as on a GPU.
        addresses_host: whether warm blocks are attended in place.
        pin_limit_bytes: the most host memory to "pin", or None for half of the host's memory.
        is_traced: keep every operation in `trace`.
        compute_seconds: for names of computing operations how long each takes at least, as on a device of that speed.

    Attributes:
        clocks: `clocks.races` counts the RaceErrors raised, those that were caught too.
        trace: operations in the order of submission; stays empty unless `is_traced`.
    """

    follows_accesses = True

    def __init__(
        self,
        *,
        seed: int = 0,
        latency_seconds: float = 0.0,
        bytes_per_second: float = math.inf,
        max_delay_seconds: float = 0.0,
        memory_bytes: int = 1 << 30,
        addresses_host: bool = False,
        pin_limit_bytes: int | None = None,
        is_traced: bool = False,
        compute_seconds: Mapping[str, float] | None = None,
    ) -> None:
        self.kind = "simulated"
        self.torch_device = torch.device("cpu")
        self.addresses_host = addresses_host
        self.clocks = Clocks()
        self.trace: list[Traced] = []
        self._is_traced = is_traced
        self._compute_seconds = dict(compute_seconds or {})
        self._memory_bytes = memory_bytes
        self._ledger = Ledger()
        self._pinned = PinnedMemory(pin_limit_bytes, _garbled_empty)
        # Copies are done when they are issued: an event of the compute stream would order more than there is.
        self._bounce = Bounce(self._pinned, lambda: settled_event(Event("bounce")))

        def stream(name: str) -> SimulatedStream:
            rng = random.Random(f"{seed} {name}")
            link = Link(latency_seconds, bytes_per_second, max_delay_seconds, rng)
            return SimulatedStream(name, link, self.clocks, self.trace if is_traced else None)

        super().__init__(stream("up"), stream("down"), stream("disk"))

    def run(
        self,
        work: Callable[[], T],
        *,
        name: str = "",
        reads: Sequence[Region] = (),
        writes: Sequence[Region] = (),
        after: Sequence[Event] = (),
    ) -> T:
        self.clocks.step(COMPUTE, name or "compute", reads, writes, known(after))
        self._note("compute", name, reads, writes)
        for event in after:
            # Not wait(): on a GPU the compute stream waits, and the host learns nothing.
            event.join()
            event.raise_error()
        ends_at = time.perf_counter() + self._compute_seconds.get(name, 0.0)
        result = work()
        if (left_seconds := ends_at - time.perf_counter()) > 0:
            time.sleep(left_seconds)
        return result

    def record(self) -> Event:
        return settled_event(ClockedEvent("record", self.clocks, self.clocks.step(COMPUTE, "record")))

    def poison(self, tensors: Sequence[torch.Tensor], region: Region, *, by_compute: bool = False) -> None:
        process = COMPUTE if by_compute else self.clocks.host()
        self.clocks.step(process, "poison", writes=[region])
        self._note("compute" if by_compute else "host", "poison", (), (region,))
        for tensor in tensors:
            garble(tensor)

    def host_access(self, *, name: str = "", reads: Sequence[Region] = (), writes: Sequence[Region] = ()) -> None:
        self.clocks.step(self.clocks.host(), name or "host access", reads, writes)
        self._note("host", name, reads, writes)

    def lock(self) -> Lock:
        return ClockedLock(self.clocks)

    def synchronize(self) -> None:
        done = self.clocks.everything()
        super().synchronize()
        self.clocks.learn(done)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > self.free_bytes():
            raise torch.OutOfMemoryError(
                f"The simulated accelerator has {self.free_bytes()} of {self._memory_bytes} bytes free, not {nbytes}."
            )
        return self._ledger.add(_garbled_empty(shape, dtype), nbytes)

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
        return self._memory_bytes - self._ledger.live_bytes

    def total_bytes(self) -> int:
        return self._memory_bytes

    def _note(self, stream: str, name: str, reads: Sequence[Region], writes: Sequence[Region]) -> None:
        if self._is_traced:
            self.trace.append(Traced(stream, name, tuple(reads), tuple(writes)))


class ClockedLock:
    """A re-entrant lock that hands on what its holders knew."""

    def __init__(self, clocks: Clocks) -> None:
        self._lock = threading.RLock()
        self._clocks = clocks
        self._known: Clock = {}

    def acquire(self, blocking: bool = True) -> bool:
        """See `Lock.acquire`."""
        is_taken = self._lock.acquire(blocking)
        if is_taken:
            self._clocks.learn(self._known)
        return is_taken

    def release(self) -> None:
        """See `Lock.release`."""
        self._known = self._clocks.known_to(self._clocks.host())
        self._lock.release()

    def __enter__(self) -> ClockedLock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _is_owned(self) -> bool:
        """What `threading.Condition` asks of a re-entrant lock."""
        return holds(self._lock)


def known(events: Sequence[Event]) -> Iterator[Clock]:
    """The clocks of the events that have one."""
    return (event.clock for event in events if isinstance(event, ClockedEvent))


def garble(tensor: torch.Tensor) -> None:
    """Fill with NaN, or with the largest value where the dtype has no NaN."""
    with torch.no_grad():
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            tensor.fill_(math.nan)
        elif tensor.dtype == torch.bool:
            tensor.fill_(True)
        else:
            tensor.fill_(torch.iinfo(tensor.dtype).max)


def _garbled_empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    tensor = normal_empty(shape, dtype, "cpu")
    garble(tensor)
    return tensor
