"""The end of a store: whatever breaks it off, each part of it ends, and caches say what became of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import assert_close, audit_store, feed, oracle, store_of, tiny, tokens
from torch.utils.hooks import RemovableHandle

import tieredkv
from tieredkv.durable import DurableBlocks, DurableSettings
from tieredkv.errors import ClosedError, StepError
from tieredkv.hf.attachment import Attachment
from tieredkv.hf.step import Member, StepCache
from tieredkv.hf.tenancy import SharedStore
from tieredkv.published import Published
from tieredkv.store import BlockStore
from tieredkv.store.kept import KeptBlocks

SIZES: dict[str, Any] = {"hot": "512 tokens", "warm": "512 tokens", "block_size": 16, "window": 16}


def make(model: Any, **changes: Any) -> tieredkv.KVStore:
    return tieredkv.KVStore(model, **{**SIZES, **changes})


def used(model: Any, folder: Path) -> tuple[tieredkv.KVStore, BlockStore]:
    """A store that keeps six blocks, and where they lie."""
    store = make(model, durable=DurableSettings(folder, free_floor=0))
    with store.cache(tokens(100)) as cache:
        feed(model, tokens(100), cache)
        blocks = store_of(cache)
    return store, blocks


class Stopped(BaseException):
    """As Ctrl-C."""


def stopped(function: Callable[..., Any], time: int, *, after: bool) -> Callable[..., Any]:
    """The function, but Ctrl-C comes once: before it does anything, or when it is done, for the so-manieth time."""
    calls = [0]

    def interrupted(*args: Any, **keywords: Any) -> Any:
        calls[0] += 1
        if calls[0] == time and not after:
            raise Stopped
        result = function(*args, **keywords)
        if calls[0] == time:
            raise Stopped
        return result

    return interrupted


STEPS = [
    (RemovableHandle, "remove", 1),
    (RemovableHandle, "remove", 2),
    (Attachment, "restore", 1),
    (KeptBlocks, "close", 1),
    (SharedStore, "close", 1),
    (Published, "close", 1),
    (DurableBlocks, "close", 1),
]
BREAKS = [(*step, after) for step in STEPS for after in (False, True)]
BREAKS += [(BlockStore, "_free_slots", time, True) for time in (1, 2, 3)]


@pytest.mark.parametrize(
    ("owner", "name", "time", "after"),
    BREAKS,
    ids=[f"{'after' if after else 'before'} {o.__name__}.{n} {t}" for o, n, t, after in BREAKS],
)
@pytest.mark.parametrize("goes_on", [False, True], ids=["alone", "with a cache that goes on"])
def test_closing_that_is_broken_off_does_the_rest_and_is_finished_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, time: int, after: bool, goes_on: bool
) -> None:
    model, ids = tiny(), tokens(100)[:, :60]
    store, blocks = used(model, tmp_path)
    hooks = [model._forward_pre_hooks, model._forward_hooks]
    cache = store.cache(ids) if goes_on else None
    kept = store._shared.kept
    assert kept is not None
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, stopped(getattr(owner, name), time, after=after))
        with pytest.raises(Stopped):
            store.close()
    ends = {
        RemovableHandle: not any(hooks),
        Attachment: model.config._attn_implementation == "sdpa",
        SharedStore: blocks.holders == ([] if cache is None else [cache.parts().holder]),
        DurableBlocks: not store._published.is_open,
    }
    part = {KeptBlocks: SharedStore, BlockStore: SharedStore, Published: DurableBlocks}
    broken_off = {part.get(owner, owner)}
    assert {each for each, has_ended in ends.items() if not has_ended} <= broken_off, "the others have ended"
    store.close()
    store.close()
    assert not any(hooks) and model.config._attn_implementation == "sdpa" and not store._published.is_open
    assert store.stats().kept_blocks == 0
    if cache is None:
        assert blocks.is_closed
        return
    assert blocks.holders == [cache.parts().holder]
    audit_store(blocks)
    assert_close(feed(model, ids[:, 48:], cache), oracle(ids)[:, 48:])
    cache.close()
    assert blocks.is_closed


@pytest.mark.parametrize("others", ["none was used", "one was used and closed", "one goes on"])
def test_a_cache_that_was_not_used_before_its_store_was_closed_says_so(others: str) -> None:
    """Whatever other caches of the store do; what needs no store goes on."""
    model = tiny()
    store, other = make(model), None
    if others != "none was used":
        other = store.cache(tokens(40))
        feed(model, tokens(40), other)
    if other is not None and others == "one was used and closed":
        other.close()
    fresh = store.cache(tokens(30, seed=5))
    store.close()
    model.set_attn_implementation("tieredkv")
    for _ in range(2):
        with pytest.raises(ClosedError, match=r"KVStore was closed before .* take caches from an open KVStore"):
            feed(model, tokens(30, seed=5), fresh)
    assert fresh.get_seq_length() == 0 and repr(fresh)
    assert fresh.stats().tokens == 0
    fresh.reserve(30)
    fresh.crop(-1)
    fresh.reset()
    if other is not None and others == "one goes on":
        assert_close(feed(model, tokens(50)[:, 40:], other), oracle(tokens(50))[:, 40:])
        audit_store(store_of(other))
        assert store_of(other).holders == [other.parts().holder]
    for cache in (fresh, other, fresh):
        if cache is not None:
            cache.close()
    store.close()
    assert store._shared.store is None or store._shared.store.is_closed
    with pytest.raises(ClosedError, match="The cache is closed"):
        feed(model, tokens(30, seed=5), fresh)


def test_nor_can_it_take_part_in_a_step() -> None:
    model, ids = tiny(), tokens(40)
    store = make(model)
    used = store.cache(ids)
    feed(model, ids, used)
    fresh = store.cache(tokens(30, seed=5))
    store.close()
    model.set_attn_implementation("tieredkv")
    steps = StepCache(model.config)
    with pytest.raises(StepError, match="KVStore was closed before") as refused:
        steps.begin([Member(used, tokens(1)[0]), Member(fresh, tokens(30, seed=5)[0])])
    assert refused.value.member == 1
    audit_store(store_of(used))
    used.close()
    fresh.close()


def test_a_cache_that_comes_to_a_store_as_it_closes_is_refused() -> None:
    """Another thread closed it after the cache looked whether it is open."""
    model = tiny()
    with make(model) as store:
        cache = store.cache(tokens(30))
        feed(model, tokens(30), cache)
        blocks = store_of(cache)
        cache.close()
    with pytest.raises(ClosedError):
        blocks.holder()
    assert not blocks.holders
