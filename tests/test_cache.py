"""What a cache gives: the logits of a forward without one, whatever the family, mask, dtype, device and codec."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import (
    WAYS,
    assert_close,
    assert_generated,
    audit,
    difference,
    feed,
    generate,
    locations,
    of,
    oracle,
    small,
    tiny,
    tokens,
)
from transformers import DynamicCache

import tieredkv
from tieredkv.device import SimulatedAccelerator

FAMILIES = ["llama", "gemma3", "gemma3n", "gemma2", "mistral", "gptoss", "mla", "bloom", "qwen3next"]


@pytest.mark.contract
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_in_three_tiers(cold_dir: Path, name: str, way: str) -> None:
    """Pieces that start and end inside blocks, at their borders, and over several of them."""
    model, ids = tiny(name), tokens(250, rows=2)
    with small(of(model, way), cold_dir) as cache:
        pieces = [100, 1, 1, 10, 16, 1, 31, 33, 1]
        logits = feed(model, ids, cache, pieces)
        # Linear attention in pieces differs from linear attention at once by more than rounding.
        wanted = feed(tiny(name), ids, DynamicCache(config=model.config), pieces) if name == "qwen3next" else None
        assert_close(logits, oracle(ids, name) if wanted is None else wanted)
        if cache.parts().tiered:
            assert set(locations(cache)) == {"hot", "warm", "cold"}
        over_blocks = way == "blocks" and name in ("llama", "gemma3", "gemma3n", "gemma2", "gptoss", "qwen3next")
        assert cache.mode == ("blocks" if over_blocks else "gather")
        assert (cache.fallback_reason is None) == over_blocks
        audit(cache)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes(cold_dir: Path, dtype: torch.dtype, way: str) -> None:
    """float64 shows errors that rounding of fp32 would hide."""
    model, ids = tiny(dtype=dtype), tokens(150)
    with small(of(model, way), cold_dir) as cache:
        tolerance = {torch.float64: 1e-12, torch.bfloat16: 5e-2, torch.float16: 5e-3}[dtype]
        assert_close(feed(model, ids, cache, [80, 1, 20]), oracle(ids, dtype=dtype), tolerance=tolerance)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kernel", ["native", "flash"])
@pytest.mark.parametrize("read_in_place", [True, False])
def test_kernels_and_reading_in_place(cold_dir: Path, kernel: str, way: str, read_in_place: bool) -> None:
    model, ids = tiny(), tokens(170, rows=2)
    settings = tieredkv.CacheSettings(kernel=kernel, read_in_place=read_in_place)  # type: ignore[arg-type]
    with small(of(model, way), cold_dir, settings=settings) as cache:
        assert_close(feed(model, ids, cache, [90, 1, 30, 1]), oracle(ids))
        assert (cache.stats().moves.get("warm_to_hot") is not None) == (not read_in_place)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("addresses_host", [True, False])
def test_on_a_device_whose_copies_come_late(cold_dir: Path, addresses_host: bool, way: str) -> None:
    model, ids = tiny(), tokens(300, rows=2)
    device = SimulatedAccelerator(seed=5, max_delay_seconds=0.003, addresses_host=addresses_host)
    with small(of(model, way), cold_dir, device=device) as cache:
        assert_close(feed(model, ids, cache, [130, 1, 1, 40, *[1] * 20, 60]), oracle(ids))
        assert device.clocks.races == 0
        audit(cache)


@pytest.mark.contract
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("padding", ["left", "holes"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "mla"])
def test_padded_batches(cold_dir: Path, name: str, padding: str, way: str) -> None:
    model, ids = tiny(name), tokens(140, rows=3)
    mask = torch.ones_like(ids)
    mask[0, :37] = mask[2, :1] = 0
    if padding == "holes":
        mask[1, 20:23] = mask[2, 90:101] = mask[0, 61] = 0
    wanted, got, past = oracle(ids, name, mask=mask), [], 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with small(of(model, way), cold_dir) as cache, torch.no_grad():
        for new in (100, 1, 1, 15, 1, 22):
            part = slice(past, past + new)
            past += new
            keywords = {"attention_mask": mask[:, :past], "position_ids": positions[:, part]}
            got.append(model(ids[:, part], past_key_values=cache, **keywords).logits)
        assert_close(torch.cat(got, 1)[mask.bool()], wanted[mask.bool()])


@pytest.mark.parametrize("way", WAYS)
def test_generation_of_a_padded_batch(cold_dir: Path, way: str) -> None:
    model, ids = tiny(), tokens(70, rows=2)
    mask = torch.ones_like(ids)
    mask[0, :33] = 0
    with small(of(model, way), cold_dir) as cache:
        out = generate(model, ids.masked_fill(mask == 0, 0), cache, 20, attention_mask=mask)
        assert_generated(out, 70, mask=mask)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_four_dimensional_masks_of_the_user(cold_dir: Path, kind: str, way: str) -> None:
    model, ids, total = tiny(), tokens(130, rows=2), 130
    seen = torch.ones(2, 1, total, total, dtype=torch.bool).tril()
    generator = torch.Generator().manual_seed(3)
    seen &= (torch.rand(2, 1, total, total, generator=generator) > 0.3) | torch.eye(total, dtype=torch.bool)
    mask = seen if kind == "bool" else torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    got, past = [], 0
    with small(of(model, way), cold_dir) as cache, torch.no_grad():
        for new in (80, 1, 1, 30, 18):
            part = slice(past, past + new)
            past += new
            four = mask[:, :, part, :past]
            got.append(model(ids[:, part], past_key_values=cache, attention_mask=four).logits)
        assert cache.mode == way
    assert_close(torch.cat(got, 1), oracle(ids, mask=mask))


@pytest.mark.parametrize(
    ("codec", "way"), [("fp8", "blocks"), ("fp8", "gather"), ("int8", "blocks"), ("int4", "gather")]
)
def test_lossy_is_deterministic(cold_dir: Path, codec: str, way: str) -> None:
    """Which copies finish first differs from run to run; not one bit of the logits does."""
    model, ids = tiny(), tokens(200, rows=2)
    runs = []
    for seed, delay in [(1, 0.0), (2, 0.002)]:
        device = SimulatedAccelerator(seed=seed, max_delay_seconds=delay)
        with small(of(model, way), cold_dir, codec=codec, device=device) as cache:
            runs.append(feed(model, ids, cache, [120, *[1] * 20, 30, *[1] * 20]))
            assert device.clocks.races == 0
    assert torch.equal(*runs)
    error = (runs[0] - oracle(ids)).abs().max() / oracle(ids).abs().max()
    assert error > 1e-5, "nothing went through the codec"


def test_lossy_is_deterministic_where_blocks_are_dropped_on_their_way(cold_dir: Path) -> None:
    """What is free decides where new blocks go; slots that a copy still holds must not be missing for a while."""
    model, ids = tiny(), tokens(200)
    eager = tieredkv.CacheSettings(write_down_at=0.0)
    sizes = {"hot": "208 tokens", "warm": "160 tokens", "window": 1, "codec": "fp8"}
    runs, places = [], []
    for latency_seconds in (0.0, 0.05):
        device = SimulatedAccelerator(latency_seconds=latency_seconds)
        with small(model, None, device=device, settings=eager, **sizes) as cache:
            feed(model, ids[:, :70], cache, [66])
            if not latency_seconds:
                device.synchronize()
            cache.crop(-50)
            runs.append(feed(model, ids[:, 20:], cache, [130, *[1] * 10, 20]))
            places.append(locations(cache))
    assert places[0] == places[1]
    assert torch.equal(*runs)


@pytest.mark.parametrize("codec", ["fp8", "int8"])
def test_lossy_keys_and_values_are_near_the_exact_ones(cold_dir: Path, codec: str) -> None:
    model, ids = tiny(), tokens(150)
    exact = DynamicCache(config=model.config)
    with small(model.config, cold_dir, codec=codec) as cache:
        for some in (cache, exact):
            feed(model, ids, some, [100, 1, 1])
        pairs = zip(cache.gather_layer(0) or (), (exact.layers[0].keys, exact.layers[0].values), strict=True)
        for got, wanted in pairs:
            assert 0 < difference(got, wanted) <= {"fp8": 0.04, "int8": 0.01}[codec]
