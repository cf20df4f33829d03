"""Disks that answer late or never: a miss in time, and nothing written into what the caller owns afterwards."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from durable_support import IDENTITY, chain, hashes, holds, opened, publish

from tieredkv.durable.ahead import ReadAhead
from tieredkv.durable.deadline import MOST_CALLS, TimedCalls
from tieredkv.errors import ColdTierError

RECORDS = chain("a", 4)


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], threading.Event]]:
    """Makes a system call wait for an event, which is set at the end."""
    made: list[threading.Event] = []

    def start(call: str) -> threading.Event:
        gate, real = threading.Event(), getattr(os, call)
        made.append(gate)

        def wait(*args: object, **kwargs: object) -> object:
            gate.wait(60)
            return real(*args, **kwargs)

        monkeypatch.setattr(os, call, wait)
        return gate

    yield start
    for gate in made:
        gate.set()


def test_in_time_it_reads_as_without(cold_dir: Path) -> None:
    store = opened(cold_dir, deadline_seconds=30)
    publish(store, RECORDS)
    assert store.find(hashes(RECORDS)) == 4 and holds(store, RECORDS)
    assert sum(len(rows) for piece in store.read_all(hashes(RECORDS)) for rows in piece.rows) == 8
    assert store.stats().late == 0
    store.set_aside(RECORDS[0].hash, "test")
    with pytest.raises(ColdTierError, match="not there"):
        holds(store, RECORDS)


@pytest.mark.parametrize("how", ["read", "read_all"])
def test_a_late_read_is_a_miss_and_touches_nothing_later(
    cold_dir: Path, hang: Callable[[str], threading.Event], how: str
) -> None:
    store = opened(cold_dir, deadline_seconds=0.05)
    publish(store, RECORDS)
    gate = hang("preadv")
    out = torch.full((4, IDENTITY.row_bytes[0]), 7, dtype=torch.uint8)
    started = time.monotonic()
    with pytest.raises(ColdTierError, match="longer than"):
        store.read(hashes(RECORDS), 0, out) if how == "read" else list(store.read_all(hashes(RECORDS)))
    assert time.monotonic() - started < 5
    assert store.stats().late == store.stats().misses == 1 and store.stats().set_aside == 0
    gate.set()
    for thread in threading.enumerate():
        if thread.name == "tieredkv-read":
            thread.join(5)
    assert torch.equal(out, torch.full_like(out, 7))
    store.read(hashes(RECORDS), 0, out)
    assert not torch.equal(out, torch.full_like(out, 7))


def test_a_late_search_finds_nothing(cold_dir: Path, hang: Callable[[str], threading.Event]) -> None:
    store = opened(cold_dir, deadline_seconds=0.05)
    publish(store, RECORDS)
    gate = hang("stat")
    assert store.find(hashes(RECORDS)) == 0
    assert store.stats().late == 1
    gate.set()
    time.sleep(0.01)
    assert opened(cold_dir, deadline_seconds=30).find(hashes(RECORDS)) == 4


def test_the_deadline_of_read_all_is_for_the_reading_alone(cold_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tieredkv.durable.blocks.PIECE_BYTES", 1)
    store = opened(cold_dir, deadline_seconds=0.3)
    publish(store, RECORDS)
    for _ in store.read_all(hashes(RECORDS)):
        time.sleep(0.2)
    real = os.preadv

    def slow(*args: object) -> int:
        time.sleep(0.6)
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "preadv", slow)
    with pytest.raises(ColdTierError, match="longer than"):
        list(store.read_all(hashes(RECORDS)))


def test_when_too_many_hang_the_next_does_not_wait() -> None:
    calls, gate = TimedCalls(0.01), threading.Event()
    for _ in range(MOST_CALLS):
        with pytest.raises(TimeoutError):
            calls.run(gate.wait)
    calls.seconds = 60
    started = time.monotonic()
    with pytest.raises(TimeoutError, match="earlier calls"):
        calls.run(lambda: None)
    assert time.monotonic() - started < 5
    gate.set()
    for _ in range(500):
        try:
            assert calls.run(lambda: 1) == 1
            break
        except TimeoutError:
            time.sleep(0.01)
    else:
        pytest.fail("threads do not come back")


def test_calls_without_a_thread_count_for_nothing_later(cold_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, start = opened(cold_dir, deadline_seconds=30), threading.Thread.start
    publish(store, RECORDS)

    def cannot(self: threading.Thread) -> None:
        if self.name == "tieredkv-read":
            raise RuntimeError("can't start new thread")
        start(self)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", cannot)
        for _ in range(MOST_CALLS + 1):
            with pytest.raises(ColdTierError):
                holds(store, RECORDS)
    assert holds(store, RECORDS)


def test_what_a_call_raises_is_raised_here() -> None:
    def fail() -> None:
        raise ValueError("mine")

    for seconds in (None, 5.0):
        with pytest.raises(ValueError, match="mine"):
            TimedCalls(seconds).run(fail)


@pytest.mark.parametrize("deadline_seconds", [None, 30.0])
def test_the_next_piece_is_read_while_the_caller_works_on_one(
    cold_dir: Path, monkeypatch: pytest.MonkeyPatch, deadline_seconds: float | None
) -> None:
    monkeypatch.setattr("tieredkv.durable.blocks.PIECE_BYTES", 1)
    store = opened(cold_dir, deadline_seconds=deadline_seconds)
    publish(store, RECORDS)
    wanted = [piece.rows[0].clone() for piece in store.read_all(hashes(RECORDS))]
    reads, second = 0, threading.Event()
    real = os.preadv

    def counted(*args: object) -> int:
        nonlocal reads
        reads += 1
        if reads == 2:
            second.set()
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "preadv", counted)
    pieces = store.read_all(hashes(RECORDS))
    first = next(pieces)
    assert second.wait(20), "the next piece is not read before it is asked for"
    assert torch.equal(first.rows[0], wanted[0]), "another piece was read over the first"
    pieces.close()  # waits for what it began
    assert reads == 2
    for piece, right in zip(store.read_all(hashes(RECORDS)), wanted, strict=True):
        assert torch.equal(piece.rows[0], right)


class Stopped(BaseException):
    """As Ctrl-C."""


def stopped_once(function: Callable[..., None], *, after: bool) -> Callable[..., None]:
    """`Thread.start` or `Thread.__init__`, but Ctrl-C comes before it does anything, or when it is done."""

    def interrupted(self: threading.Thread, *args: object, **keywords: object) -> None:
        if not after:
            raise Stopped
        function(self, *args, **keywords)
        raise Stopped

    return interrupted


@pytest.mark.parametrize(("what", "after"), [("__init__", False), ("__init__", True), ("start", False)])
def test_a_call_that_is_broken_off_before_it_begins_takes_no_place(
    monkeypatch: pytest.MonkeyPatch, what: str, after: bool
) -> None:
    calls = TimedCalls(60)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, what, stopped_once(getattr(threading.Thread, what), after=after))
        for _ in range(MOST_CALLS + 1):
            with pytest.raises(Stopped):
                calls.start(lambda: None)
    assert calls.run(lambda: 1) == 1


def test_a_call_that_is_broken_off_when_it_has_begun_has_its_place_until_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls, gate, begun = TimedCalls(60), threading.Event(), threading.Semaphore(0)
    before = set(threading.enumerate())

    def hang() -> None:
        begun.release()
        gate.wait(60)

    start = threading.Thread.start

    def started_and_stopped(self: threading.Thread) -> None:
        start(self)
        begun.acquire()
        raise Stopped

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", started_and_stopped)
        for _ in range(MOST_CALLS):
            with pytest.raises(Stopped):
                calls.start(hang)
    with pytest.raises(TimeoutError, match="earlier calls"):
        calls.start(lambda: None)
    gate.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(20)
    assert [calls.run(lambda: 1) for _ in range(MOST_CALLS + 1)] == [1] * (MOST_CALLS + 1)


def test_a_call_that_is_given_up_before_its_thread_comes_to_it_is_not_carried_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C between the start of a thread and its first line: nobody waits for what it would do."""
    calls, done, threads = TimedCalls(60), list[int](), list[threading.Thread]()

    def kept(self: threading.Thread) -> None:
        threads.append(self)
        raise Stopped

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", kept)
        with pytest.raises(Stopped):
            calls.start(lambda: done.append(1))
    for thread in threads:
        thread.start()
        thread.join(20)
    assert not done
    assert [calls.run(lambda: 1) for _ in range(MOST_CALLS + 1)] == [1] * (MOST_CALLS + 1)


def test_reading_ahead_that_is_broken_off_at_its_start_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, begun = TimedCalls(60), threading.Event()
    threads, start = list[threading.Thread](), threading.Thread.start

    def started_and_stopped(self: threading.Thread) -> None:
        threads.append(self)
        start(self)
        begun.wait(20)
        raise Stopped

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", started_and_stopped)
        with pytest.raises(Stopped):
            ReadAhead(calls, [begun.set, lambda: None, lambda: None], ahead=1)
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "it waits for a step that nobody asks for"
