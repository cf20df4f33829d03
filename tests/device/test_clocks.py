"""Vector clocks: each kind of conflict is found without its wait and accepted with it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tieredkv.device import CpuDevice, Device, Event, Region, SimulatedAccelerator, holds
from tieredkv.device.clocks import Clocks
from tieredkv.errors import RaceError

SLOT: Region = ("hot", 3)


@pytest.fixture
def device() -> Iterator[SimulatedAccelerator]:
    with SimulatedAccelerator() as device:
        yield device


def nothing() -> None:
    pass


def access(
    device: SimulatedAccelerator,
    who: str,
    *,
    reads: Sequence[Region] = (),
    writes: Sequence[Region] = (),
    after: Sequence[Event] = (),
) -> Event:
    """One access by "compute", "host" or a stream, and the event after which it is done."""
    if who == "host":
        for event in after:
            event.wait()
        device.host_access(name="host", reads=reads, writes=writes)
        return Event()
    if who == "compute":
        device.run(nothing, name="compute", reads=reads, writes=writes, after=after)
        return device.record()
    return getattr(device, who).submit(nothing, name=who, reads=reads, writes=writes, after=after)


def reads(region: Region = SLOT) -> dict[str, Sequence[Region]]:
    return {"reads": [region]}


def writes(region: Region = SLOT) -> dict[str, Sequence[Region]]:
    return {"writes": [region]}


CONFLICTS = {
    "a demotion before its block is written": ("compute", writes(), "down", reads()),
    "a promotion over what is attended": ("compute", reads(), "up", writes()),
    "a promotion over what was written": ("compute", writes(), "up", writes()),
    "attention before the block arrived": ("up", writes(), "compute", reads()),
    "new tokens over a block that arrives": ("up", writes(), "compute", writes()),
    "new tokens over a block that leaves": ("down", reads(), "compute", writes()),
    "a promotion over a block that leaves": ("down", reads(), "up", writes()),
    "a demotion of a block that arrives": ("up", writes(), "down", reads()),
    "a file written before its block arrived": ("down", writes(), "disk", reads()),
    "a block sent up before it was read": ("disk", writes(), "up", reads()),
    "a file read over what goes up": ("up", reads(), "disk", writes()),
    "a check on the host before the read": ("disk", writes(), "host", reads()),
    "a look at what is computed": ("compute", writes(), "host", reads()),
    "the host over what goes up": ("up", reads(), "host", writes()),
    "the host over what is attended": ("compute", reads(), "host", writes()),
}


@pytest.mark.parametrize("kind", CONFLICTS)
def test_a_conflict_needs_its_wait(device: SimulatedAccelerator, kind: str) -> None:
    first, first_use, second, second_use = CONFLICTS[kind]
    access(device, first, **first_use)
    device.up.submit(nothing)
    with pytest.raises(RaceError, match=r"\('hot', 3\)") as caught:
        access(device, second, **second_use)
    assert first in str(caught.value) and second in str(caught.value)
    assert device.clocks.races == 1


@pytest.mark.parametrize("kind", CONFLICTS)
def test_a_wait_settles_a_conflict(device: SimulatedAccelerator, kind: str) -> None:
    first, first_use, second, second_use = CONFLICTS[kind]
    event = access(device, first, **first_use)
    access(device, second, **second_use, after=[event])
    assert device.clocks.races == 0


@pytest.mark.parametrize("kind", CONFLICTS)
def test_a_wait_by_way_of_another_stream_settles_it(device: SimulatedAccelerator, kind: str) -> None:
    first, first_use, second, second_use = CONFLICTS[kind]
    event = access(device, first, **first_use)
    between = device.disk.submit(nothing, after=[event])
    access(device, second, **second_use, after=[between])
    assert device.clocks.races == 0


@pytest.mark.parametrize("kind", CONFLICTS)
def test_synchronize_settles_everything(device: SimulatedAccelerator, kind: str) -> None:
    first, first_use, second, second_use = CONFLICTS[kind]
    access(device, first, **first_use)
    device.synchronize()
    access(device, second, **second_use)
    assert device.clocks.races == 0


def test_a_race_is_found_however_long_the_first_is_done(device: SimulatedAccelerator) -> None:
    event = access(device, "up", **writes())
    Event.join(event)  # done, but nobody was told
    with pytest.raises(RaceError):
        access(device, "compute", **reads())


def test_what_raises_is_not_queued_and_changes_nothing(device: SimulatedAccelerator) -> None:
    event = access(device, "up", **writes())
    ran: list[int] = []
    for _ in range(2):
        with pytest.raises(RaceError):
            device.down.submit(lambda: ran.append(1), reads=[SLOT])
        with pytest.raises(RaceError):
            device.run(lambda: ran.append(2), reads=[SLOT])
    device.down.submit(nothing, reads=[SLOT], after=[event])
    device.synchronize()
    assert ran == [] and device.clocks.races == 4


@pytest.mark.parametrize("missing", ["up", "down", "disk", "compute"])
def test_readers_do_not_conflict_and_each_must_be_waited_for(device: SimulatedAccelerator, missing: str) -> None:
    readers = {who: access(device, who, **reads()) for who in ("up", "down", "disk", "compute")}
    others = [event for who, event in readers.items() if who != missing]
    with pytest.raises(RaceError, match=f"after '{missing}'"):
        access(device, "host", **writes(), after=others)
    access(device, "host", **writes(), after=[readers[missing]])


def test_other_slots_and_layers_do_not_conflict(device: SimulatedAccelerator) -> None:
    access(device, "up", **writes(("hot", 3, 0)))
    access(device, "compute", **writes(("hot", 3, 1)))
    access(device, "down", **reads(("hot", 4)))
    access(device, "disk", **writes(("warm", 3)))


def test_a_region_contains_the_longer_ones(device: SimulatedAccelerator) -> None:
    layer = access(device, "down", **reads(("hot", 3, 0)))
    with pytest.raises(RaceError, match=r"\('hot', 3, 0\) read by"):
        access(device, "up", **writes(SLOT))
    whole = access(device, "up", **writes(SLOT), after=[layer])
    with pytest.raises(RaceError, match=r"\('hot', 3\) written by"):
        access(device, "compute", **reads(("hot", 3, 1)))
    access(device, "compute", **reads(("hot", 3, 1)), after=[whole])


def test_done_teaches_the_host_and_so_does_wait(device: SimulatedAccelerator) -> None:
    gate = threading.Event()
    event = device.up.submit(gate.wait, writes=[SLOT])
    assert not event.done()
    with pytest.raises(RaceError):
        device.host_access(reads=[SLOT])
    gate.set()
    while not event.done():
        pass
    device.host_access(reads=[SLOT])


def test_waiting_for_a_failure_teaches_the_host_too(device: SimulatedAccelerator) -> None:
    event = device.up.submit(lambda: 1 / 0, writes=[SLOT])
    with pytest.raises(ZeroDivisionError):
        event.wait()
    device.host_access(writes=[SLOT])


def test_computing_after_an_event_teaches_the_host_nothing(device: SimulatedAccelerator) -> None:
    event = access(device, "up", **writes())
    device.run(nothing, reads=[SLOT], after=[event])
    with pytest.raises(RaceError):
        device.host_access(writes=[SLOT])
    with pytest.raises(RaceError):
        device.down.submit(nothing, reads=[SLOT])
    device.record().wait()
    device.host_access(writes=[SLOT])


def test_a_record_covers_what_came_before_it_only(device: SimulatedAccelerator) -> None:
    device.run(nothing, writes=[SLOT])
    early = device.record()
    device.run(nothing, reads=[SLOT])
    with pytest.raises(RaceError):
        device.up.submit(nothing, writes=[SLOT], after=[early])
    device.up.submit(nothing, writes=[SLOT], after=[device.record()])


def test_one_stream_is_ordered_but_its_priorities_are_not(device: SimulatedAccelerator) -> None:
    device.up.submit(nothing, writes=[SLOT])
    first = device.up.submit(nothing, writes=[SLOT])
    with pytest.raises(RaceError, match="priority 2"):
        device.up.submit(nothing, writes=[SLOT], priority=2)
    device.up.submit(nothing, writes=[SLOT], priority=2, after=[first])


def in_thread(work: Callable[[], object]) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except RaceError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def test_a_host_thread_knows_what_it_waited_for_and_no_other_does(device: SimulatedAccelerator) -> None:
    event = access(device, "up", **writes())
    in_thread(lambda: (event.wait(), device.host_access(reads=[SLOT])))
    with pytest.raises(RaceError):
        device.host_access(reads=[SLOT])


def test_a_lock_hands_on_what_its_holders_knew(device: SimulatedAccelerator) -> None:
    lock, other = device.lock(), device.lock()
    event = access(device, "up", **writes())

    def free() -> None:
        event.wait()
        with lock, lock:
            device.poison([], SLOT)

    in_thread(free)
    with pytest.raises(RaceError), other:
        device.up.submit(nothing, writes=[SLOT])
    in_thread(lambda: (lock.acquire(blocking=False), lock.release()))
    assert lock.acquire(blocking=False)
    device.up.submit(nothing, writes=[SLOT])
    lock.release()


@pytest.mark.parametrize("make", [CpuDevice, SimulatedAccelerator])
def test_who_has_a_lock_is_known(make: Callable[[], Device]) -> None:
    with make() as maker:
        lock = maker.lock()
        assert not holds(lock)
        seen: list[bool] = []
        with lock:
            with lock:
                assert holds(lock)
            in_thread(lambda: seen.extend([holds(lock), lock.acquire(blocking=False)]))
            assert holds(lock)
        assert not holds(lock) and seen == [False, False]


def test_a_work_knows_what_it_comes_after(device: SimulatedAccelerator) -> None:
    event = access(device, "down", **writes())
    without = device.disk.submit(lambda: device.host_access(reads=[SLOT]))
    Event.join(without)
    assert isinstance(without.error, RaceError)
    device.up.submit(lambda: device.host_access(reads=[SLOT]), after=[event]).wait()


def test_freed_regions_leave_no_history() -> None:
    clocks = Clocks()
    for slot in range(50):
        for layer in range(4):
            clocks.step(clocks.host(), "write", writes=[("hot", slot, layer)])
        clocks.step(clocks.host(), "free", writes=[("hot", slot)])
    assert len(clocks._histories) == 50
    assert sum(map(len, clocks._inner.values())) == 50  # what ("hot",) contains


STREAMS = ["up", "down", "disk", "compute"]


@settings(max_examples=150)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(STREAMS),
            st.sampled_from([("s",), ("s", 0), ("s", 1)]),
            st.booleans(),
            st.sets(st.integers(0, 11), max_size=2),
            st.booleans(),
        ),
        max_size=12,
    )
)
def test_clocks_agree_with_a_search_through_the_graph(
    program: list[tuple[str, Region, bool, set[int], bool]],
) -> None:
    """Each operation: where, what, whether it writes, which earlier ones it comes after, whether the host waits."""
    with SimulatedAccelerator() as device:
        events: list[Event] = []
        before: list[set[int]] = []
        host: set[int] = set()
        for number, (where, region, is_write, wanted, is_waited_for) in enumerate(program):
            after = {index for index in wanted if index < number}
            same = {index for index in range(number) if program[index][0] == where}
            known = set(host)
            for index in after | same:
                known |= {index} | before[index]
            races = any(
                index not in known
                and (is_write or program[index][2])
                and (
                    program[index][1][: len(region)] == region or region[: len(program[index][1])] == program[index][1]
                )
                for index in range(number)
            )
            use = writes(region) if is_write else reads(region)
            if races:
                with pytest.raises(RaceError):
                    access(device, where, **use, after=[events[index] for index in after])
                return
            events.append(access(device, where, **use, after=[events[index] for index in after]))
            before.append(known)
            if is_waited_for:
                events[-1].wait()
                host |= known | {number}
        assert device.clocks.races == 0
