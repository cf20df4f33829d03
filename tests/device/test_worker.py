"""Streams that are worker threads: order, failure, priority, and what a work may rely on."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tieredkv.device import CpuDevice, Device, Event, SimulatedAccelerator
from tieredkv.errors import RaceError

MAKERS: dict[str, Callable[[], Device]] = {
    "cpu": CpuDevice,
    "simulated": lambda: SimulatedAccelerator(max_delay_seconds=1e-4),
}


@pytest.fixture(params=MAKERS)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    with MAKERS[request.param]() as device:
        yield device


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Works that wait for it hold a stream until it is set; it is set at the end in any case."""
    gate = threading.Event()
    yield gate
    gate.set()


def nothing() -> None:
    pass


def test_one_stream_keeps_the_order(device: Device) -> None:
    seen: list[int] = []
    for number in range(200):
        device.up.submit(lambda number=number: seen.append(number))
    device.synchronize()
    assert seen == list(range(200))


def test_after_holds_back_over_streams(device: Device, gate: threading.Event) -> None:
    seen: list[str] = []

    def read_file() -> None:
        gate.wait()
        seen.append("disk")

    first = device.disk.submit(read_file)
    second = device.up.submit(lambda: seen.append("up"), after=[first])
    third = device.down.submit(lambda: seen.append("down"), after=[second])
    time.sleep(0.01)
    assert seen == [] and not second.done() and device.up.pending == 1
    gate.set()
    third.wait()
    assert seen == ["disk", "up", "down"]
    assert first.done() and second.done() and device.up.pending == 0


def test_one_direction_does_not_block_another(device: Device, gate: threading.Event) -> None:
    device.down.submit(gate.wait)
    device.up.submit(nothing).wait()
    device.disk.submit(nothing).wait()
    assert device.down.pending == 1


def test_computing_waits_for_after(device: Device) -> None:
    seen: list[str] = []
    event = device.up.submit(lambda: (time.sleep(0.01), seen.append("up")))
    assert device.run(lambda: (seen.append("compute"), 7)[1], after=[event]) == 7
    assert seen == ["up", "compute"]


def test_a_higher_priority_goes_first(device: Device, gate: threading.Event) -> None:
    seen: list[str] = []
    device.up.submit(gate.wait, priority=9)
    for name, priority in [("a", 0), ("b", 0), ("c", 5), ("d", 5), ("e", 1)]:
        device.up.submit(lambda name=name: seen.append(name), priority=priority)
    gate.set()
    device.synchronize()
    assert seen == ["c", "d", "e", "a", "b"]


def test_a_held_back_operation_does_not_hold_back_other_priorities(device: Device, gate: threading.Event) -> None:
    late = device.disk.submit(gate.wait)
    urgent = device.up.submit(nothing, after=[late], priority=5)
    device.up.submit(nothing).wait()
    assert not urgent.done()


def test_priority_does_not_deadlock_on_its_own_stream(device: Device, gate: threading.Event) -> None:
    device.up.submit(gate.wait, priority=9)
    low = device.up.submit(nothing, priority=0)
    there_and_back = device.down.submit(nothing, after=[low])
    high = device.up.submit(nothing, after=[there_and_back], priority=5)
    gate.set()
    high.wait()
    assert low.done()


def test_an_exception_reaches_everyone_who_waits_every_time(device: Device) -> None:
    def fail() -> None:
        raise KeyError("gone")

    ran: list[str] = []
    first = device.disk.submit(fail)
    second = device.up.submit(lambda: ran.append("second"), after=[first])
    depths = []
    for event in (first, second, first, second):
        with pytest.raises(KeyError, match="gone") as caught:
            event.wait()
        assert caught.value is first.error
        depths.append(len(caught.traceback))
    assert depths[:2] == depths[2:], "the traceback grows with each wait"
    with pytest.raises(KeyError):
        device.run(lambda: ran.append("compute"), after=[second])
    assert ran == [] and first.done() and second.done()
    device.disk.submit(nothing).wait()


def test_an_exit_inside_a_work_does_not_end_the_thread(device: Device) -> None:
    with pytest.raises(SystemExit):
        device.up.submit(lambda: sys.exit(3)).wait()
    device.up.submit(nothing).wait()


@pytest.mark.parametrize("fails", [False, True])
def test_a_done_operation_holds_no_tensor(device: Device, fails: bool) -> None:
    def submit() -> tuple[Event, weakref.ref[torch.Tensor]]:
        tensor = torch.ones(4)

        def work() -> None:
            copy = tensor.clone()
            if fails:
                try:
                    raise OSError("inner")
                except OSError as error:
                    raise ValueError(copy.shape) from error

        return device.up.submit(work, garbage=[tensor]), weakref.ref(tensor)

    gc.disable()
    try:
        event, tensor = submit()
        with contextlib.suppress(ValueError):
            event.wait()
        assert (event.error is not None) is fails
        assert tensor() is None
    finally:
        gc.enable()


def test_seconds_are_those_of_the_work() -> None:
    with CpuDevice() as device:
        device.up.submit(lambda: time.sleep(0.02))
        event = device.up.submit(lambda: time.sleep(0.01))
        event.wait()
        assert 0.01 <= event.seconds < 0.5
        failed = device.up.submit(lambda: 1 / 0)
        never = device.up.submit(nothing, after=[failed])
        device.synchronize()
        assert never.seconds == 0.0


def test_a_settled_event_calls_back_at_once_and_once() -> None:
    calls: list[int] = []
    event = Event()
    event.when_settled(lambda: calls.append(1))
    assert calls == []
    event.settle()
    event.when_settled(lambda: calls.append(2))
    assert calls == [1, 2]


def test_many_threads_submit_at_once(device: Device) -> None:
    seen: list[tuple[int, int]] = []

    def submit(thread: int) -> None:
        for number in range(100):
            device.up.submit(lambda number=number: seen.append((thread, number)))

    threads = [threading.Thread(target=submit, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    device.synchronize()
    for thread in range(4):
        assert [number for other, number in seen if other == thread] == list(range(100))


def test_a_worker_uses_one_core_and_nobody_else_is_changed() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    seen: dict[str, int] = {}
    try:
        with CpuDevice() as device:
            device.up.submit(lambda: seen.update(worker=torch.get_num_threads())).wait()
            device.up.submit(lambda: device.down.submit(nothing)).wait()
            device.down.submit(lambda: seen.update(second=torch.get_num_threads())).wait()
            later = threading.Thread(target=lambda: seen.update(later=torch.get_num_threads()))
            later.start()
            later.join()
        assert seen == {"worker": 1, "second": 1, "later": 3}
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_works_write_what_inference_mode_allocated(device: Device) -> None:
    with torch.inference_mode():
        target = device.empty((2, 4), torch.float32)
        host = device.host_empty((4,), torch.float32)
        view, source = target[1], torch.arange(4.0)
        event = device.up.submit(lambda: (host.copy_(source), view.copy_(host)))
        event.wait()
        target[0] = 1.0
    assert torch.equal(target[1], source) and torch.equal(host, source)
    weight = torch.ones(4, requires_grad=True)
    made: list[torch.Tensor] = []
    device.up.submit(lambda: made.append(weight * 2)).wait()
    assert not made[0].requires_grad and not made[0].is_inference()


def test_a_submission_is_cheap() -> None:
    with CpuDevice() as device:
        device.up.submit(nothing).wait()
        best_seconds = float("inf")
        for _ in range(20):
            start = time.perf_counter()
            for _ in range(100):
                device.up.submit(nothing)
            best_seconds = min(best_seconds, (time.perf_counter() - start) / 100)
            device.synchronize()
    assert best_seconds < 50e-6  # 3 µs on an idle machine


@settings(max_examples=30)
@given(st.data())
def test_delays_and_priorities_never_break_an_order(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 25))
    with SimulatedAccelerator(seed=data.draw(st.integers(0, 9)), max_delay_seconds=5e-4) as device:
        streams = [device.up, device.down, device.disk]
        finished: list[int] = []
        events: list[Event] = []
        before: list[set[int]] = []
        lanes: dict[tuple[int, int], int] = {}
        for number in range(count):
            lane = (data.draw(st.integers(0, 2)), data.draw(st.sampled_from([0, 0, 1])))
            after = data.draw(st.sets(st.integers(0, number - 1), max_size=3)) if number else set()
            work = lambda number=number: finished.append(number)  # noqa: E731
            chosen = [events[index] for index in after]
            events.append(streams[lane[0]].submit(work, after=chosen, priority=lane[1]))
            before.append(after | ({lanes[lane]} if lane in lanes else set()))
            lanes[lane] = number
        device.synchronize()
    place = {number: index for index, number in enumerate(finished)}
    assert sorted(place) == list(range(count))
    assert all(place[earlier] < place[number] for number in place for earlier in before[number])


def test_what_finishes_an_operation_comes_before_its_event(device: Device) -> None:
    seen: list[object] = []
    event = device.up.submit(lambda: "moved", finish=lambda result, took: seen.append((result, took())))
    event.wait()
    assert len(seen) == 1 and seen[0][0] == "moved" and 0 <= seen[0][1] < 1  # type: ignore[index]
    failed = device.up.submit(lambda: 2, finish=lambda result, took: result / 0)
    with pytest.raises(ZeroDivisionError):
        failed.wait()
    broken = device.up.submit(lambda: 1 / 0, finish=lambda result, took: seen.append(result))
    with pytest.raises(ZeroDivisionError):
        broken.wait()
    after = device.disk.submit(lambda: seen.append("after"), after=[failed])
    with pytest.raises(ZeroDivisionError):
        after.wait()
    device.synchronize()
    assert len(seen) == 1 and device.up.pending == 0


def test_what_touches_the_same_has_to_come_after_the_finish() -> None:
    """It is no part of its stream: on a GPU the next operation runs beside it."""
    with SimulatedAccelerator() as device:
        first = device.up.submit(nothing, writes=[("stage", 0)], finish=lambda result, took: None)
        with pytest.raises(RaceError):
            device.up.submit(nothing, writes=[("stage", 0)])
        device.up.submit(nothing, writes=[("stage", 0)], after=[first]).wait()
