"""`beyond="drop"`: attention sees sinks and window and nothing else, at true positions; what left is freed for good."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from support import (
    assert_close,
    audit,
    difference,
    feed,
    generate,
    locations,
    oracle,
    store_of,
    tiny,
    tokens,
)

import tieredkv
from tieredkv.device import SimulatedAccelerator
from tieredkv.errors import BudgetError, ConfigError

BLOCK = 16


def settings(window: int = 40, sinks: int = 20, **changes: Any) -> tieredkv.CacheSettings:
    return tieredkv.CacheSettings(
        hot="224 tokens", warm=0, block_size=BLOCK, window=window, sinks=sinks, beyond="drop", **changes
    )


def seen(count: int, window: int = 40, sinks: int = 20) -> torch.Tensor:
    """Which keys each query sees, bool [tokens, tokens], in the words of the documentation."""
    mask = torch.zeros(count, count, dtype=torch.bool)
    sink_blocks = -(-sinks // BLOCK)
    for query in range(count):
        recent = {at // BLOCK for at in range(max(query + 1 - window, 0), query + 1)}
        for key in range(query + 1):
            mask[query, key] = key // BLOCK < sink_blocks or key // BLOCK in recent
    return mask


def reference(ids: torch.Tensor, name: str = "llama", padding: torch.Tensor | None = None, **what: Any) -> torch.Tensor:
    """Logits of a forward without any cache, under the explicit mask; `padding` bool [rows, tokens]."""
    rows, count = ids.shape
    visible = seen(count, **what).expand(rows, 1, count, count)
    if padding is None:
        additive = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
        return oracle(ids, name, mask=additive)
    visible = visible & padding[:, None, None, :]
    additive = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    positions = (padding.long().cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        return tiny(name)(ids, attention_mask=additive, position_ids=positions, use_cache=False).logits


@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (16, 16), (40, 20)])
@pytest.mark.parametrize("pieces", [[300], [60, 100, 1, 1, 1, 30, 1, 1], [39, *[7] * 10, 150, *[1] * 20]])
def test_logits_are_those_of_the_explicit_mask(window: int, sinks: int, pieces: list[int]) -> None:
    model, ids = tiny(), tokens(300)
    with tieredkv.TieredCache(model, settings=settings(window, sinks)) as cache:
        got = feed(model, ids, cache, pieces)
        wanted = reference(ids, window=window, sinks=sinks)
        assert_close(got, wanted)
        assert difference(got, oracle(ids)) > 1e-3, "it is lossy, or this proves nothing"
        held = [place for place in locations(cache) if place != "nowhere"]
        # What the last forward saw before it, and what it leaves.
        assert len(held) <= -(-sinks // BLOCK) + 2 * ((window + BLOCK - 2) // BLOCK + 1 + 2)
        assert cache.stats().dropped_blocks == len(locations(cache)) - len(held) > 0
        audit(cache)


def test_a_softcap_sees_the_same() -> None:
    full = ["full_attention", "full_attention"]
    model, ids = tiny("gemma2", layer_types=full), tokens(150)
    mask = torch.zeros(1, 1, 150, 150).masked_fill(~seen(150), torch.finfo(torch.float32).min)
    with torch.no_grad():
        wanted = tiny("gemma2", layer_types=full)(ids, attention_mask=mask, use_cache=False).logits
    with tieredkv.TieredCache(model, settings=settings()) as cache:
        assert_close(feed(model, ids, cache, [90, 1, 50, *[1] * 4]), wanted)


def test_rows_with_padding_and_rows_that_are_reordered() -> None:
    model, ids = tiny(), tokens(160, rows=2)
    padding = torch.ones(2, 160, dtype=torch.bool)
    padding[0, :9] = False
    wanted = reference(ids, padding=padding)
    with tieredkv.TieredCache(model, settings=settings(sinks=32)) as cache, torch.no_grad():
        got = []
        for first, last in [(0, 100), (100, 101), (101, 140), *[(at, at + 1) for at in range(140, 160)]]:
            positions = (padding.long().cumsum(-1) - 1).clamp(min=0)[:, first:last]
            mask = padding[:, :last].long()
            out = model(ids[:, first:last], past_key_values=cache, attention_mask=mask, position_ids=positions)
            got.append(out.logits)
        whole = torch.cat(got, 1)
        wanted = reference(ids, padding=padding, sinks=32)
        assert_close(whole[0, 9:], wanted[0, 9:])
        assert_close(whole[1], wanted[1])
        cache.reorder_cache(torch.tensor([1, 1]))
        more = tokens(1, seed=5).expand(2, 1)
        row = torch.cat([ids[1:], more[:1]], 1)
        assert_close(feed(model, more, cache)[0], reference(row, sinks=32)[0, -1:])
        audit(cache)


def test_generation_goes_on_for_ever_in_little_memory() -> None:
    model, ids = tiny(), tokens(50)
    with tieredkv.TieredCache(model, settings=settings(max_tokens=100_000)) as cache:
        out = generate(model, ids, cache, 100)
        wanted = reference(out.sequences)
        for step, logits in enumerate(out.logits):
            assert_close(logits, wanted[:, 49 + step], f"step {step}")
        assert cache.stats().hot.peak_blocks <= 2 + 4 + 2
        assert cache.stats().moves == {}


def test_a_long_prompt_is_not_stored_whole() -> None:
    """Far more than hot holds, with no tier below it."""
    model, ids = tiny(), tokens(900)
    with tieredkv.TieredCache(model, settings=settings()) as cache:
        assert_close(feed(model, ids, cache, [850, 1, 1]), reference(ids))
        assert cache.stats().hot.peak_blocks <= 2 + 2 * (4 + 2)


def test_it_works_with_tiers_below_and_shared_stores(cold_dir: Path) -> None:
    model, ids = tiny(), tokens(220)
    with SimulatedAccelerator(seed=3, max_delay_seconds=0.002) as device:
        chosen = dataclasses.replace(settings(window=64), hot="176 tokens", warm="64 tokens", cold=cold_dir)
        with tieredkv.TieredCache(model, settings=chosen, device=device) as cache:
            first = feed(model, ids[:, :120], cache, [100])
            twin = copy.deepcopy(cache)
            got = feed(model, ids[:, 120:], twin, [40, *[1] * 60])
            again = feed(model, ids[:, 120:], cache, [1] * 30)
            wanted = reference(ids, window=64)
            assert_close(torch.cat([first, got], 1), wanted)
            assert_close(again, wanted[:, 120:])
            audit(cache, twin)
            twin.close()
        assert device.clocks.races == 0


def test_a_crop_within_what_is_kept_goes_on_and_one_beyond_is_refused() -> None:
    model, ids = tiny(), tokens(200)
    wanted = reference(ids)
    with tieredkv.TieredCache(model, settings=settings()) as cache:
        feed(model, ids, cache, [190, *[1] * 9])
        cache.crop(-BLOCK)
        assert_close(feed(model, ids[:, 184:], cache, [1] * 8), wanted[:, 184:])
        before = cache.stats()
        with pytest.raises(ConfigError, match="dropped"):
            cache.crop(-100)
        assert cache.get_seq_length() == 200 and cache.stats().hot == before.hot
        more = tokens(3, seed=4)
        assert_close(feed(model, more, cache), reference(torch.cat([ids, more], 1))[:, 200:])
        cache.crop(-500)
        assert_close(feed(model, ids[:, :60], cache), wanted[:, :60])
        audit(cache)


def test_assisted_decoding_takes_tokens_back() -> None:
    """A few new tokens, of which some are rejected, at every step."""
    model, ids = tiny(), tokens(160)
    wanted, at = reference(ids, window=17, sinks=16), 100
    with tieredkv.TieredCache(model, settings=settings(window=17, sinks=16)) as cache:
        feed(model, ids[:, :at], cache)
        while at < 150:
            guess = ids[:, at : at + 9]
            assert_close(feed(model, guess, cache), wanted[:, at : at + 9])
            cache.crop(-6)
            at += 3


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_what_needs_whole_k_and_v_is_refused_before_a_write(name: str) -> None:
    model = tiny(name)
    with tieredkv.TieredCache(model.config, settings=settings()) as cache:
        for _ in range(2):
            with pytest.raises(ConfigError, match="attention over blocks"):
                feed(model, tokens(30), cache)
            assert cache.get_seq_length() == 0
    model = tiny()
    with tieredkv.TieredCache(model, settings=settings()) as cache:
        feed(model, tokens(200), cache)
        for ask in (lambda: cache.gather_layer(0), lambda: pickle.dumps(cache)):
            with pytest.raises(ConfigError, match="attention over blocks"):
                ask()


def test_promotion_and_demotion_leave_what_is_gone_alone(cold_dir: Path) -> None:
    model, ids = tiny(), tokens(200)
    with tieredkv.TieredCache(model, settings=settings(cold=cold_dir)) as cache:
        feed(model, ids[:, :180], cache, [150])
        assert cache.demote("cold") > 0
        assert cache.promote() > 0
        assert_close(feed(model, ids[:, 180:], cache), reference(ids)[:, 180:])
        audit(cache)


def test_it_says_that_it_is_lossy_wherever_one_looks() -> None:
    model = tiny()
    with tieredkv.TieredCache(model, settings=settings()) as cache:
        feed(model, tokens(200), cache)
        assert 'beyond="drop"' in repr(cache) and "lossy" in repr(cache)
        stats = cache.stats()
        assert (stats.beyond, stats.sinks, stats.lossless) == ("drop", 20, False)
        assert "lossy" in {finding.kind for finding in cache.explain()}
    with tieredkv.TieredCache(model, hot="64 tokens", warm=0) as cache:
        assert "lossy" not in repr(cache) and cache.stats().lossless


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="window"):
        tieredkv.CacheSettings(beyond="drop")
    with pytest.raises(ConfigError, match="demote"):
        tieredkv.CacheSettings(beyond="forget", window=3)  # type: ignore[arg-type]
    model = tiny()
    with (
        tieredkv.TieredCache(model, settings=settings(window=200, sinks=20)) as cache,
        pytest.raises(BudgetError, match="window and sinks"),
    ):
        feed(model, tokens(10), cache)


def test_what_is_read_does_not_depend_on_how_the_tokens_came() -> None:
    """Positions and settings alone decide: the same tokens in other pieces give the same logits to rounding."""
    model, ids = tiny(), tokens(240)
    outs = []
    for pieces in ([240], [150, *[1] * 60], [100, 1, 99], [39, 41, 80, 80]):
        with tieredkv.TieredCache(model, settings=settings(window=48, sinks=1)) as cache:
            outs.append(feed(model, ids, cache, pieces))
            assert store_of(cache).visibility is not None
    for out in outs[1:]:
        assert_close(out, outs[0])
