"""Blocks outside the window encoded on the device: the same bits as the codec gives below it, in half the memory."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from support import assert_close, at_rest, audit, difference, feed, locations, oracle, store_of, tiny, tokens

import tieredkv
from tieredkv.codecs import get_codec
from tieredkv.device import SimulatedAccelerator
from tieredkv.errors import BudgetError, ChecksumError, ConfigError

DIMS = {"head_dim": 32}
"""With heads of 8 elements the scales weigh as much as a quarter of the values."""
TOKEN_BYTES = 2 * 2 * 2 * 32 * 4  # layers, K and V, heads, dim, fp32
PIECES = [100, 1, 1, 60, *[1] * 20]


def cache_of(model: Any, codec: str = "int8", hot: int | str = "160 tokens", **changes: Any) -> tieredkv.TieredCache:
    settings = tieredkv.CacheSettings(chunk_tokens=32, **changes.pop("settings", {}))
    sizes = {"warm": 0, "block_size": 16, "window": 32, "codec": codec, "hot_codec": codec}
    return tieredkv.TieredCache(model, hot=hot, settings=settings, **{**sizes, **changes})


def test_device_memory_holds_more_tokens_than_it_could_exactly() -> None:
    model, ids = tiny(**DIMS), tokens(220)
    hot_bytes = 160 * TOKEN_BYTES
    with pytest.raises(BudgetError), cache_of(model, hot=hot_bytes, codec="raw", hot_codec=None) as exact:
        feed(model, ids, exact, PIECES)
    with cache_of(model, hot=hot_bytes) as cache:
        got = feed(model, ids, cache, PIECES)
        assert_close(got, oracle(ids, **DIMS), tolerance=0.2)
        assert difference(got, oracle(ids, **DIMS)) > 1e-5, "nothing went through the codec"
        stats = cache.stats()
        assert set(locations(cache)) == {"hot", "packed"}
        assert set(locations(cache)[-3:]) == {"hot"}, "the window is exact"
        assert stats.packed.blocks >= 9 and stats.packed.hits > 0
        assert (stats.hot.budget_bytes or 0) + (stats.packed.budget_bytes or 0) <= hot_bytes
        assert stats.hot.reserved_bytes + stats.packed.reserved_bytes <= hot_bytes
        assert set(stats.moves) == {"hot_to_packed", "packed_to_hot"}
        assert tieredkv.CacheStats.from_dict(dataclasses.asdict(stats)) == stats
        audit(cache)


@pytest.mark.parametrize("codec", ["int8", "fp8", "int4"])
def test_what_is_read_back_is_what_the_codec_makes_of_it(codec: str) -> None:
    """Bit for bit: exact where a block is hot, and once through the codec where it is packed."""
    pairs = [(torch.randn(1, 2, 220, 32), torch.randn(1, 2, 220, 32)) for _ in range(2)]
    with cache_of(tiny(**DIMS).config, codec) as cache:
        for first, last in itertools.pairwise([0, *itertools.accumulate([100, 1, 1, 60, *[1] * 58])]):
            for layer, (k, v) in enumerate(pairs):
                cache.update(k[:, :, first:last], v[:, :, first:last], layer)
        places = locations(cache)
        assert places.count("packed") >= 9 and "hot" in places
        for layer, pair in enumerate(pairs):
            got = cache.gather_layer(layer)
            assert got is not None
            encoded = through_codec(codec, *(each[:, :, :208] for each in pair))
            for index, place in enumerate(places):
                part = slice(16 * index, 16 * index + 16)
                for found, exact, lossy in zip(got, pair, encoded, strict=True):
                    wanted = lossy if place == "packed" else exact
                    assert torch.equal(found[:, :, part], wanted[:, :, part]), (layer, index, place)


def through_codec(codec: str, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V `[1, heads, tokens, dim]`, whole blocks, as they come out of a codec."""
    k, v = (each[0].unflatten(1, (-1, 16)) for each in (k, v))
    k_out, v_out = torch.empty_like(k), torch.empty_like(v)
    coder = get_codec(codec)
    coder.decode(coder.encode(k, v), k_out, v_out)
    return k_out.flatten(1, 2)[None], v_out.flatten(1, 2)[None]


def test_what_does_not_fit_on_the_device_goes_on_down(cold_dir: Path) -> None:
    model, ids = tiny(**DIMS), tokens(300, rows=2)
    with cache_of(model, hot="112 tokens", warm="32 tokens", cold=cold_dir) as cache:
        feed(model, ids, cache, [200, *[1] * 60, 40])
        assert set(locations(cache)) == {"hot", "packed", "warm", "cold"}
        packed = sum(place == "packed" for place in locations(cache))
        assert cache.demote("cold") > packed > 0
        assert set(locations(cache)) <= {"hot", "cold"} and "cold" in locations(cache)
        moves = cache.stats().moves
        assert moves["packed_to_cold"].blocks == packed
        assert cache.promote() > 0
        audit(cache)


def test_late_copies_change_no_bit(cold_dir: Path) -> None:
    model, ids = tiny(**DIMS), tokens(260)
    runs = []
    for seed, delay_seconds in [(0, 0.0), (1, 0.002), (2, 0.004)]:
        device = SimulatedAccelerator(seed=seed, max_delay_seconds=delay_seconds)
        with cache_of(model, warm="48 tokens", cold=cold_dir / f"{seed}", device=device) as cache:
            parts = [feed(model, ids[:, :182], cache, PIECES)]
            cache.crop(-20)
            parts.append(feed(model, ids[:, 162:220], cache, [20, *[1] * 38]))
            cache.demote("cold")
            cache.promote()
            parts.append(feed(model, ids[:, 220:], cache, [1] * 10))
            assert "packed_to_cold" in cache.stats().moves
            audit(cache)
        assert device.clocks.races == 0
        runs.append(torch.cat(parts, 1))
    assert torch.equal(runs[0], runs[1]) and torch.equal(runs[0], runs[2])


def test_a_block_that_changes_in_device_memory_is_noticed() -> None:
    model, ids = tiny(**DIMS), tokens(220)
    with cache_of(model) as cache:
        feed(model, ids[:, :200], cache, [150])
        store = store_of(at_rest(cache))
        store.prefetcher.flush()
        block = next(b for row in store.holders for b in row.table.rows[0] if b.location == "packed")
        assert store.packed is not None and block.packed is not None
        store.packed.run(1, block.packed, 1)[0].view(torch.uint8)[0, 0, 0, 0] ^= 4
        with pytest.raises(ChecksumError, match=f"{block.id}"):
            feed(model, ids[:, 200:], cache)


def test_a_session_and_a_prefix_come_back_into_device_memory(tmp_path: Path) -> None:
    model, ids = tiny(**DIMS), tokens(230)
    settings = tieredkv.CacheSettings(chunk_tokens=32)
    sizes = {"hot": "240 tokens", "warm": 0, "block_size": 16, "window": 32, "codec": "int8", "hot_codec": "int8"}
    with tieredkv.TieredCache(model, settings=settings, **sizes) as cache:
        feed(model, ids[:, :200], cache)
        cache.save(tmp_path / "session")
        wanted = feed(model, ids[:, 200:], cache)
    with tieredkv.TieredCache.load(tmp_path / "session", model) as loaded:
        assert_close(feed(model, ids[:, 200:], loaded), wanted, tolerance=0.05)
    durable = tmp_path / "blocks"
    with tieredkv.KVStore(model, settings=settings, durable=durable, **sizes) as store, store.cache(ids) as cache:
        feed(model, ids[:, :200], cache)
        store.publish(cache, ids[:, :200])
    with tieredkv.KVStore(model, settings=settings, durable=durable, **sizes) as store, store.cache(ids) as cache:
        found = cache.get_seq_length()
        assert found >= 64 and "packed" in locations(cache)
        assert_close(feed(model, ids[:, found:], cache)[:, -30:], wanted, tolerance=0.2)
        audit(cache)


@pytest.mark.parametrize(
    "wrong",
    [
        {"hot_codec": "int8", "codec": "raw"},
        {"hot_codec": "int8", "codec": "fp8"},
        {"hot_codec": "raw", "codec": "raw"},
        {"hot_codec": "int8", "codec": "int8", "beyond": "drop", "window": 32},
    ],
)
def test_what_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="hot_codec"):
        tieredkv.CacheSettings(**wrong)


def test_a_context_that_fits_nowhere_says_what_to_enlarge() -> None:
    model = tiny(**DIMS)
    with cache_of(model) as cache, pytest.raises(BudgetError, match="warm=") as caught:
        feed(model, tokens(900), cache)
    assert caught.value.tier == "warm"


def test_a_refusal_names_a_setting_there_is() -> None:
    """What is packed lies in the room of hot."""
    model = tiny(**DIMS)
    with cache_of(model) as cache:
        feed(model, tokens(120), cache)
        with pytest.raises(BudgetError, match="enlarge hot=") as caught:
            cache.reserve(2000)
        assert caught.value.tier == "hot"
    with cache_of(model, warm="300 tokens") as cache:
        feed(model, tokens(480), cache)
        with pytest.raises(BudgetError, match=r"fit in packed.* enlarge hot=") as caught:
            cache.demote("packed")
        assert caught.value.tier == "hot"


@pytest.mark.parametrize("sizes", [{"hot": "96 tokens"}, {"hot": "64 tokens", "window": None}], ids=["window", "none"])
def test_hot_without_room_for_one_encoded_block_is_refused(sizes: dict[str, Any]) -> None:
    """Else nothing would ever be encoded on the device, and nobody told."""
    model = tiny(**DIMS)
    with cache_of(model, warm="300 tokens", **sizes) as cache:
        with pytest.raises(BudgetError, match=r"no room for encoded blocks.* enlarge hot=") as caught:
            feed(model, tokens(20), cache)
        assert caught.value.tier == "hot" and cache.get_seq_length() == 0
    with cache_of(model, warm="300 tokens", **{**sizes, "hot": "160 tokens"}) as cache:
        feed(model, tokens(220), cache, PIECES)
        assert cache.stats().packed.blocks > 0
