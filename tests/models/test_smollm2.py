"""The main job on a real model and real text: SmolLM2-135M answers about 6,000 tokens, as with transformers' own cache.

The model comes in an installed package and is loaded once. Everything here is slow.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import difference, greedy_answer
from transformers import DynamicCache

import tieredkv
from tieredkv.cli.model import Loaded, load
from tieredkv.cli.prompt import build

pytestmark = pytest.mark.slow

DOCUMENT_TOKENS, NEW_TOKENS = 6000, 24
KV_TOKEN_BYTES = 30 * 2 * 3 * 64 * 4  # layers, K and V, heads, dim, fp32


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return load(None, torch.float32, "cpu")


@pytest.fixture(scope="module")
def prompt(loaded: Loaded) -> torch.Tensor:
    """Ids [1, tokens] of prose that every Python has, and a question about it."""
    ids = build(loaded.tokenizer, None, None, DOCUMENT_TOKENS + 100).input_ids
    assert ids.shape[1] >= DOCUMENT_TOKENS
    return ids


@pytest.fixture(scope="module")
def wanted(loaded: Loaded, prompt: torch.Tensor) -> tuple[list[int], torch.Tensor]:
    return greedy_answer(loaded.model, prompt, DynamicCache(config=loaded.model.config), NEW_TOKENS)


@pytest.mark.parametrize("way", ["blocks", "gather"])
def test_an_answer_from_three_tiers_is_that_of_the_stock_cache(
    loaded: Loaded, prompt: torch.Tensor, wanted: tuple[list[int], torch.Tensor], cold_dir: Path, way: str
) -> None:
    """Hot holds an eighth of the keys and values, warm a quarter, the disk the rest."""
    model = loaded.model
    all_bytes = (prompt.shape[1] + NEW_TOKENS) * KV_TOKEN_BYTES
    cache = tieredkv.TieredCache(
        model if way == "blocks" else model.config, hot=all_bytes // 8, warm=all_bytes // 4, cold=cold_dir, window=256
    )
    with cache:
        got, logits = greedy_answer(model, prompt, cache, NEW_TOKENS)
        stats = cache.stats()
        places = {entry.location for entry in cache.block_table()}
    assert got == wanted[0]
    assert difference(logits, wanted[1]) <= 1e-4
    assert stats.mode == way
    assert places == {"hot", "warm", "cold"}
    for tier in (stats.hot, stats.warm):
        assert tier.budget_bytes is not None
        assert 0 < tier.peak_bytes <= tier.reserved_bytes <= tier.budget_bytes
    assert stats.hot.budget_bytes == all_bytes // 8
    assert stats.verified_blocks > 0
    assert stats.checksum_failures == stats.tier_failures == 0
    assert model.config._attn_implementation == "sdpa"
