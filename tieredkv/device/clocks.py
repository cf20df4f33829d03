"""Vector clocks over the regions of a simulated accelerator: they find every unordered conflict, not the unlucky ones.

Each stream (each priority of it), the compute stream and each host thread is a process. A process knows the ticks of
every other that its latest operation comes after. Two accesses of one region, one of them a write, by two processes
must be ordered: the later one knows the tick of the earlier one. All is decided when an operation is submitted, from
what was declared, so that the same program is judged the same way whatever the threads do.

Imports: errors, device.base.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence

from tieredkv.device.base import Region
from tieredkv.errors import RaceError

Process = tuple[str, int]
"""("up", priority), ("compute", 0) or ("host", number)."""

Clock = dict[Process, int]
"""For each process the tick of its last operation that is known to come before."""


@dataclasses.dataclass(frozen=True, slots=True)
class Access:
    """One operation's use of one region."""

    process: Process
    tick: int
    label: str

    def is_before(self, clock: Clock) -> bool:
        """Whether an operation with this clock comes after the access."""
        return clock.get(self.process, 0) >= self.tick


@dataclasses.dataclass(slots=True)
class History:
    """The last write of a region and the reads since."""

    write: Access | None = None
    reads: dict[Process, Access] = dataclasses.field(default_factory=dict)


class Clocks:
    """What every process knows, and the history of every region. Thread-safe.

    Attributes:
        lock: hold it to make a step and the submission that belongs to it one.
        races: conflicts found so far, each of which raised.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.races = 0
        self._clocks: dict[Process, Clock] = {}
        self._histories: dict[Region, History] = {}
        self._inner: dict[Region, set[Region]] = {}
        self._local = threading.local()
        self._threads = itertools.count()

    def host(self) -> Process:
        """The process of the calling thread."""
        # Not the thread's ident, which the system gives again to a later thread that knows nothing.
        if not hasattr(self._local, "process"):
            self._local.process = ("host", next(self._threads))
        process: Process = self._local.process
        return process

    def known_to(self, process: Process) -> Clock:
        """A copy of what a process knows."""
        with self.lock:
            return dict(self._clocks.get(process, {}))

    def learn(self, *clocks: Clock) -> None:
        """Let the calling thread know that the operations with these clocks are done."""
        with self.lock:
            join(self._clocks.setdefault(self.host(), {}), clocks)

    def everything(self) -> Clock:
        """What all streams and the compute stream know together."""
        with self.lock:
            return join({}, [clock for process, clock in self._clocks.items() if process[0] != "host"])

    def step(
        self,
        process: Process,
        label: str,
        reads: Sequence[Region] = (),
        writes: Sequence[Region] = (),
        after: Iterable[Clock] = (),
    ) -> Clock:
        """Add the calling thread's next operation to a process and give its clock.

        Raises RaceError when an earlier conflicting access is not ordered before it; nothing is added then.
        """
        with self.lock:
            clock = join(self.known_to(process), [self.known_to(self.host()), *after])
            tick = clock.get(process, 0) + 1
            access = Access(process, tick, label)
            clock[process] = tick
            for region in reads:
                self._check(region, access, clock, is_write=False)
            for region in writes:
                self._check(region, access, clock, is_write=True)
            for region in reads:
                self._history(region).reads[process] = access
            for region in writes:
                self._overwrite(region, access)
            self._clocks[process] = clock
            return dict(clock)

    def _check(self, region: Region, access: Access, clock: Clock, *, is_write: bool) -> None:
        for other in self._overlapping(region):
            history = self._histories[other]
            earlier = [("written", history.write)] if history.write is not None else []
            if is_write:
                earlier += [("read", read) for read in history.reads.values()]
            for verb, before in earlier:
                if not before.is_before(clock):
                    self.races += 1
                    raise RaceError(
                        f"{access.label!r} ({_words(access.process)}) {'writes' if is_write else 'reads'} {region!r}, "
                        f"and nothing orders it after {before.label!r} ({_words(before.process)}).",
                        wanted=f"an order between the two accesses of {other!r}",
                        got=f"{other!r} {verb} by {before.label!r}, which may still be running",
                        change="pass its event in after=[...], or device.record() where it was computing",
                    )

    def _overlapping(self, region: Region) -> Iterator[Region]:
        """The regions with a history that contain this one or lie in it."""
        for length in range(1, len(region) + 1):
            if region[:length] in self._histories:
                yield region[:length]
        yield from self._inner.get(region, ())

    def _history(self, region: Region) -> History:
        if region not in self._histories:
            self._histories[region] = History()
            for length in range(1, len(region)):
                self._inner.setdefault(region[:length], set()).add(region)
        return self._histories[region]

    def _overwrite(self, region: Region, access: Access) -> None:
        # Everything inside is ordered before this write, which stands for it from now on.
        for inner in self._inner.pop(region, ()):
            del self._histories[inner]
            for length in range(1, len(inner)):
                self._inner.get(inner[:length], set()).discard(inner)
        history = self._history(region)
        history.write, history.reads = access, {}


def join(clock: Clock, others: Iterable[Clock]) -> Clock:
    """Raise `clock` in place to the latest tick of each process; returns it."""
    for other in others:
        for process, tick in other.items():
            if tick > clock.get(process, 0):
                clock[process] = tick
    return clock


def _words(process: Process) -> str:
    name, number = process
    return f"host thread {number}" if name == "host" else f"stream {name}" + (f", priority {number}" if number else "")
