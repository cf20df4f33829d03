"""Caches that are dropped, not closed, leave their store wherever the collector finds them, and nobody waits for it."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import assert_close, audit, audit_store, feed, oracle, small, store_of, tiny, tokens

import tieredkv
from tieredkv import counters
from tieredkv.device import LEDGER, SimulatedAccelerator
from tieredkv.device.simulated import ClockedEvent
from tieredkv.durable import DurableSettings
from tieredkv.store import BlockStore, Holder, planner
from tieredkv.tiers.slots import SlotPool

MOST_SECONDS = 30.0
"""Long enough for any machine: what takes longer waits for ever."""


@pytest.fixture(autouse=True)
def only_when_asked() -> Iterator[None]:
    """The collector comes where a test calls it, and nowhere else."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def two(model: Any, ids: Any, **changes: Any) -> tuple[tieredkv.TieredCache, tieredkv.TieredCache]:
    """Two caches of one store, each with blocks of its own."""
    first = small(model, None, **{"warm": "600 tokens", **changes})
    feed(model, ids, first)
    second = copy.deepcopy(first)
    feed(model, tokens(70, seed=9), second)
    return first, second


def holder_of(cache: tieredkv.TieredCache) -> Holder:
    holder = cache.parts().holder
    assert holder is not None
    return holder


def forget(*caches: Any) -> None:
    """Nobody refers to them any more but they themselves: only the collector finds them."""
    for cache in caches:
        cache.itself = cache


@contextlib.contextmanager
def somebody_in(store: BlockStore) -> Iterator[threading.Thread]:
    """Another thread has the store's lock, until the end of the `with`."""
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with store.lock:
            inside.set()
            leave.wait(MOST_SECONDS)

    holding = started(hold)
    inside.wait(MOST_SECONDS)
    try:
        yield holding
    finally:
        leave.set()
    assert ended(holding)


def ended(*threads: threading.Thread) -> bool:
    for thread in threads:
        thread.join(MOST_SECONDS)
    return not any(thread.is_alive() for thread in threads)


def started(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def cleaned() -> bool:
    """Whether what waits for a lock, on a thread of its own, has ended."""
    return ended(*[thread for thread in threading.enumerate() if thread.name == "cleanup"])


def test_two_stores_in_two_threads_do_not_wait_for_each_other() -> None:
    """Each thread holds its store, and comes to the end of a cache of the other one."""
    model, ids = tiny(), tokens(60)
    mine, others = two(model, ids), two(model, ids)
    stores = [store_of(mine[0]), store_of(others[0])]
    dropped, found = [mine[1]], others[1]
    mine, others = mine[:1], others[:1]
    forget(found)
    del found
    both = threading.Barrier(2)

    def one() -> None:
        with stores[0].lock:
            both.wait()
            gc.collect()

    def other() -> None:
        with stores[1].lock:
            both.wait()
            dropped.clear()

    assert ended(started(one), started(other)), "each waits for the other's store"
    assert cleaned()
    for store, (cache,) in zip(stores, (mine, others), strict=True):
        assert store.holders == [holder_of(cache)]
        audit_store(store)
        assert_close(feed(model, tokens(70)[:, 60:], cache), oracle(tokens(70))[:, 60:])
        cache.close()
        assert store.is_closed


def test_the_last_cache_closes_its_store_when_whoever_is_in_it_has_left() -> None:
    model = tiny()
    promised = LEDGER.promised_bytes("cpu")
    caches = [small(model.config, None, warm="200 tokens")]
    feed(model, tokens(60), caches[0])
    store = store_of(caches[0])
    with somebody_in(store) as holding:
        caches.clear()  # does not wait
        assert holding.is_alive() and not store.is_closed
    assert cleaned()
    assert store.is_closed, "though nobody came to it again"
    assert LEDGER.promised_bytes("cpu") == promised


def test_in_the_thread_that_is_in_the_store_a_cache_stays_until_it_has_left() -> None:
    model = tiny()
    first, second = two(model, tokens(60))
    store, kept = store_of(first), holder_of(first)
    forget(second)
    del second
    used = {role: tier.slots.used for role, tier in store.tiers.items()}
    with store.lock:
        for row in store.holders[1].table:
            gc.collect()  # in the middle of its blocks
            assert row and all(block.refs for block in row)
        assert {role: tier.slots.used for role, tier in store.tiers.items()} == used
    assert cleaned()
    assert store.holders == [kept]
    assert sum(tier.slots.used for tier in store.tiers.values()) < sum(used.values())
    audit(first)
    first.close()


def test_slots_are_not_freed_in_the_middle_of_taking_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    first, second = two(model, tokens(60), hot="160 tokens")
    store, kept, take = store_of(first), holder_of(second), SlotPool._take
    forget(first)
    del first

    def collecting(self: SlotPool, slot: int, gap: int) -> None:
        if self is store.hot.slots:
            gc.collect()  # once the gap was found: what is freed before it makes it another one
        take(self, slot, gap)

    monkeypatch.setattr(SlotPool, "_take", collecting)
    feed(model, tokens(16, seed=2), second)
    monkeypatch.undo()
    assert cleaned()
    assert store.holders == [kept]
    audit(second)
    slots = store.hot.slots
    held = {slot for slot in range(slots.total) if slots.holds(slot)}
    taken = slots.allocate_many(slots.free)
    assert held | set(taken) == set(range(slots.total)), "gaps that are none"
    second.close()


def test_loads_are_not_forgotten_in_the_middle_of_forgetting_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward of one cache finds in the ring what was read ahead for another."""
    model, ids = tiny(), tokens(100)
    with SimulatedAccelerator(latency_seconds=0.001) as device:
        first, second = two(model, ids[:, :90], device=device)
        second.reset()
        feed(model, tokens(120, seed=3), second, [90] + [1] * 30)
        store, wait = store_of(first), ClockedEvent.wait
        assert store.prefetcher._loads, "for the next step of the second"
        forget(second)
        del second
        inside = [True]

        def collecting(self: ClockedEvent) -> None:
            wait(self)
            if inside and self.name.startswith("load"):
                inside.clear()
                gc.collect()

        monkeypatch.setattr(ClockedEvent, "wait", collecting)
        got = feed(model, ids[:, 90:], first, [1] * 10)
        monkeypatch.undo()
        assert not inside and cleaned()
        ring = store.prefetcher
        assert sorted([*ring._free, *(load.buffer for load in ring._loads)]) == list(range(len(ring._buffers)))
        assert_close(got, oracle(ids)[:, 90:])
        audit(first)
        assert store.holders == [holder_of(first)]
        first.close()
        assert device.clocks.races == 0


def test_while_counts_are_told_nobody_waits_for_a_copy_that_is_to_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    with SimulatedAccelerator() as device:
        first, second = two(model, tokens(90), device=device)
        second.reset()
        feed(model, tokens(120, seed=3), second, [90] + [1] * 30)
        store, told = store_of(first), threading.Event()
        ring, arrived, record = store.prefetcher, store.mover.arrived, counters.MoveStats
        ring.flush()

        def late(*arguments: Any) -> None:
            told.wait(MOST_SECONDS)
            arrived(*arguments)

        monkeypatch.setattr(store.mover, "arrived", late)
        ring.start(range(2), ring._chunks)
        forget(second)
        del second

        def collecting(*values: Any) -> Any:
            told.set()
            gc.collect()
            return record(*values)

        monkeypatch.setattr(counters, "MoveStats", collecting)
        assert ended(started(first.stats))
        monkeypatch.undo()
        assert cleaned() and store.holders == [holder_of(first)]
        audit(first)
        first.close()


@pytest.fixture(params=["no thread", "a thread that does not come to it"])
def nobody_waits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the lock, so that somebody has to come to the store."""
    start = threading.Thread.start

    def cannot(self: threading.Thread) -> None:
        if self.name != "cleanup":
            start(self)
        elif request.param == "no thread":
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", cannot)


def drop_while_another_is_in(store: BlockStore, caches: list[Any]) -> None:
    before = len(store.holders)
    with somebody_in(store):
        caches.clear()
        assert len(store.holders) == before


@pytest.mark.usefixtures("nobody_waits")
@pytest.mark.parametrize("what", ["a forward", "reserve", "close"])
def test_whoever_comes_next_finds_it_gone(what: str) -> None:
    """What is free does not depend on when a thread of its own comes to it, nor on whether there is one."""
    model, ids = tiny(), tokens(70)
    first, second = two(model, ids[:, :60])
    store, dropped = store_of(first), [second]
    del second
    drop_while_another_is_in(store, dropped)
    if what == "reserve":
        first.reserve(70)
    elif what == "a forward":
        assert_close(feed(model, ids[:, 60:], first), oracle(ids)[:, 60:])
    if what != "close":
        assert store.holders == [holder_of(first)]
        audit(first)
    first.close()
    assert store.is_closed


@pytest.mark.usefixtures("nobody_waits")
def test_what_is_restored_finds_it_gone(tmp_path: Path) -> None:
    model, ids = tiny(), tokens(161)
    sizes: dict[str, Any] = {"hot": "256 tokens", "warm": 0, "block_size": 16, "window": 16}
    sizes["durable"] = DurableSettings(tmp_path, free_floor=0)
    with tieredkv.KVStore(model, **sizes) as store, store.cache(ids) as cache:
        feed(model, ids, cache)
    with tieredkv.KVStore(model, **sizes) as store:
        other = store.cache(tokens(100, seed=2))
        feed(model, tokens(100, seed=2), other)
        blocks, dropped = store_of(other), [other]
        del other
        drop_while_another_is_in(blocks, dropped)
        with store.cache(ids) as cache:
            assert cache.get_seq_length() == 160, "there is room for it again"
            audit_store(blocks)


def test_one_that_cannot_leave_keeps_no_other_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, ids = tiny(), tokens(70)
    first, second = two(model, ids[:, :60])
    third = copy.deepcopy(second)
    store, wrong = store_of(first), holder_of(second)
    real = type(wrong.table).clear

    def broken(self: Any) -> None:
        real(self)
        if self is wrong.table:
            raise OSError("a disk")

    monkeypatch.setattr(type(wrong.table), "clear", broken)
    forget(second, third)
    del second, third
    with store.lock:
        gc.collect()
        assert len(store.holders) == 3
    assert cleaned()
    assert store.holders == [holder_of(first)] and "a disk" in caplog.text
    audit(first)
    first.close()
    assert store.is_closed


def test_a_worker_that_finds_it_does_not_wait_for_what_it_is_to_do_itself() -> None:
    model = tiny()
    cache = small(model.config, None, hot="160 tokens", warm="200 tokens")
    feed(model, tokens(60), cache)
    cache.crop(0)  # ends the forward
    store, behind = store_of(cache), threading.Event()
    finding = store.device.down.submit(lambda: (behind.wait(MOST_SECONDS), gc.collect()))
    with store.lock:
        planner.settle(store, holder_of(cache))
        store.start_move([block for block in holder_of(cache).table.blocks() if block.sealed], "hot", "request")
    assert store._moves
    forget(cache)
    del cache
    behind.set()
    assert ended(started(finding.wait))
    assert cleaned() and store.is_closed
