"""Memory that cannot be pinned, and disks that are slow, full, read-only, cut short or gone: the generation goes on.

With one warning and a counter, wherever the tokens fit above, or the bytes can be had at a second try.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import WAYS, assert_close, audit, feed, locations, of, oracle, small, store_of, tiny, tokens

import tieredkv
from tieredkv.block import Block
from tieredkv.config import CacheSettings
from tieredkv.device import SimulatedAccelerator
from tieredkv.errors import ChecksumError, ColdTierError

STREAM = CacheSettings(read_in_place=False)


def warnings_in(log: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in log.records if record.levelno >= logging.WARNING]


def failing(code: int) -> Callable[..., int]:
    def call(*_: Any, **__: Any) -> int:
        raise OSError(code, os.strerror(code))

    return call


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO], ids=["full", "read-only", "broken"])
def test_a_disk_that_takes_nothing_more(
    cold_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, way: str, code: int
) -> None:
    """What is there is read on; what leaves the window stays hot."""
    model, ids = tiny(), tokens(260)
    with small(of(model, way), cold_dir, hot="256 tokens", warm=0) as cache:
        first = feed(model, ids[:, :120], cache)
        cache.demote("cold")
        assert "cold" in locations(cache)
        for name in ("pwritev", "posix_fallocate"):
            monkeypatch.setattr(os, name, failing(code))
        with caplog.at_level(logging.WARNING):
            rest = feed(model, ids[:, 120:], cache, [1] * 140)
        assert_close(torch.cat([first, rest], 1), oracle(ids))
        assert len(warnings_in(caplog)) == 1 and os.strerror(code) in warnings_in(caplog)[0]
        assert cache.stats().tier_failures >= 1
        audit(cache)


@pytest.mark.parametrize("way", WAYS)
def test_a_read_that_is_cut_short_once_is_made_again(
    cold_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    model, ids = tiny(), tokens(240)
    real, calls = os.preadv, iter(range(10**6))

    def sometimes(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        return 0 if next(calls) % 7 == 3 else real(descriptor, buffers, offset)

    with small(of(model, way), cold_dir, warm=0) as cache:
        first = feed(model, ids[:, :200], cache)
        monkeypatch.setattr(os, "preadv", sometimes)
        with caplog.at_level(logging.WARNING):
            rest = feed(model, ids[:, 200:], cache, [1] * 40)
        assert_close(torch.cat([first, rest], 1), oracle(ids))
        stats = cache.stats()
        assert min(stats.tier_failures, stats.retries) >= 10 and stats.checksum_failures == 0
        assert len(warnings_in(caplog)) == 1
        audit(cache)


def test_a_slow_disk_is_waited_for(
    cold_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, ids = tiny(), tokens(203)
    real = os.preadv

    def slow(*arguments: Any) -> int:
        time.sleep(0.06)
        return real(*arguments)

    monkeypatch.setattr("tieredkv.prefetcher.SLOW_SECONDS", 0.05)
    with small(model, cold_dir, warm=0) as cache:
        first = feed(model, ids[:, :200], cache)
        monkeypatch.setattr(os, "preadv", slow)
        with caplog.at_level(logging.WARNING):
            rest = feed(model, ids[:, 200:], cache, [1, 1, 1])
        assert_close(torch.cat([first, rest], 1), oracle(ids))
        assert len(warnings_in(caplog)) == 1 and "slow" in warnings_in(caplog)[0]
        assert cache.stats().stall_seconds > 0.3


def test_a_bad_spot_on_the_disk_is_told_once_and_healed_by_reading_again(
    cold_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, ids = tiny(), tokens(240)
    real, calls = os.preadv, iter(range(10**6))

    def sometimes(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        count = real(descriptor, buffers, offset)
        if next(calls) % 5 == 2:
            buffers[0][7] ^= 1
        return count

    monkeypatch.setattr(os, "preadv", sometimes)
    with small(model, cold_dir, warm=0) as cache, caplog.at_level(logging.WARNING):
        assert_close(feed(model, ids, cache, [200, *[1] * 40]), oracle(ids))
        stats = cache.stats()
        assert stats.checksum_failures == stats.retries >= 10 and stats.tier_failures == 0
        assert len(warnings_in(caplog)) == 1


@pytest.mark.parametrize("limit_bytes", [0, 20_000])
def test_memory_that_cannot_be_pinned_serves_pageable(
    cold_dir: Path, monkeypatch: pytest.MonkeyPatch, limit_bytes: int
) -> None:
    """Through a small pinned ring, where that can be had."""
    monkeypatch.setattr("tieredkv.device.bounce.BUFFER_BYTES", 4096)
    model, ids = tiny(), tokens(240)
    device = SimulatedAccelerator(max_delay_seconds=0.0005, pin_limit_bytes=limit_bytes)
    with small(model, cold_dir, device=device, warm="128 tokens", settings=STREAM) as cache:
        assert_close(feed(model, ids, cache, [200, *[1] * 40]), oracle(ids))
        assert device.pin_failures and device.pinned_bytes == min(4 * 4096, limit_bytes)
        assert cache.stats().pinned_bytes == device.pinned_bytes
        assert device.clocks.races == 0
        audit(cache)


def in_both(cache: tieredkv.TieredCache) -> Block:
    """Make one cold block lie in warm too."""
    store = store_of(cache)
    holder = cache.parts().holder
    assert holder is not None
    block = next(b for b in holder.table.blocks() if b.cold is not None and b.hot is None and b.warm is None)
    slot = store.tiers["warm"].slots.allocate()
    for layer, planes in enumerate(store.mover.planes):
        out = tuple(plane.empty(1) for plane in planes)
        store.tiers["cold"].read(layer, [block.cold or 0], out)
        store.tiers["warm"].write(layer, [slot], out)
    block.warm = slot
    store.version += 1
    return block


@pytest.mark.parametrize("broken", ["warm", "both"])
def test_a_block_that_is_wrong_in_one_tier_comes_from_the_other(cold_dir: Path, broken: str) -> None:
    model, ids = tiny(), tokens(202)
    with small(model, cold_dir, warm="64 tokens", settings=STREAM) as cache:
        first = feed(model, ids[:, :200], cache)
        cache.demote("cold")
        block = in_both(cache)
        store = store_of(cache)
        store.prefetcher.flush()
        views = store.tiers["warm"].run(1, block.warm or 0, 1)
        assert views is not None
        views[1][0, 0, 3] += 1
        if broken == "both":
            store.tiers["cold"].write(1, [block.cold or 0], tuple(view.clone() for view in views))
            with pytest.raises(ChecksumError) as caught:
                feed(model, ids[:, 200:], cache)
            assert (caught.value.block, caught.value.layer, caught.value.tier) == (block.id, 1, "cold")
            assert caught.value.got != caught.value.wanted == f"{(block.checksums[1] or 0) & (2**64 - 1):#018x}"
        else:
            rest = feed(model, ids[:, 200:], cache, [1, 1])
            assert_close(torch.cat([first, rest], 1), oracle(ids))
            assert cache.stats().checksum_failures > 0


def test_what_cannot_be_read_is_named(cold_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny(), tokens(201)
    with small(model, cold_dir, warm=0) as cache:
        feed(model, ids[:, :200], cache)
        store_of(cache).prefetcher.flush()
        with (
            monkeypatch.context() as patch,
            pytest.raises(ColdTierError, match=r"layer \d cannot be read from cold"),
        ):
            patch.setattr(os, "preadv", failing(errno.EIO))
            feed(model, ids[:, 200:], cache)
        # The forward that failed did not happen, and the disk is well again.
        assert_close(feed(model, ids[:, 200:], cache), oracle(ids)[:, 200:])


def test_first_looks_at_a_block_once_in_each_tier(cold_dir: Path) -> None:
    """What was read from warm and found right has not been looked at in cold."""
    model, ids = tiny(), tokens(122)
    settings = CacheSettings(read_in_place=False, verify="first")
    with small(model, cold_dir, warm="256 tokens", settings=settings) as cache:
        feed(model, ids[:, :121], cache, [120, 1])
        assert "warm" in locations(cache)
        cache.demote("cold")
        store = store_of(cache)
        store.prefetcher.flush()
        holder = cache.parts().holder
        assert holder is not None
        block = next(b for b in holder.table.blocks() if b.cold is not None and b.hot is None)
        out = tuple(plane.empty(1).zero_() for plane in store.mover.planes[0])
        store.tiers["cold"].write(0, [block.cold or 0], out)
        with pytest.raises(ChecksumError):
            feed(model, ids[:, 121:], cache)
