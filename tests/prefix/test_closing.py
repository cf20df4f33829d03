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
from tieredkv.hf.attachment import Attachment
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
