"""The end of a device: closed, collected, forked or left open, it leaves no thread and no one waiting."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tieredkv.device
from tieredkv.device import CpuDevice, Device, Event, SimulatedAccelerator
from tieredkv.errors import ClosedError

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


OTHERS: set[threading.Thread] = set()
"""What runs already, because another test left a cache to the garbage collector."""


@pytest.fixture(autouse=True)
def others() -> None:
    OTHERS.clear()
    OTHERS.update(threading.enumerate())


def workers() -> list[threading.Thread]:
    running = set(threading.enumerate()) - OTHERS
    return [thread for thread in running if thread.name.startswith("tieredkv-")]


def no_workers() -> bool:
    deadline = time.monotonic() + 5
    while workers() and time.monotonic() < deadline:
        time.sleep(0.001)
    return not workers()


def test_threads_start_at_the_first_operation(device: Device) -> None:
    device.run(nothing, after=[device.record()])
    device.synchronize()
    assert workers() == []
    device.up.submit(nothing).wait()
    assert [thread.name for thread in workers()] == ["tieredkv-up"]
    assert all(thread.daemon for thread in workers())


def test_close_finishes_what_runs_and_cancels_what_waits(device: Device, gate: threading.Event) -> None:
    started = threading.Event()
    running = device.up.submit(lambda: (started.set(), gate.wait()))
    ready = device.up.submit(nothing)
    held_back = device.down.submit(nothing, after=[running])
    started.wait()
    threading.Timer(0.02, gate.set).start()
    device.close()
    assert workers() == []
    running.wait()
    with pytest.raises(ClosedError, match="queued"):
        ready.wait()
    # Its predecessor is done, and whether its own thread saw that before the end is open.
    assert held_back.done()
    assert device.up.pending == device.down.pending == 0
    with pytest.raises(ClosedError, match="closed stream"):
        device.up.submit(nothing)
    device.close()


def test_a_work_may_close_its_device(device: Device) -> None:
    device.up.submit(device.close).wait()
    assert no_workers()


@pytest.mark.parametrize("maker", MAKERS)
def test_closing_ends_a_work_that_waits_for_another(maker: str, gate: threading.Event) -> None:
    device = MAKERS[maker]()
    started, waits = threading.Event(), threading.Event()
    device.disk.submit(lambda: (started.set(), gate.wait()))
    started.wait()
    queued = device.disk.submit(nothing)
    waiting = device.up.submit(lambda: (waits.set(), queued.wait()))
    waits.wait()
    threading.Timer(0.02, gate.set).start()
    device.close()
    assert isinstance(waiting.error, ClosedError)


@pytest.mark.parametrize("maker", MAKERS)
def test_a_dropped_device_leaves_no_thread(maker: str, gate: threading.Event) -> None:
    device = MAKERS[maker]()
    device.up.submit(nothing).wait()
    device.down.submit(nothing)
    queued = device.disk.submit(nothing, after=[Event("never")])
    del device
    gc.collect()
    assert workers() == []
    with pytest.raises(ClosedError):
        queued.wait()


@pytest.mark.parametrize("maker", MAKERS)
def test_a_device_may_be_dropped_by_its_own_thread(maker: str, gate: threading.Event) -> None:
    device = MAKERS[maker]()
    device.up.submit(lambda held=device: gate.wait())
    other = device.down.submit(nothing)
    other.wait()
    del device
    gate.set()
    assert no_workers()


def test_thousands_of_devices_leave_nothing() -> None:
    for number in range(2000):
        device = CpuDevice()
        device.up.submit(nothing)
        if number % 2:
            device.close()
        del device
    gc.collect()
    assert workers() == []
    assert len(os.listdir("/proc/self/task")) < 50


def test_submission_against_close_leaves_no_event_unsettled() -> None:
    for _ in range(20):
        device = CpuDevice()
        events: list[Event] = []

        def flood(device: Device = device, events: list[Event] = events) -> None:
            with contextlib.suppress(ClosedError):
                while True:
                    events.append(device.up.submit(nothing))

        thread = threading.Thread(target=flood)
        thread.start()
        time.sleep(0.0005)
        device.close()
        thread.join()
        for event in events:
            event.join()
        assert device.up.pending == 0


def test_an_operation_submitted_while_the_device_is_collected_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    device = CpuDevice()
    worker = device.up.worker
    monkeypatch.setattr(worker, "_start", lambda: (worker.stop(), worker.join()))
    with pytest.raises(ClosedError, match="queued"):
        device.up.submit(nothing).wait()


def test_close_waits_for_a_thread_that_is_being_started(monkeypatch: pytest.MonkeyPatch, gate: threading.Event) -> None:
    device = CpuDevice()
    worker, start, starting = device.up.worker, device.up.worker._start, threading.Event()
    monkeypatch.setattr(worker, "_start", lambda: (starting.set(), gate.wait(), start()))
    submitting = threading.Thread(target=device.up.submit, args=(nothing,))
    submitting.start()
    starting.wait()
    closing = threading.Thread(target=worker.close)
    closing.start()
    closing.join(0.02)
    assert closing.is_alive()
    gate.set()
    closing.join()
    assert workers() == []
    submitting.join()


def in_child(work: Callable[[], int]) -> int:
    """The exit status of a forked child that does `work`, which a signal ends after five seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is what this is about
        child = os.fork()
    if child == 0:
        status = 99
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the test runner's handler would raise, and be ignored
            signal.alarm(5)
            status = work()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_is_told(device: Device, gate: threading.Event) -> None:
    unfinished = device.up.submit(gate.wait)

    def refused() -> int:
        count = 0
        for attempt in (lambda: device.up.submit(nothing), lambda: device.disk.submit(nothing), unfinished.wait):
            try:
                attempt()
            except ClosedError:
                count += 1
        return count

    assert in_child(refused) == 3
    gate.set()
    unfinished.wait()
    device.up.submit(nothing).wait()


@pytest.mark.parametrize("way", ["close", "collect"])
def test_a_forked_child_may_end_the_device(way: str, gate: threading.Event) -> None:
    devices = [CpuDevice()]
    worker = devices[0].up.worker
    started, held = threading.Event(), threading.Event()
    devices[0].up.submit(lambda: (started.set(), gate.wait()))
    started.wait()
    devices[0].up.submit(nothing)

    def hold_lock() -> None:
        with worker._lock:
            held.set()
            gate.wait()

    thread = threading.Thread(target=hold_lock)
    thread.start()
    held.wait()

    def end() -> int:
        if way == "close":
            devices[0].close()
        devices.clear()
        gc.collect()
        return 0

    # As if the fork came while another thread submitted, whose lock nobody releases in the child.
    assert in_child(end) == 0
    gate.set()
    thread.join()
    devices[0].up.submit(nothing).wait()
    devices[0].close()


def test_an_open_device_does_not_keep_the_interpreter() -> None:
    package = Path(tieredkv.device.__file__).parent.parent
    program = (
        # Without the package's own imports, which take seconds.
        "import sys, types; package = sys.modules['tieredkv'] = types.ModuleType('tieredkv')\n"
        f"package.__path__ = [{str(package)!r}]\n"
        "import time; from tieredkv.device import CpuDevice; device = CpuDevice()\n"
        "device.up.submit(lambda: time.sleep(60)); device.down.submit(lambda: print('moved', flush=True)).wait()"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50)
    assert (result.returncode, result.stdout, result.stderr) == (0, "moved\n", "")
