"""Asking a cache of a store for a length up front: while it is empty too, and beside others."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import pytest
from support import assert_close, audit_store, feed, oracle, store_of, tiny, tokens

import tieredkv
from tieredkv.errors import BudgetError, ConfigError, StepError
from tieredkv.hf.step import Member, StepCache
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


@pytest.mark.parametrize("known", [0, 48])
def test_max_tokens_are_checked_at_the_first_forward_also_after_a_known_prefix(known: int) -> None:
    model, ids = tiny(), tokens(60)
    with make(model) as store:
        with store.cache(ids) as cache:
            feed(model, ids, cache)
        late = store.cache(ids[:, :50] if known else tokens(50, seed=7))
        assert late.get_seq_length() == known
        own = ids[:, :50] if known else tokens(50, seed=7)
        late._settings = dataclasses.replace(late.settings, max_tokens=300)
        for _ in range(2):
            with pytest.raises(BudgetError, match="300 tokens of 1 rows"):
                feed(model, own[:, known:], late)
            assert late.get_seq_length() == known, "nothing was written"
            audit_store(store_of(late))
        late.reserve(60)
        assert_close(feed(model, own[:, known:], late, [1]), oracle(own)[:, known:])
        audit_store(store_of(late))
        late.close()


def test_a_known_prefix_that_is_longer_than_max_tokens_is_attached_whole() -> None:
    """They are to fit, and no limit: what follows them is taken as far as there is room."""
    model, ids = tiny(), tokens(100)
    with make(model, settings=tieredkv.CacheSettings(max_tokens=20)) as store:
        for known in (0, 96):
            with store.cache(ids) as cache:
                assert cache.get_seq_length() == known
                assert_close(feed(model, ids[:, known:], cache), oracle(ids)[:, known:])
                audit_store(store_of(cache))


def test_rows_that_a_prefix_is_copied_for_count() -> None:
    """Beams: what one row may have, four may not."""
    model, ids = tiny(), tokens(50)
    with make(model, settings=tieredkv.CacheSettings(max_tokens=100)) as store:
        with store.cache(ids) as cache:
            feed(model, ids, cache)
        with store.cache(ids) as cache, pytest.raises(BudgetError, match="100 tokens of 4 rows"):
            feed(model, ids[:, 48:].expand(4, -1), cache)
        with store.cache(ids) as cache:
            assert_close(feed(model, ids[:, 48:], cache), oracle(ids)[:, 48:])


def test_members_of_a_step_are_checked_too() -> None:
    model, ids = tiny(), tokens(60)
    with make(model) as store:
        with store.cache(ids) as cache:
            feed(model, ids, cache)
        steps = StepCache(model.config)
        used, late = store.cache(tokens(20, seed=3)), store.cache(ids[:, :50])
        feed(model, tokens(20, seed=3), used)
        fresh = store.cache(tokens(20, seed=4))
        for cache, new in ((late, ids[0, 48:50]), (fresh, tokens(20, seed=4)[0])):
            cache._settings = dataclasses.replace(cache.settings, max_tokens=300)
            with pytest.raises(StepError, match="300 tokens of 1 rows") as refused:
                steps.begin([Member(used, tokens(1)[0]), Member(cache, new)])
            assert refused.value.member == 1
            cache.reserve(50)
            steps.begin([Member(used, tokens(1)[0]), Member(cache, new)])
            steps.abandon()
        audit_store(store_of(used))
        for cache in (used, late, fresh):
            cache.close()
