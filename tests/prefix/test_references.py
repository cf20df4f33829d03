"""References to blocks that are looked up: none is missing while a cache begins, and none is left when it does not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import assert_close, audit_store, feed, oracle, store_of, tiny, tokens

import tieredkv
from tieredkv.durable import DurableBlocks, DurableSettings
from tieredkv.errors import BudgetError
from tieredkv.store import BlockStore
from tieredkv.store.restore import Restore

SIZES: dict[str, Any] = {"hot": "512 tokens", "warm": "512 tokens", "block_size": 16, "window": 16}


def make(model: Any, folder: Path, **changes: Any) -> tieredkv.KVStore:
    return tieredkv.KVStore(model, **{**SIZES, "durable": DurableSettings(folder, free_floor=0), **changes})


def published(model: Any, folder: Path, *prompts: torch.Tensor) -> None:
    with make(model, folder) as store:
        for ids in prompts:
            with store.cache(ids) as cache:
                feed(model, ids, cache)


@pytest.mark.parametrize(
    ("hot", "warm"), [("64 tokens", "96 tokens"), ("96 tokens", "64 tokens"), ("128 tokens", 0), ("96 tokens", 0)]
)
def test_room_for_one_row_is_not_made_of_what_was_found_for_another(tmp_path: Path, hot: str, warm: Any) -> None:
    model, prompts = tiny(), [tokens(161, seed=seed) for seed in (1, 2)]
    published(model, tmp_path, *prompts)
    ids, cold = torch.cat(prompts), tieredkv.ColdSettings(tmp_path / "cold", free_floor=0)
    with make(model, tmp_path, hot=hot, warm=warm, cold=cold) as store:
        cache = store.cache(ids)
        known = cache.get_seq_length()
        assert known < 160, "there is no room for both"
        assert all(entry.location != "nowhere" for entry in cache.block_table())
        assert_close(feed(model, ids[:, known:], cache), oracle(ids)[:, known:])
        audit_store(store_of(cache))
        cache.close()


class Stopped(BaseException):
    """As Ctrl-C."""


def raises(*_: Any) -> Any:
    raise Stopped


def stopping_after(pieces: int) -> Any:
    original = DurableBlocks.read_all

    def read_all(self: DurableBlocks, hashes: Any) -> Iterator[Any]:
        for number, piece in enumerate(original(self, hashes)):
            if number == pieces:
                raise Stopped
            yield piece

    return read_all


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        (DurableBlocks, "read_all", lambda: stopping_after(0)),
        (DurableBlocks, "read_all", lambda: stopping_after(1)),
        (Restore, "_views", lambda: raises),
        (Restore, "_write", lambda: raises),
        (DurableBlocks, "find", lambda: raises),
        (BlockStore, "new_block", lambda: raises),
    ],
    ids=["before the first piece", "after it", "slots were taken", "writing it", "looking", "handing over"],
)
def test_a_prompt_whose_restoring_is_interrupted_leaves_nothing_behind(
    tmp_path: Path, owner: type, name: str, broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither slots, nor references to what was in memory already or came for another row."""
    model, prompts = tiny(), [tokens(161, seed=seed) for seed in (1, 2)]
    published(model, tmp_path, *prompts)
    monkeypatch.setattr("tieredkv.durable.blocks.PIECE_BYTES", 1)  # one layer at once
    with make(model, tmp_path) as store:
        start = prompts[0][:, :49]
        with store.cache(start) as cache:
            feed(model, start[:, cache.get_seq_length() :], cache)
            blocks = store_of(cache)
        for ids in (prompts[0], torch.cat(prompts)):
            used = {role: tier.slots.used for role, tier in blocks.tiers.items()}
            with monkeypatch.context() as broken_once:
                broken_once.setattr(owner, name, broken())
                with pytest.raises(Stopped):
                    store.cache(ids)
            assert {role: tier.slots.used for role, tier in blocks.tiers.items()} == used
            audit_store(blocks)
            with store.cache(ids) as cache:
                assert cache.get_seq_length() == 160
                assert_close(feed(model, ids[:, 160:], cache), oracle(ids)[:, 160:])
            audit_store(blocks)


def test_a_cache_that_needs_room_after_its_store_was_closed_is_told_that_there_is_none(tmp_path: Path) -> None:
    """What was kept went with the store, and the cache goes on with what it has."""
    model, ids = tiny(), tokens(200, seed=3)
    store = make(model, tmp_path, hot="96 tokens", warm="64 tokens", durable=False)
    with store.cache(tokens(60)) as first:
        feed(model, tokens(60), first)
    cache = store.cache(ids)
    feed(model, ids[:, :40], cache)
    store.close()
    assert store.stats().kept_blocks == 0
    model.set_attn_implementation("tieredkv")
    got, fed = [], 40
    with pytest.raises(BudgetError, match="warm"):
        for fed in range(40, 200, 8):
            got.append(feed(model, ids[:, fed : fed + 8], cache))
    assert fed > 128, "the room of what was kept is its own"
    assert_close(torch.cat(got, 1), oracle(ids[:, :fed])[:, 40:])
    blocks = store_of(cache)
    audit_store(blocks)
    cache.close()
    assert blocks.is_closed
