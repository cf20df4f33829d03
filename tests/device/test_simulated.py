"""The simulated accelerator: late copies, garbage in flight and in free slots, links that take their time."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from tieredkv.device import SimulatedAccelerator, Traced
from tieredkv.errors import RaceError


def test_what_is_in_flight_is_garbage_until_done() -> None:
    with SimulatedAccelerator(latency_seconds=0.05) as device:
        source, target = torch.arange(4.0), device.empty((4,), torch.float32)
        target.zero_()
        event = device.up.submit(lambda: target.copy_(source), garbage=[target])
        time.sleep(0.02)
        assert target.isnan().all() and not event.done()
        event.wait()
        assert torch.equal(target, source)
        assert 0.05 <= event.seconds < 1


def test_a_destination_stays_whole_until_its_earlier_reader_is_done() -> None:
    gate = threading.Event()
    with SimulatedAccelerator() as device:
        target, copy = torch.ones(4), torch.zeros(4)
        reader = device.down.submit(lambda: (gate.wait(), copy.copy_(target)), reads=[("hot", 0)])
        writer = device.up.submit(lambda: target.fill_(2.0), writes=[("hot", 0)], after=[reader], garbage=[target])
        time.sleep(0.01)
        assert (target == 1).all()
        gate.set()
        writer.wait()
        assert (copy == 1).all() and (target == 2).all()


@pytest.mark.parametrize(
    ("dtype", "wanted"),
    [(torch.uint8, 255), (torch.int8, 127), (torch.int64, 2**63 - 1), (torch.bool, True)],
)
def test_a_free_slot_of_integers_is_garbage(dtype: torch.dtype, wanted: int) -> None:
    with SimulatedAccelerator() as device:
        pool = torch.zeros(2, 3, 4, dtype=dtype)
        device.poison([pool[:, 1]], ("hot", 1))
        assert (pool[:, 1] == wanted).all()
        assert not pool[:, [0, 2]].any(), "more than the slot was cleared"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_a_free_slot_of_floats_is_nan(dtype: torch.dtype) -> None:
    with SimulatedAccelerator() as device, torch.inference_mode():
        pool = device.empty((2, 3, 4), dtype).zero_()
        device.poison([pool[:, 1]], ("hot", 1))
        assert pool[:, 1].float().isnan().all()
        assert not pool[:, [0, 2]].float().any()


def test_a_slot_is_freed_after_its_last_access() -> None:
    with SimulatedAccelerator() as device:
        pool = torch.zeros(4)
        down = device.down.submit(lambda: None, reads=[("hot", 1)])
        with pytest.raises(RaceError):
            device.poison([pool], ("hot", 1))
        assert not pool.any(), "poisoned in spite of the race"
        down.wait()
        device.poison([pool], ("hot", 1))
        device.up.submit(lambda: None, writes=[("hot", 1)])
        with pytest.raises(RaceError, match="'poison'"):
            threading_race(device)


def threading_race(device: SimulatedAccelerator) -> None:
    """Reuse, in another thread, of a slot that this one freed."""
    device.poison([], ("hot", 2))
    errors: list[BaseException] = []

    def reuse() -> None:
        try:
            device.up.submit(lambda: None, writes=[("hot", 2)])
        except RaceError as error:
            errors.append(error)

    thread = threading.Thread(target=reuse)
    thread.start()
    thread.join()
    raise errors[0]


def test_a_slot_may_be_freed_in_the_order_of_computing() -> None:
    with SimulatedAccelerator() as device:
        device.run(lambda: None, reads=[("hot", 1)])
        with pytest.raises(RaceError):
            device.poison([], ("hot", 1))
        device.poison([], ("hot", 1), by_compute=True)
        device.run(lambda: None, writes=[("hot", 1)])
        device.poison([], ("hot", 1), by_compute=True)
        with pytest.raises(RaceError):
            device.up.submit(lambda: None, writes=[("hot", 1)])
        device.up.submit(lambda: None, writes=[("hot", 1)], after=[device.record()])
        with pytest.raises(RaceError):
            device.poison([], ("hot", 1), by_compute=True)


@pytest.mark.usefixtures("no_collection")
def test_a_link_takes_its_time_and_not_much_more() -> None:
    with SimulatedAccelerator(latency_seconds=0.001, bytes_per_second=1e6) as device:
        start = time.perf_counter()
        for _ in range(20):
            device.up.submit(lambda: None, nbytes=2000)
        for _ in range(20):
            device.down.submit(lambda: None, nbytes=2000)
        device.synchronize()
        seconds = time.perf_counter() - start
    assert 20 * 0.003 <= seconds < 2 * 20 * 0.003, "the two directions overlap, and sleeping too long does not add up"


def test_a_sleep_that_is_too_long_does_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda seconds: time.sleep(seconds + 0.004))
    monkeypatch.setattr("tieredkv.device.simulated.time", clock)
    with SimulatedAccelerator(latency_seconds=0.005) as device:
        events = [device.up.submit(lambda: None) for _ in range(20)]
        device.synchronize()
    assert 0.1 <= events[-1].ended_at - events[0].started_at < 0.15


def test_random_delays_shuffle_the_streams() -> None:
    orders, seconds = set(), 0.0
    for seed in range(8):
        with SimulatedAccelerator(seed=seed, max_delay_seconds=0.004) as device:
            events = [stream.submit(lambda: None, name=stream.name) for stream in (device.up, device.down, device.disk)]
            device.synchronize()
            orders.add(tuple(event.name for event in sorted(events, key=lambda event: event.ended_at)))
            seconds += sum(event.seconds for event in events)
    assert len(orders) > 1
    assert seconds > 24 * 0.001  # 0.002 on average


def test_a_trace_tells_what_was_submitted() -> None:
    with SimulatedAccelerator(is_traced=True) as device:
        up = device.up.submit(lambda: None, name="promote", reads=[("warm", 1)], writes=[("hot", 2)])
        device.run(lambda: None, name="attend", reads=[("hot", 2)], after=[up])
        device.record().wait()
        device.host_access(name="verify", reads=[("hot", 2)])
        device.poison([], ("hot", 2))
        assert device.trace == [
            Traced("up", "promote", (("warm", 1),), (("hot", 2),)),
            Traced("compute", "attend", (("hot", 2),), ()),
            Traced("host", "verify", (("hot", 2),), ()),
            Traced("host", "poison", (), (("hot", 2),)),
        ]
    with SimulatedAccelerator() as device:
        device.up.submit(lambda: None)
        assert device.trace == []


@pytest.mark.usefixtures("no_collection")
def test_computing_takes_the_time_that_was_asked_for() -> None:
    with SimulatedAccelerator(compute_seconds={"attend": 0.02}) as device:
        started = time.perf_counter()
        assert device.run(lambda: 5, name="attend") == 5
        assert time.perf_counter() - started >= 0.02
        started = time.perf_counter()
        device.run(lambda: None, name="write")
        assert time.perf_counter() - started < 0.02


def test_its_memory_is_apart_from_the_host() -> None:
    with SimulatedAccelerator() as device:
        assert (device.kind, device.torch_device.type, device.addresses_host) == ("simulated", "cpu", False)
    with SimulatedAccelerator(addresses_host=True) as device:
        assert device.addresses_host


def test_what_a_stream_did_not_take_is_waited_for_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with SimulatedAccelerator() as device:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", cannot)
            with pytest.raises(RuntimeError, match="can't start"):
                device.up.submit(lambda: None, reads=[("warm", 0)], writes=[("stage", 0)], finish=lambda *_: None)
        device.run(lambda: None, writes=[("warm", 0), ("stage", 0)])
        started = device.up.submit(lambda: None, writes=[("warm", 0)], after=[device.record()])
        with pytest.raises(RaceError):
            device.run(lambda: None, writes=[("warm", 0)])
        started.wait()
