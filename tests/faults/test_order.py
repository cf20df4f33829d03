"""Copies that come late and in any legal order change nothing: not a logit, and with a lossy codec not a bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import WAYS, assert_close, audit, feed, of, oracle, small, tiny, tokens

from tieredkv.config import CacheSettings
from tieredkv.device import SimulatedAccelerator

PIECES = [90, 1, 60, *[1] * 30]
DELAYS = [(0, 0.0), (1, 0.002), (2, 0.004)]
"""(seed, most seconds that are added at random to a copy)"""


def logits(way: str, folder: Path, seed: int, delay_seconds: float, **settings: Any) -> torch.Tensor:
    """A long forward, steps, a cut and a return, under these delays."""
    model, ids = tiny(), tokens(260)
    device = SimulatedAccelerator(seed=seed, max_delay_seconds=delay_seconds, bytes_per_second=5e7)
    chosen = CacheSettings(chunk_tokens=32, **settings)
    with small(of(model, way), folder / f"{seed}", device=device, settings=chosen) as cache:
        parts = [feed(model, ids[:, : sum(PIECES)], cache, PIECES)]
        cache.crop(-20)
        at = sum(PIECES) - 20
        parts.append(feed(model, ids[:, at : at + 50], cache, [20, *[1] * 30]))
        cache.demote("cold")
        cache.promote()
        parts.append(feed(model, ids[:, at + 50 : at + 60], cache, [1] * 10))
        audit(cache)
        assert device.clocks.races == 0
    return torch.cat(parts, 1)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("seed", "delay_seconds"), [*DELAYS, (3, 0.001)])
def test_late_copies_change_no_logit(cold_dir: Path, way: str, seed: int, delay_seconds: float) -> None:
    got = logits(way, cold_dir, seed, delay_seconds)
    at = sum(PIECES) - 20
    wanted = oracle(tokens(260))
    assert_close(got, torch.cat([wanted[:, : sum(PIECES)], wanted[:, at : at + 60]], 1))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_streams_write_what_inference_mode_made(cold_dir: Path, way: str, codec: str) -> None:
    """The first forward in inference mode, and later ones out of it."""
    model, ids = tiny(), tokens(200)
    device = SimulatedAccelerator()
    with small(of(model, way), cold_dir, device=device, codec=codec) as cache:
        with torch.inference_mode():
            parts = [feed(model, ids[:, :150], cache, [120, *[1] * 10])]
        parts.append(feed(model, ids[:, 150:], cache, [1] * 25))
        assert cache.stats().cold.hits > 0
    if codec == "raw":
        assert_close(torch.cat(parts, 1), oracle(ids))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("codec", ["fp8", "int4"])
def test_a_lossy_codec_gives_the_same_bits_whatever_is_late(cold_dir: Path, way: str, codec: str) -> None:
    first, *others = (lossy_logits(way, cold_dir, codec, seed, delay_seconds) for seed, delay_seconds in DELAYS)
    for other in others:
        assert torch.equal(first, other)
    assert not torch.equal(first, oracle(tokens(190))), "the codec lost nothing: the test proves nothing"


def lossy_logits(way: str, folder: Path, codec: str, seed: int, delay_seconds: float) -> torch.Tensor:
    model, ids = tiny(), tokens(190)
    device = SimulatedAccelerator(seed=seed, max_delay_seconds=delay_seconds)
    settings = CacheSettings(chunk_tokens=32)
    with small(of(model, way), folder / f"{seed}", device=device, codec=codec, settings=settings) as cache:
        return feed(model, ids, cache, [90, 1, 60, *[1] * 39])
