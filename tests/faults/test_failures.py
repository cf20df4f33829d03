"""What a failure leaves behind: a forward that failed did not happen, slots are given back, the right one is blamed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import WAYS, assert_close, audit, feed, locations, of, oracle, small, store_of, tiny, tokens

import tieredkv
from tieredkv.config import CacheSettings
from tieredkv.errors import ChecksumError

STREAM = CacheSettings(read_in_place=False)


def spoil(cache: tieredkv.TieredCache, role: str, layer: int) -> int:
    """Change a byte of a block that lies in this tier and not in hot; returns its id."""
    cache.crop(0)  # ends the last forward, and its copies
    store, holder = store_of(cache), cache.parts().holder
    assert holder is not None
    store.wait_all()
    store.prefetcher.flush()
    block = next(b for b in holder.table.blocks() if getattr(b, role) is not None and b.hot is None)
    out = tuple(plane.empty(1) for plane in store.mover.planes[layer])
    store.tiers[role].read(layer, [getattr(block, role)], out)
    out[0].view(torch.int32)[0, 0, 0, 0] ^= 1
    store.tiers[role].write(layer, [getattr(block, role)], out)
    return block.id


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("way", WAYS)
def test_a_forward_that_failed_in_any_layer_did_not_happen(cold_dir: Path, way: str, layer: int) -> None:
    model, ids = tiny(), tokens(202)
    with small(of(model, way), cold_dir, warm=0) as cache:
        feed(model, ids[:, :200], cache)
        block = spoil(cache, "cold", layer)
        with pytest.raises(ChecksumError) as caught:
            feed(model, ids[:, 200:201], cache)
        assert (caught.value.block, caught.value.layer) == (block, layer)
        assert cache.get_seq_length() == 200
        audit(cache)


def test_a_promotion_that_fails_gives_its_slot_back(cold_dir: Path) -> None:
    model, ids = tiny(), tokens(100)
    with small(model, cold_dir, warm=0, hot="256 tokens") as cache:
        feed(model, ids, cache)
        cache.demote("cold")
        spoil(cache, "cold", 1)
        with pytest.raises(ChecksumError):
            cache.promote()
        audit(cache)


def test_a_wrong_block_in_warm_is_no_reason_to_give_up_cold(cold_dir: Path) -> None:
    model, ids = tiny(), tokens(260)
    with small(model, cold_dir, warm="64 tokens", settings=STREAM) as cache:
        first = feed(model, ids[:, :120], cache)
        spoil(cache, "warm", 0)
        sealed = len(locations(cache))
        moved = cache.demote("cold")
        assert store_of(cache).cold_failure is None
        assert moved == locations(cache).count("cold") < sealed, "what could not be copied did not move"
        assert locations(cache).count("warm") > 0
        cache.reset()
        assert_close(feed(model, ids, cache, [200, *[1] * 60]), oracle(ids))
        assert first.shape[1] == 120
        audit(cache)
