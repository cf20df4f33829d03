"""CUDA: the same order on a GPU (marked `gpu`), and the waits it makes, seen through a recording stand-in."""

from __future__ import annotations

import contextlib
import gc
import shutil
import threading
import time
import weakref
from collections.abc import Iterator

import pytest
import torch
from emulated_cuda import EmulatedGpu

from tieredkv.device import CpuDevice, CudaDevice, Event, Took, device_for
from tieredkv.device.cuda import CopyClock, CopyLane, CudaEvent
from tieredkv.device.memory import pinned_size
from tieredkv.device.worker import Operation
from tieredkv.errors import ConfigError


class FakeEvent:
    """Done when it is waited for, and before that unless the GPU is busy."""

    is_gpu_busy = False

    def __init__(self, enable_timing: bool = False) -> None:
        self.is_awaited = False

    def record(self, stream: FakeStream) -> None:
        stream.log.append("record")

    def query(self) -> bool:
        return self.is_awaited or not self.is_gpu_busy

    def synchronize(self) -> None:
        self.is_awaited = True

    def elapsed_time(self, other: FakeEvent) -> float:
        return 5.0


class FakeStream:
    """Writes down what is enqueued."""

    def __init__(self, device: object = None) -> None:
        self.log: list[object] = []

    def wait_event(self, event: FakeEvent) -> None:
        self.log.append(("wait", event))

    def synchronize(self) -> None:
        self.log.append("synchronize")
        FakeEvent.is_gpu_busy = False


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeStream]:
    """The current stream of a torch.cuda without a GPU."""
    current = FakeStream()
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(FakeEvent, "is_gpu_busy", False)
    yield current


def fake(event: Event) -> FakeEvent:
    assert isinstance(event, CudaEvent) and isinstance(event.end, FakeEvent)
    return event.end


def lane_log(device: CudaDevice, name: str) -> list[object]:
    log: list[object] = getattr(device, name)._lane._stream.log
    return log


def test_a_copy_waits_on_its_stream_for_computing(current: FakeStream) -> None:
    with CudaDevice("cuda:0") as device:
        device.run(lambda: current.log.append("kernel"))
        recorded = device.record()
        assert current.log == ["kernel", "record"]
        log = lane_log(device, "down")
        event = device.down.submit(lambda: log.append("copy"), after=[recorded])
        event.wait()
        assert log == [("wait", fake(recorded)), "copy", "record", "record"]
        assert event.seconds == 0.005


def test_what_the_host_does_before_a_copy_is_none_of_its_time(current: FakeStream) -> None:
    clock = CopyClock()
    lane = CopyLane(torch.device("cuda:0"), clock)
    log: list[object] = lane._stream.log  # type: ignore[attr-defined]

    def work() -> None:
        log.append("host")
        for head in range(2):
            clock.begins()
            log.append(f"copy {head}")

    event = CudaEvent()
    lane.issue(Operation(None, event), work)
    assert log == ["host", "record", "copy 0", "copy 1", "record"]
    clock.begins()  # of no operation
    assert len(log) == 5


def test_computing_waits_on_its_stream_for_a_copy_and_the_host_does_not(current: FakeStream) -> None:
    FakeEvent.is_gpu_busy = True
    with CudaDevice("cuda:0") as device:
        event = device.up.submit(lambda: None)
        device.run(lambda: current.log.append("kernel"), after=[event])
        assert current.log == [("wait", fake(event)), "kernel"]
        assert not event.done() and device.up.pending == 1
        device.synchronize()
        assert event.done() and device.up.pending == 0


def test_a_file_is_written_after_the_copy_is_done_and_not_merely_enqueued(current: FakeStream) -> None:
    FakeEvent.is_gpu_busy = True
    with CudaDevice("cuda:0") as device:
        copy = device.down.submit(lambda: None)
        seen: list[bool] = []
        device.disk.submit(lambda: seen.append(fake(copy).is_awaited), after=[copy]).wait()
        assert seen == [True]


def test_a_copy_waits_for_the_file_before_it_is_enqueued(current: FakeStream) -> None:
    gate = threading.Event()
    with CudaDevice("cuda:0") as device:
        read = device.disk.submit(gate.wait)
        up = device.up.submit(lambda: None, after=[read])
        time.sleep(0.01)
        assert lane_log(device, "up") == [] and not up.done()
        gate.set()
        up.wait()
        assert lane_log(device, "up") == ["record", "record"]


@pytest.mark.parametrize("way", ["wait", "done", "next", "close"])
def test_tensors_are_held_until_the_copy_is_done_and_no_longer(current: FakeStream, way: str) -> None:
    FakeEvent.is_gpu_busy = True
    with CudaDevice("cuda:0") as device:
        source = torch.ones(4)
        copy = device.up.submit(lambda source=source: source.sum())
        tensor = weakref.ref(source)
        del source
        Event.join(device.up.submit(lambda: None))
        assert not copy.done() and tensor() is not None
        if way == "wait":
            copy.wait()
        elif way == "close":
            device.close()
        else:
            FakeEvent.is_gpu_busy = False
            assert way == "next" or copy.done()
            Event.join(device.up.submit(lambda: None) if way == "next" else copy)
        gc.collect()
        assert tensor() is None


def test_a_failure_lets_what_was_enqueued_finish(current: FakeStream) -> None:
    with CudaDevice("cuda:0") as device:
        failed = device.up.submit(lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            failed.wait()
        assert lane_log(device, "up")[-1] == "synchronize"
        with pytest.raises(ZeroDivisionError):
            device.run(lambda: None, after=[failed])
        with pytest.raises(ZeroDivisionError):
            device.disk.submit(lambda: None, after=[failed]).wait()
        assert failed.done() and failed.seconds == 0.0


def test_a_device_is_found_by_its_torch_device() -> None:
    with device_for("cpu") as device:
        assert isinstance(device, CpuDevice) and device.addresses_host and device.kind == "cpu"
    with pytest.raises(ConfigError, match="meta"):
        device_for(torch.device("meta"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_cuda_without_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="cuda"):
        device_for("cuda")


@pytest.fixture(params=["emulated", pytest.param("real", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[CudaDevice]:
    """A GPU, or one made of ordinary memory."""
    if request.param == "emulated" and shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler")
    with EmulatedGpu() if request.param == "emulated" else contextlib.nullcontext(), CudaDevice("cuda:0") as device:
        yield device


def test_gpu_blocks_go_up_and_down_in_order(device: CudaDevice) -> None:
    host = device.host_empty((64, 1 << 18), torch.float32)
    back = device.host_empty((64, 1 << 18), torch.float32)
    assert device.pin_failures == () and device.pinned_bytes == 2 * pinned_size(host.nbytes)
    target = device.empty(host.shape, torch.float32)
    for number in range(20):
        fill = device.disk.submit(lambda number=number: host.fill_(number))
        up = device.up.submit(lambda: target.copy_(host, non_blocking=True), after=[fill])
        device.run(lambda: target.add_(1), after=[up])
        down = device.down.submit(lambda: back.copy_(target, non_blocking=True), after=[device.record()])
        down.wait()
        assert (back == number + 1).all()
        assert 0 < down.seconds < 1
    assert device.up.pending == device.down.pending == 0


@pytest.mark.gpu
@pytest.mark.usefixtures("no_collection")
def test_gpu_a_late_kernel_holds_back_the_copy_and_not_the_host() -> None:
    with device_for("cuda") as device:
        target = device.empty((1 << 20,), torch.float32)
        back = device.host_empty((1 << 20,), torch.float32)
        device.run(lambda: (torch.cuda._sleep(200_000_000), target.fill_(7)))
        start = time.perf_counter()
        down = device.down.submit(lambda: back.copy_(target, non_blocking=True), after=[device.record()])
        Event.join(down)
        assert not down.done() and time.perf_counter() - start < 0.05
        down.wait()
        assert (back == 7).all()


def sources_dropped(device: CudaDevice) -> bool:
    """Whether copies read what was there when they were submitted, though nothing else holds it."""
    back = device.host_empty((1 << 20,), torch.float32)
    for number in range(50):
        source = torch.full((1 << 20,), float(number), device=device.torch_device)
        event = device.down.submit(lambda source=source: back.copy_(source, non_blocking=True), after=[device.record()])
        del source
        Event.join(event)  # it is enqueued, and not done
        torch.full((1 << 20,), -1.0, device=device.torch_device)
        event.wait()
        if not (back == number).all():
            return False
    return True


def test_gpu_sources_may_be_dropped_after_submission(device: CudaDevice) -> None:
    assert sources_dropped(device)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_sources_are_there_because_they_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    enqueued = CudaEvent.enqueued
    monkeypatch.setattr(CudaEvent, "enqueued", lambda self, begin, end, work: enqueued(self, begin, end, None))
    with EmulatedGpu(eagerness=0.9), CudaDevice("cuda:0") as device:
        assert not sources_dropped(device)


def test_gpu_copies_go_on_while_one_is_finished(device: CudaDevice) -> None:
    gate, seen = threading.Event(), list[object]()
    host = device.host_empty((1 << 10,), torch.float32)
    target = device.empty((2, 1 << 10), torch.float32)
    host.fill_(3)

    def finish(copied: torch.Tensor, took: Took) -> None:
        gate.wait()
        seen.append((float(copied.sum()), took()))
        copied.add_(1)  # is done before the event

    def first() -> torch.Tensor:
        return target[0].copy_(host, non_blocking=True)

    event = device.up.submit(first, finish=finish)
    device.up.submit(lambda: target[1].copy_(host, non_blocking=True)).wait()
    assert not event.done() and device.up.pending == 1 and not seen
    gate.set()
    event.wait()
    assert seen[0][0] == 3 << 10 and seen[0][1] > 0  # type: ignore[index]
    assert device.run(lambda: float(target.sum())) == 7 << 10
    assert device.up.pending == 0


def test_gpu_what_cannot_be_finished_is_over_when_that_is_said(
    monkeypatch: pytest.MonkeyPatch, device: CudaDevice
) -> None:
    target = device.empty((4,), torch.float32)

    def cannot(self: threading.Thread) -> None:
        if self.name == "tieredkv-up-finish":
            raise RuntimeError("can't start new thread")
        start(self)

    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", cannot)
    with pytest.raises(RuntimeError, match="can't start"):
        device.up.submit(lambda: (time.sleep(0.1), target.fill_(7)), finish=lambda result, took: None)
    device.run(lambda: target.fill_(1))
    time.sleep(0.2)
    assert device.run(lambda: float(target.sum())) == 4 and device.up.pending == 0


@pytest.mark.gpu
def test_gpu_memory_is_counted() -> None:
    with device_for("cuda") as device:
        free = device.free_bytes()
        tensor = device.empty((1 << 26,), torch.uint8)
        assert free - device.free_bytes() >= tensor.nbytes
        assert 0 < device.free_bytes() < device.total_bytes()
    with CudaDevice(pin_limit_bytes=0) as device:
        assert not device.host_empty((4,), torch.float32).is_pinned()
        assert len(device.pin_failures) == 1
