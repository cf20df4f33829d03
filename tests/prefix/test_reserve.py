"""Asking a cache of a store for a length up front: while it is empty too, and beside others."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from support import assert_close, audit_store, feed, oracle, store_of, tiny, tokens

import tieredkv
from tieredkv.errors import BudgetError, ConfigError
from tieredkv.store import BlockStore


def make(model: Any, **changes: Any) -> tieredkv.KVStore:
    sizes = {"hot": "160 tokens", "warm": "64 tokens", "block_size": 16, "window": 16}
    return tieredkv.KVStore(model, **{**sizes, **changes})


def test_an_empty_cache_is_checked_where_its_store_is_open_and_at_its_first_forward_else() -> None:
    model, ids = tiny(), tokens(40)
    with make(model) as store:
        early = store.cache(ids)
        early.reserve(10**9)  # nobody knows yet
        with pytest.raises(BudgetError, match="1000000000 tokens"):
            feed(model, ids, early)
        early.reserve(40)
        assert_close(feed(model, ids, early), oracle(ids))
        empty = store.cache(tokens(40, rows=2, seed=2))
        for wanted in (10**9, 200):
            with pytest.raises(BudgetError, match=f"{wanted} tokens of 1 rows"):
                empty.reserve(wanted)
        assert empty.settings.max_tokens is None, "what was refused is not asked for later"
        with pytest.raises(ConfigError, match="max_tokens"):
            empty.reserve(-1)
        empty.reserve(96)
        with pytest.raises(BudgetError, match="96 tokens of 2 rows"):
            feed(model, tokens(40, rows=2, seed=2), empty)
        empty.reserve(40)
        assert_close(feed(model, tokens(40, rows=2, seed=2), empty), oracle(tokens(40, rows=2, seed=2)))
        audit_store(store_of(empty))
        last = store.cache(tokens(30, seed=3))
        early.close()
        empty.close()
    last.reserve(10**9)  # its store is gone, and with it what it could be compared with


def test_a_quota_counts_before_the_first_forward() -> None:
    model, settings = tiny(), tieredkv.CacheSettings(hot_quota="32 tokens")
    with make(model, settings=settings, warm=0) as store:
        with store.cache(tokens(20)) as cache:
            feed(model, tokens(20), cache)
        empty = store.cache(tokens(20, seed=2))
        empty.reserve(32)
        with pytest.raises(BudgetError):
            empty.reserve(33)


def test_it_waits_for_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it counts does not change while it counts."""
    monkeypatch.setattr(BlockStore, "wait_all", lambda self: None)  # which waits too, and lets others in afterwards
    model, ids = tiny(), tokens(40)
    with make(model) as store:
        cache = store.cache(ids)
        feed(model, ids, cache)
        cache.reserve(41)  # the forward has ended then
        asking = threading.Thread(target=cache.reserve, args=(48,))
        with store_of(cache).lock:
            asking.start()
            asking.join(0.2)
            waited = asking.is_alive()
        asking.join()
        assert waited, "another is at the store"
        assert cache.settings.max_tokens == 48
