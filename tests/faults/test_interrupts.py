"""Ctrl-C while something waits for a copy: whoever waited gives back what it uses, so the copy has to be over then."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support import assert_close, audit, feed, oracle, small, store_of, tiny, tokens

import tieredkv
from tieredkv.block import Block
from tieredkv.device import CpuDevice, Event, SimulatedAccelerator

LATENCY_SECONDS = 0.02


@contextlib.contextmanager
def interrupted_wait() -> Iterator[None]:
    """Ctrl-C where the main thread first waits for something that is not done."""
    join, is_due = Event.join, [True]

    def interrupted(self: Event) -> None:
        if is_due[0] and not self.settled and threading.current_thread() is threading.main_thread():
            is_due[0] = False
            raise KeyboardInterrupt
        join(self)

    with mock.patch.object(Event, "join", interrupted):
        yield


def test_an_interrupted_wait_ends_with_the_operation() -> None:
    with CpuDevice() as device:
        event = device.up.submit(lambda: time.sleep(LATENCY_SECONDS))
        with pytest.raises(KeyboardInterrupt), interrupted_wait():
            event.wait()
        assert event.done()


def slow(cold_dir: Path) -> tuple[Any, tieredkv.TieredCache, SimulatedAccelerator]:
    """(model, cache that has streamed, its device, each of whose copies takes a while)."""
    device, model = SimulatedAccelerator(latency_seconds=LATENCY_SECONDS, max_delay_seconds=0.0), tiny()
    cache = small(model, None, warm="200 tokens", device=device)
    feed(model, tokens(90), cache, [80, 9])
    return model, cache, device


@pytest.mark.parametrize("what", ["flush", "promote", "demote", "wait_all", "forward"])
def test_after_an_interrupt_everything_is_where_it_was(cold_dir: Path, what: str) -> None:
    model, cache, device = slow(cold_dir)
    with device, cache:
        store = store_of(cache)
        if what == "promote":
            cache.demote()
        sealed = [block for holder in store.holders for block in holder.table.blocks() if block.sealed]

        def movable(block: Block) -> bool:
            return block.hot is not None and not block.is_stored_below and not store.is_moving(block)

        doing: dict[str, Any] = {
            "flush": lambda: (store.prefetcher.start(range(2), store.prefetcher._chunks), store.prefetcher.flush()),
            "promote": cache.promote,
            "demote": cache.demote,
            "wait_all": lambda: (
                store.start_move([b for b in sealed if movable(b)][:1], "hot", "room"),
                store.wait_all(),
            ),
            "forward": lambda: feed(model, tokens(91)[:, 90:], cache),
        }
        length = cache.get_seq_length()
        for _ in range(3):
            with contextlib.suppress(KeyboardInterrupt), interrupted_wait():
                doing[what]()
        device.synchronize()
        ring = store.prefetcher
        assert len(ring._free) + len(ring._loads) == len(ring._buffers)
        if cache.get_seq_length() > length:
            cache.crop(length - cache.get_seq_length())
        audit(cache)
        ids = tokens(100)
        assert_close(feed(model, ids[:, length:], cache, [1] * 3), oracle(ids)[:, length:])


@pytest.mark.parametrize("cold", [False, True])
def test_a_read_by_the_computing_cores_that_is_interrupted_is_done_again(
    monkeypatch: pytest.MonkeyPatch, cold_dir: Path, cold: bool
) -> None:
    settings, model = tieredkv.CacheSettings(read_in_place=False), tiny()
    with small(model, cold_dir if cold else None, warm=0 if cold else "200 tokens", settings=settings) as cache:
        ids = tokens(100)
        feed(model, ids[:, :90], cache)
        tier = store_of(cache).tiers["cold" if cold else "warm"]
        reads = [0]

        def interrupted(name: str) -> Any:
            real = getattr(tier, name)

            def read(layer: int, slots: Any, out: Any, *rest: Any, **options: Any) -> Any:
                reads[0] += 1
                if reads[0] in (1, 3):
                    for plane in out:
                        plane.fill_(torch.nan)  # half of a read
                    raise KeyboardInterrupt
                return real(layer, slots, out, *rest, **options)

            return read

        for name in ("read", "read_summed"):
            monkeypatch.setattr(tier, name, interrupted(name))
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                feed(model, ids[:, 90:91], cache)
        assert_close(feed(model, ids[:, 90:], cache, [1] * 9), oracle(ids)[:, 90:])
        assert reads[0] > 10
        audit(cache)


def test_a_thread_that_cannot_start_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, cold_dir: Path) -> None:
    start, refused = threading.Thread.start, [2]

    def cannot(self: threading.Thread) -> None:
        if refused[0] and self.name == "tieredkv-up":
            refused[0] -= 1
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(CpuDevice, "copies_aside", True)
    model = tiny()
    with small(model, None, warm="200 tokens", settings=tieredkv.CacheSettings(read_in_place=False)) as cache:
        ids = tokens(100)
        feed(model, ids[:, :90], cache)
        monkeypatch.setattr(threading.Thread, "start", cannot)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="can't start"):
                feed(model, ids[:, 90:91], cache)
        with torch.no_grad():
            assert_close(feed(model, ids[:, 90:], cache, [1] * 9), oracle(ids)[:, 90:])
        audit(cache)
