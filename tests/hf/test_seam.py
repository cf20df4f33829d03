"""The seam: "tieredkv" equals SDPA without a cache of ours, and finds out by itself where blocks cannot serve."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import BASE, VOCABULARY, assert_close, config_of, feed, oracle, small, tiny, tokens
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo.testing import CompileCounter
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, EncoderDecoderCache
from transformers.masking_utils import causal_mask_function, sdpa_mask, sliding_window_causal_mask_function
from transformers.models.llama import modeling_llama

import tieredkv
from tieredkv.attention.masks import MaskSpec
from tieredkv.errors import HandleError, TrainingModeError
from tieredkv.hf import seam
from tieredkv.hf.layers import HANDLE


class Module(torch.nn.Module):
    """What the attention function reads of an attention module."""

    num_key_value_groups = 2

    def __init__(self, is_causal: bool = True) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.eval()


def qkv(queries: int, keys: int, rows: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q of four heads, k and v of two, with eight elements."""
    generator = torch.Generator().manual_seed(queries * 100 + keys)
    shapes = ((rows, 4, queries, 8), (rows, 2, keys, 8), (rows, 2, keys, 8))
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    return q, k, v


def spec(q: int, kv: int, rows: int = 2, padding: torch.Tensor | None = None, function: Any = None) -> MaskSpec:
    return seam.mask(
        batch_size=rows,
        q_length=q,
        kv_length=kv,
        q_offset=kv - q,
        mask_function=function or causal_mask_function,
        attention_mask=padding,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )


# ---- without a cache


def test_registration_can_be_repeated() -> None:
    before = AttentionInterface._global_mapping[seam.NAME]
    seam.register()
    assert AttentionInterface._global_mapping[seam.NAME] is before
    assert seam.NAME in AttentionMaskInterface._global_mapping


@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma2", "gptoss", "mistral", "mla", "qwen3next"])
@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_a_model_without_a_cache_gives_what_it_gave(name: str, padded: bool) -> None:
    model, ids = tiny(name), tokens(40, rows=2)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :13] = 0
    wanted = oracle(ids, name, mask=mask)
    model.set_attn_implementation("tieredkv")
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    got = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    assert_close(got[mask.bool()], wanted[mask.bool()])


@pytest.mark.parametrize("name", ["llama", "gemma3", "gptoss"])
def test_a_stock_cache_under_our_name_gives_what_it_gave(name: str) -> None:
    model, ids = tiny(name), tokens(60, rows=2)
    model.set_attn_implementation("tieredkv")
    assert_close(feed(model, ids, DynamicCache(config=model.config), [30, 1, 9]), oracle(ids, name))


@torch.no_grad()
def test_an_encoder_under_our_name_gives_what_it_gave() -> None:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48}
    model = BertModel(BertConfig(vocab_size=VOCABULARY, initializer_range=0.4, **sizes)).eval()
    ids = tokens(30, rows=2)
    mask = torch.ones_like(ids)
    mask[1, 20:] = 0
    wanted = model(ids, attention_mask=mask).last_hidden_state
    model.set_attn_implementation("tieredkv")
    got = model(ids, attention_mask=mask).last_hidden_state
    assert_close(got[mask.bool()], wanted[mask.bool()])


@torch.no_grad()
def test_an_encoder_and_decoder_with_a_cache_for_self_attention(cold_dir: Path) -> None:
    from transformers import BartConfig, BartForConditionalGeneration

    torch.manual_seed(0)
    sides = {
        f"{side}_{k}": v for side in ("encoder", "decoder") for k, v in {"layers": 2, "attention_heads": 4}.items()
    }
    config = BartConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        init_std=0.4,
        max_position_embeddings=256,
        forced_eos_token_id=None,
        **sides,
    )
    model = BartForConditionalGeneration(config).eval()
    ids, targets = tokens(30), tokens(120, seed=2)
    wanted = model(ids, decoder_input_ids=targets, use_cache=False).logits
    model.set_attn_implementation("tieredkv")
    with small(model.config, cold_dir) as own:
        cache = EncoderDecoderCache(own, DynamicCache(config=model.config))
        got, past = [], 0
        for new in (80, 1, 1, 38):
            part = targets[:, past : past + new]
            got.append(model(ids, decoder_input_ids=part, past_key_values=cache).logits)
            past += new
        assert_close(torch.cat(got, 1), wanted)
        assert own.get_seq_length() == 120


# ---- masks


@pytest.mark.parametrize(("q", "kv"), [(1, 9), (5, 5), (4, 9)])
@pytest.mark.parametrize("function", [causal_mask_function, sliding_window_causal_mask_function(3)])
def test_a_mask_is_what_transformers_would_have_made(q: int, kv: int, function: Any) -> None:
    padding = torch.ones(2, kv, dtype=torch.bool)
    padding[0, :3] = False
    keywords: dict[str, Any] = {"q_offset": kv - q, "mask_function": function, "attention_mask": padding}
    wanted = sdpa_mask(batch_size=2, q_length=q, kv_length=kv, device="cpu", **keywords)
    found = spec(q, kv, padding=padding, function=function)
    assert wanted is not None
    assert torch.equal(found.materialise_bool(), wanted)
    assert found.is_causal == (function is causal_mask_function)


# ---- plain attention


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("kind", ["none", "spec", "bool", "additive"])
def test_plain_attention_is_the_formula(softcap: float | None, sinks: bool, kind: str) -> None:
    q, k, v = qkv(6, 6)
    visible = torch.ones(6, 6, dtype=torch.bool).tril().expand(2, 1, 6, 6)
    masks: dict[str, Any] = {
        "none": None,
        "spec": spec(6, 6),
        "bool": visible,
        "additive": torch.zeros(2, 1, 6, 6).masked_fill(~visible, torch.finfo(torch.float32).min),
    }
    sink = torch.randn(4) if sinks else None
    out, _ = seam.attention(Module(), q, k, v, masks[kind], scaling=0.3, softcap=softcap, s_aux=sink)
    scores = (q.double() @ k.double().repeat_interleave(2, 1).transpose(2, 3)) * 0.3
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, -torch.inf)
    if sink is not None:
        scores = torch.cat([scores, sink.double()[None, :, None, None].expand(2, 4, 6, 1)], -1)
    weights = scores.softmax(-1)[..., :6]
    wanted = (weights @ v.double().repeat_interleave(2, 1)).transpose(1, 2)
    assert_close(out.double(), wanted)


# ---- where blocks cannot serve


@pytest.fixture
def transformed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A llama whose attention gets its keys and values scaled by two and by a half after `update`."""
    original = modeling_llama.ALL_ATTENTION_FUNCTIONS["tieredkv"]

    def scaled(module: Any, query: Any, key: Any, value: Any, *arguments: Any, **keywords: Any) -> Any:
        return original(module, query * 0.5, key * 2.0, value * 1.0, *arguments, **keywords)

    AttentionInterface.register("tieredkv", scaled)
    yield
    AttentionInterface.register("tieredkv", original)


def test_a_model_that_transforms_keys_is_gathered_and_says_so_once(
    cold_dir: Path, transformed: None, caplog: pytest.LogCaptureFixture
) -> None:
    model, ids = tiny(), tokens(150)
    with caplog.at_level(logging.WARNING), small(model, cold_dir) as cache:
        assert_close(feed(model, ids, cache, [100, 1, 1, 20]), oracle(ids))
        assert cache.mode == "gather"
        assert cache.fallback_reason is not None and "untouched" in cache.fallback_reason
    assert len([record for record in caplog.records if "gather" in record.getMessage()]) == 1


@pytest.mark.parametrize(
    ("module", "keywords", "words"),
    [
        (Module(is_causal=False), {}, "not causal"),
        (Module(), {"is_causal": False}, "not causal"),
        (Module(), {"position_bias": torch.zeros(1)}, "position_bias"),
        (Module(), {"attention_mask": "strange"}, "str"),
        (Module(), {"attention_mask": torch.ones(2, 1, 3, 2, dtype=torch.bool)}, "shorter"),
        (Module(), {"attention_mask": spec(3, 9)}, "another size"),
        (Module(), {"queries": 2}, "cross-attention"),
    ],
)
def test_a_first_call_that_blocks_cannot_serve(
    cold_dir: Path, monkeypatch: pytest.MonkeyPatch, module: Module, keywords: dict[str, Any], words: str
) -> None:
    """On the first forward K and V are whole, so another function serves; later ones are gathered."""
    config = config_of("llama", num_hidden_layers=1)
    config._attn_implementation = "tieredkv"
    monkeypatch.setattr(seam, "plain_attention", lambda *_: torch.zeros(1))
    with small(config, cold_dir) as cache:
        q, k, v = qkv(keywords.get("queries", 3), 3)
        key, value = cache.update(k, v, 0, kwargs={})
        mask = keywords.get("attention_mask")
        rest = {name: given for name, given in keywords.items() if name not in ("attention_mask", "queries")}
        seam.attention(module, q, key, value, mask, **rest)
        assert cache.fallback_reason is not None and words in cache.fallback_reason
        _, k, v = qkv(1, 1)
        key, _ = cache.update(k, v, 0, kwargs={})
        assert key.shape[2] == 4, "gathered"
        assert not hasattr(key, HANDLE)


def test_a_later_call_that_blocks_cannot_serve_is_an_error(cold_dir: Path) -> None:
    """New keys alone were handed out, and nothing else can attend them."""
    config = config_of("llama", num_hidden_layers=1)
    config._attn_implementation = "tieredkv"
    with small(config, cold_dir) as cache:
        q, k, v = qkv(3, 3)
        seam.attention(Module(), q, *cache.update(k, v, 0, kwargs={}), None)
        q, k, v = qkv(1, 1)
        key, value = cache.update(k, v, 0, kwargs={})
        assert key.shape[2] == 1
        with pytest.raises(HandleError, match="not causal"):
            seam.attention(Module(is_causal=False), q, key, value, None)


def test_a_key_without_its_value_is_not_ours(cold_dir: Path) -> None:
    config = config_of("llama", num_hidden_layers=1)
    config._attn_implementation = "tieredkv"
    with small(config, cold_dir) as cache:
        q, k, v = qkv(3, 3)
        key, value = cache.update(k, v, 0, kwargs={})
        out, _ = seam.attention(Module(), q, key, value.clone(), None)
        wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        assert_close(out, wanted.transpose(1, 2))
        cache.crop(0)
        assert cache.mode == "gather", "the handle was not claimed"


def test_dropout_in_training_is_refused(cold_dir: Path) -> None:
    config = config_of("llama", num_hidden_layers=1)
    config._attn_implementation = "tieredkv"
    with small(config, cold_dir) as cache:
        q, k, v = qkv(3, 3)
        key, value = cache.update(k, v, 0, kwargs={})
        with pytest.raises(TrainingModeError, match="eval"):
            seam.attention(Module().train(), q, key, value, None, dropout=0.1)


def test_a_handle_does_not_keep_its_cache_alive(cold_dir: Path) -> None:
    config = config_of("llama", num_hidden_layers=1)
    config._attn_implementation = "tieredkv"
    cache = small(config, cold_dir)
    q, k, v = qkv(3, 3)
    key, value = cache.update(k, v, 0, kwargs={})
    del cache
    assert not list(cold_dir.iterdir())
    out, _ = seam.attention(Module(), q, key, value, None)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert_close(out, wanted.transpose(1, 2))


def test_a_call_without_keywords_is_not_the_one_that_was_probed(cold_dir: Path) -> None:
    """A caller of another kind (a hook, a second model class) may not attend by our name at all."""
    config = config_of("llama", num_hidden_layers=1)
    config._attn_implementation = "tieredkv"
    with small(config, cold_dir) as cache:
        q, k, v = qkv(3, 3)
        seam.attention(Module(), q, *cache.update(k, v, 0, kwargs={}), None)
        _, k1, v1 = qkv(1, 1)
        key, _ = cache.update(k1, v1, 0)
        assert torch.equal(key, torch.cat([k, k1], 2))


# ---- the seam to this version of transformers


@pytest.mark.contract
def test_models_pass_their_keywords_to_update(cold_dir: Path) -> None:
    model = tiny()
    seen: list[bool] = []
    with small(model, cold_dir) as cache:
        update = cache.update

        def watched(*arguments: Any, **keywords: Any) -> Any:
            seen.append("kwargs" in keywords)
            return update(*arguments, **keywords)

        cache.update = watched  # type: ignore[method-assign]
        feed(model, tokens(5), cache)
    assert seen == [seam.passes_kwargs_to_update()] * BASE["num_hidden_layers"]


@pytest.mark.contract
def test_a_cache_of_a_config_follows_the_models_choice(cold_dir: Path) -> None:
    model, ids = tiny(), tokens(90)
    model.set_attn_implementation("tieredkv")
    with tieredkv.TieredCache(model.config, hot="96 tokens", cold=cold_dir, block_size=16, window=16) as cache:
        assert_close(feed(model, ids, cache, [50, 1]), oracle(ids))
        assert cache.mode == "blocks"
    assert model.config._attn_implementation == "tieredkv"


def test_a_deep_copied_model_shares_nothing_with_the_cache(cold_dir: Path) -> None:
    model, ids = tiny(), tokens(60)
    with small(model, cold_dir) as cache:
        twin = copy.deepcopy(model)
        feed(model, ids[:, :50], cache)
        assert_close(feed(twin, ids, DynamicCache(config=twin.config), [50]), oracle(ids))
        assert_close(feed(model, ids[:, 50:], cache), oracle(ids)[:, 50:])


def test_nothing_that_is_called_outside_of_graphs_is_compiled() -> None:
    """Neither the function, nor, where the graph broke before it, what it calls."""

    def inner(x: torch.Tensor) -> torch.Tensor:
        assert get_eval_frame_callback() is None
        return x.sin().cos()

    @seam.outside_graphs
    def planned(x: torch.Tensor, *, factor: int) -> torch.Tensor:
        return inner(x) * factor

    def model(x: torch.Tensor) -> torch.Tensor:
        return planned(x + 1, factor=3) + 2

    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter)
    x = torch.linspace(0, 1, 7)
    for _ in range(3):
        assert torch.equal(compiled(x), model(x))
    assert (counter.frame_count, counter.op_count) == (2, 2), "x + 1 and the + 2 after it, and nothing in between"
