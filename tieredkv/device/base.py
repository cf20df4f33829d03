"""The interface to a computing device: streams, events, memory. The rest of the package knows nothing else of it.

Work goes to a device as operations. Each names the regions that it reads and writes and the events that it comes
after; only the simulated accelerator looks at the regions, and raises where two operations conflict without an order
between them. `up` moves towards the device, `down` away from it, `disk` reads and writes files, and no one of them
blocks another. Computing has a stream of its own, reached by `run` and `record`.

Imports: device.bounce, device.event and device.memory only.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from types import TracebackType
from typing import Any, Literal, Protocol, TypeVar, cast

import torch

from tieredkv.device.bounce import Bounce
from tieredkv.device.event import Event
from tieredkv.device.memory import host_memory

Region = tuple[Hashable, ...]
"""What an operation reads or writes, such as ("hot", slot) or ("hot", slot, layer). A region contains every longer
one that starts with it: freeing ("hot", 3) conflicts with a read of ("hot", 3, 0)."""

T = TypeVar("T")

Took = Callable[[], float]
"""How many seconds an operation's work took: asking waits for its end."""
Finish = Callable[[T, Took], object]
"""What follows an operation's work, with what that returned."""


class Lock(Protocol):
    """A re-entrant lock."""

    def acquire(self, blocking: bool = ...) -> bool:
        """Take it; with `blocking=False` only if no other thread has it. Whether it was taken."""

    def release(self) -> None:
        """Give back what was taken once."""

    def __enter__(self) -> Any: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


def holds(lock: Lock) -> bool:
    """Whether the calling thread has a lock."""
    try:
        threading.Condition(cast(Any, lock)).notify(0)  # which wakes nobody, and is refused to any other thread
    except RuntimeError:
        return False
    return True


class Stream(ABC):
    """A queue of operations that run one at a time, away from the thread that submits them.

    Args:
        name: "up", "down" or "disk".
    """

    overlaps_finish = False
    """Whether `finish` runs beside the stream's next operation, and costs the stream no time."""

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
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
        """Queue `work` and return at once. Thread-safe.

        Operations of one priority run in the order of submission. Of those whose `after` is done, the one with the
        highest priority goes first; between two priorities of one stream only `after` makes an order. The stream holds
        `work`, and so its tensors, until the operation is done, and no longer.

        Args:
            work: runs with gradients off, on a thread that gives torch one core. On CUDA it enqueues copies.
            name: label for messages and traces.
            reads, writes: the regions the work touches.
            after: events, of any stream or device, that come first. If one failed, this operation fails with the same
                exception and its work never runs.
            priority: larger goes earlier.
            nbytes: bytes moved, from which a simulated accelerator takes the time.
            garbage: tensors, each overwritten as a whole by `work`, that a simulated accelerator fills with NaN first.
            finish: called on a thread of the stream after `work`; the event comes after it, and has its exception. On
                a GPU what it enqueues comes after all of the work, while itself it may be called before that is done:
                what it reads of a tensor is what arrived. Operations behind this one do not wait for it, so that a
                stream of copies never stops for the host to look at what arrived: what touches the same regions comes
                after the event.

        Raises:
            ClosedError: the device was closed, or this process was forked from the one that made it.
            RaceError: (simulated accelerator) a conflicting access is not ordered before this one.
        """

    @property
    @abstractmethod
    def pending(self) -> int:
        """Operations submitted and not yet done."""


class Device(ABC):
    """A computing device and the memory around it. Thread-safe. Usable as a context manager that closes it."""

    kind: Literal["cpu", "cuda", "simulated"]
    torch_device: torch.device
    addresses_host: bool
    """The device can attend host memory in place, without a copy."""
    copies_aside: bool = True
    """Copies run beside computing and take nothing from it; not so where the cores that compute do them."""
    follows_accesses: bool = False
    """The regions that operations name are looked at, as a simulated accelerator does; else nobody has to list them."""
    up: Stream
    down: Stream
    disk: Stream

    @abstractmethod
    def run(
        self,
        work: Callable[[], T],
        *,
        name: str = "",
        reads: Sequence[Region] = (),
        writes: Sequence[Region] = (),
        after: Sequence[Event] = (),
    ) -> T:
        """Do `work` on the compute stream, on the calling thread, after the events in `after`.

        On CUDA the current stream waits for the events and `work` enqueues kernels, so that the host knows nothing of
        their completion: a copy that touches what `work` touches needs `after=[device.record()]`, on every device.
        Raises the exception of a failed event in `after` without doing the work; RaceError as `Stream.submit`.
        """

    @abstractmethod
    def record(self) -> Event:
        """An event that is done once everything given to `run` so far is."""

    @abstractmethod
    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised device memory, a normal tensor in inference mode too."""

    @abstractmethod
    def host_empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised host memory, pinned where the device needs that and gets it (see `pin_failures`)."""

    @abstractmethod
    def free_bytes(self) -> int:
        """Bytes of device memory that can still be taken."""

    @abstractmethod
    def total_bytes(self) -> int:
        """Bytes of device memory there are."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block until every stream and the compute stream are idle; errors stay with their events."""

    @abstractmethod
    def close(self) -> None:
        """End every thread. What runs is finished, what is queued fails with ClosedError. Idempotent.

        Dropping the device or leaving the interpreter does the same, but waits at most two seconds for what runs.
        """

    @property
    def pinned_bytes(self) -> int:
        """Bytes of host memory pinned now for this device, as taken: pinned memory comes in powers of two."""
        return 0

    @property
    def pin_failures(self) -> tuple[str, ...]:
        """For each `host_empty` that gave pageable memory where pinned was wanted: why."""
        return ()

    @property
    def bounce(self) -> Bounce | None:
        """What copies between the device and host memory go through; None where they need nothing."""
        return None

    def host_free_bytes(self) -> int:
        """Bytes of host memory that can still be taken."""
        return host_memory()[0]

    def host_total_bytes(self) -> int:
        """Bytes of host memory there are."""
        return host_memory()[1]

    @abstractmethod
    def poison(self, tensors: Sequence[torch.Tensor], region: Region, *, by_compute: bool = False) -> None:
        """Say that a slot is free. A simulated accelerator fills `tensors` with NaN; otherwise nothing happens.

        Counts as a write of `region` by the calling thread, which must know that every access to it is done; with
        `by_compute`, as a write by the compute stream, which must merely be ordered after them.
        """

    @abstractmethod
    def host_access(self, *, name: str = "", reads: Sequence[Region] = (), writes: Sequence[Region] = ()) -> None:
        """Say that the calling thread reads or writes regions itself, now; raises RaceError as `Stream.submit`."""

    def lock(self) -> Lock:
        """A re-entrant lock, whose holders know what earlier holders knew (which a simulated accelerator tracks)."""
        return threading.RLock()

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
