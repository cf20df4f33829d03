"""A failure that comes once, of whatever kind, breaks no cache: the forward is made again, and close gives all back.

No thread to be had, no memory for a moment, Ctrl-C: none of them is one of the package's errors.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import assert_close, audit, feed, oracle, small, store_of, tiny, tokens

import tieredkv
from tieredkv.device import LEDGER
from tieredkv.tiers.cold import ColdTier
from tieredkv.transfer import Mover

PASSING = [RuntimeError("can't allocate memory"), MemoryError("none for a moment")]
TOKENS = 200


def fails_at(real: Callable[..., Any], number: int, error: BaseException) -> Callable[..., Any]:
    """`real`, whose call of that number raises."""
    calls = iter(range(1 << 30))

    def once(*args: Any, **keywords: Any) -> Any:
        if next(calls) == number:
            raise error
        return real(*args, **keywords)

    return once


def closes_wholly(cache: tieredkv.TieredCache, folder: Path) -> None:
    store = store_of(cache)
    cache.close()
    gave_everything_back(store, folder)


def gave_everything_back(store: Any, folder: Path) -> None:
    assert store.is_closed and all(tier.closed for tier in store.tiers.values())
    assert not any(thread.name == "tieredkv-down" for thread in threading.enumerate())
    assert LEDGER._promises.get(store) is None
    assert not folder.exists() or list(folder.iterdir()) == []


@pytest.mark.parametrize("error", PASSING, ids=["runtime", "memory"])
def test_a_copy_down_that_failed_once_is_made_again(
    cold_dir: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    model, ids = tiny(), tokens(TOKENS)
    cache = small(model, cold_dir, warm=0)
    monkeypatch.setattr(ColdTier, "write", fails_at(ColdTier.write, 0, error))
    assert_close(feed(model, ids, cache, [10] * 20), oracle(ids))
    assert cache.stats().tier_failures == 1
    assert store_of(cache).cold_failure is None, "the disk did nothing wrong"
    assert store_of(cache).tiers["cold"].slots.used > 3
    audit(cache)
    closes_wholly(cache, cold_dir)


@pytest.mark.parametrize("error", PASSING, ids=["runtime", "memory"])
@pytest.mark.parametrize("number", [0, 1])
def test_a_prompt_whose_write_failed_once_is_given_again(
    cold_dir: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, number: int
) -> None:
    model, ids = tiny(), tokens(TOKENS + 10)
    cache = small(model, cold_dir, warm=0)
    feed(model, ids[:, :10], cache)
    monkeypatch.setattr(ColdTier, "write", fails_at(ColdTier.write, number, error))
    feed(model, ids[:, 10:TOKENS], cache)
    with pytest.raises(type(error)):
        cache.crop(0)  # ends the forward
    assert cache.get_seq_length() == 10
    audit(cache)
    assert_close(feed(model, ids[:, 10:], cache, [TOKENS - 10, *[1] * 10]), oracle(ids)[:, 10:])
    audit(cache)
    closes_wholly(cache, cold_dir)


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), RuntimeError("can't start new thread")], ids=["ctrl-c", "thread"]
)
@pytest.mark.parametrize("when", ["before it is queued", "after it is queued"])
def test_a_copy_that_was_not_queued_holds_no_slot(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, when: str
) -> None:
    model, ids, demote, due = tiny(), tokens(TOKENS), Mover.demote, [True]

    def broken(self: Mover, *args: Any) -> Any:
        if due.pop() if due else False:
            if when == "after it is queued":
                demote(self, *args)
            raise error
        return demote(self, *args)

    with small(model, None, warm="200 tokens") as cache:
        feed(model, ids[:, :40], cache)
        monkeypatch.setattr(Mover, "demote", broken)
        with pytest.raises(type(error)):
            feed(model, ids[:, 40:120], cache, [8] * 10)
        length = cache.get_seq_length()
        assert 40 <= length < 120
        audit(cache)
        assert_close(feed(model, ids[:, length:], cache, [8] * 20), oracle(ids)[:, length:])
        audit(cache)


@pytest.fixture
def interrupts() -> Iterator[Callable[[float], None]]:
    """Sends Ctrl-C to this process after so many seconds."""
    timers: list[threading.Timer] = []

    def after(seconds: float) -> None:
        timers.append(threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)))
        timers[-1].start()

    yield after
    for timer in timers:
        timer.cancel()
        timer.join()


@pytest.mark.parametrize("what", ["a copy", "a freed block"])
def test_a_close_that_was_interrupted_gave_everything_back(
    cold_dir: Path, monkeypatch: pytest.MonkeyPatch, interrupts: Callable[[float], None], what: str
) -> None:
    model, write = tiny(), ColdTier.write

    def slow(*args: Any, **keywords: Any) -> None:
        time.sleep(0.3)
        write(*args, **keywords)

    cache = small(model, cold_dir, warm=0)
    feed(model, tokens(60), cache, [40])
    store = store_of(cache)
    monkeypatch.setattr(ColdTier, "write", slow)
    if what == "a copy":
        feed(model, tokens(70)[:, 60:], cache)
        assert store._moves
    else:
        feed(model, tokens(260)[:, 60:], cache)
        assert store.through
    interrupts(0.1)
    with pytest.raises(KeyboardInterrupt):
        cache.close()
    cache.close()
    gave_everything_back(store, cold_dir)
