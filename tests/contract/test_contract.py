"""What transformers' generate asks of a cache, in names that both ends of the supported range know.

Runs with the installed transformers in the default suite, and with the oldest supported one in `make lower-end`.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from tieredkv import PositionError, TieredCache
from tieredkv.hf import seam

pytestmark = pytest.mark.contract

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "initializer_range": 0.4,
}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """generate names its keyword differently over the range and says so."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(params=["sdpa", "tieredkv"])
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    made = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    made.generation_config.eos_token_id = None
    made.generation_config.pad_token_id = 0
    made.set_attn_implementation(request.param)
    return made


def cache_for(model: Any, folder: Path) -> TieredCache:
    """64 tokens of each row hot, 32 warm, the rest cold."""
    return TieredCache(model.config, hot="64 tokens", warm="32 tokens", cold=folder, block_size=16, window=16)


def prompt(tokens: int, rows: int = 1, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 97, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def assert_right(model: Any, out: Any, prompt_tokens: int) -> None:
    """Every logit equals the cache-free one of the same sequence."""
    wanted = model(out.sequences, use_cache=False).logits
    scale = wanted.abs().max()
    for step, logits in enumerate(out.logits):
        error = (logits - wanted[:, prompt_tokens - 1 + step]).abs().max() / scale
        assert error < 1e-5, (step, float(error))


def generate(model: Any, ids: torch.Tensor, cache: Any, new: int = 8, **options: Any) -> Any:
    return model.generate(
        ids,
        past_key_values=cache,
        max_new_tokens=new,
        do_sample=False,
        suppress_tokens=[0],  # generate would take it for padding in the next turn
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 100])
def test_generate(model: Any, cold_dir: Path, tokens: int) -> None:
    with cache_for(model, cold_dir) as cache:
        assert_right(model, generate(model, prompt(tokens), cache), tokens)
        assert cache.get_seq_length() == tokens + 7


def test_the_way_is_the_one_that_was_selected(model: Any, cold_dir: Path) -> None:
    with cache_for(model, cold_dir) as cache:
        generate(model, prompt(40), cache)
        selected = seam.implementation_of(model.config) == seam.NAME
        assert cache.mode == ("blocks" if selected else "gather")
        assert cache.stats().moves["hot_to_warm"].blocks > 0


def test_turns_continue(model: Any, cold_dir: Path) -> None:
    with cache_for(model, cold_dir) as cache:
        ids = prompt(30)
        for turn in range(3):
            out = generate(model, ids, cache)
            assert_right(model, out, ids.shape[1])
            ids = torch.cat([out.sequences, prompt(9, seed=turn + 2)], 1)


def test_a_prompt_that_is_already_covered_is_refused_or_right(model: Any, cold_dir: Path) -> None:
    with cache_for(model, cold_dir) as cache:
        ids = prompt(20)
        model(ids, past_key_values=cache)
        if seam.passes_kwargs_to_update():
            with pytest.raises(PositionError):
                generate(model, ids, cache)
        cache.crop(-1) if cache.get_seq_length() == 20 else cache.reset()
        assert_right(model, generate(model, ids, cache), 20)


def test_chunked_prefill(model: Any, cold_dir: Path) -> None:
    for chunk in (7, 16, 33):
        with cache_for(model, cold_dir) as cache:
            assert_right(model, generate(model, prompt(90), cache, prefill_chunk_size=chunk), 90)


def test_beams(model: Any, cold_dir: Path) -> None:
    ids = prompt(21, rows=2)
    stock = model.generate(
        ids, past_key_values=DynamicCache(config=model.config), num_beams=3, max_new_tokens=12, do_sample=False
    )
    with cache_for(model, cold_dir) as cache:
        ours = model.generate(ids, past_key_values=cache, num_beams=3, max_new_tokens=12, do_sample=False)
    assert torch.equal(stock, ours)


def test_prompt_lookup_and_crop(model: Any, cold_dir: Path) -> None:
    ids = prompt(6).repeat(1, 6)
    stock = model.generate(ids, past_key_values=DynamicCache(config=model.config), max_new_tokens=14, do_sample=False)
    for candidates in (1, 3, 20):
        with cache_for(model, cold_dir) as cache:
            ours = model.generate(
                ids, past_key_values=cache, prompt_lookup_num_tokens=candidates, max_new_tokens=14, do_sample=False
            )
        assert torch.equal(stock, ours), candidates


def test_left_padding(model: Any, cold_dir: Path) -> None:
    ids, mask = prompt(40, rows=3), torch.ones((3, 40), dtype=torch.int64)
    mask[0, :17] = 0
    mask[2, :1] = 0
    ids = ids.masked_fill(mask == 0, 0)
    stock = generate(model, ids, DynamicCache(config=model.config), attention_mask=mask)
    with cache_for(model, cold_dir) as cache:
        ours = generate(model, ids, cache, attention_mask=mask)
    for a, b in zip(stock.logits, ours.logits, strict=True):
        assert (a - b).abs().max() / a.abs().max() < 1e-5


def test_copies(model: Any, cold_dir: Path) -> None:
    ids = prompt(60)
    with cache_for(model, cold_dir) as cache:
        model(ids[:, :50], past_key_values=cache)
        for twin in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
            assert_right(model, generate(model, ids, twin), 60)
            twin.close()
        assert cache.get_seq_length() == 50
        assert_right(model, generate(model, ids, cache), 60)
