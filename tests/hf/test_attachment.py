"""A cache and its model's attention: no forward is wrong when it is another than the cache takes it for.

The model may be a copy, the cache may be one that was restored by value, and other caches come and go on the model.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import BASE, assert_close, feed, oracle, small, tiny, tokens
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, PretrainedConfig

import tieredkv
from tieredkv.errors import HandleError, MismatchError, TrainingModeError
from tieredkv.hf.layers import NewTokens, unguarded

SIZES: dict[str, Any] = {"hot": "256 tokens", "warm": "256 tokens", "block_size": 16}
DROP = tieredkv.CacheSettings(hot="160 tokens", warm=0, block_size=16, window=64, sinks=4, beyond="drop")
NAMES = pytest.mark.parametrize("name", ["llama", "gemma3"])
"""Two tiered layers, and one: nothing in the forward comes after it."""


def implementation(model: Any) -> str:
    return str(model.config._attn_implementation)


# ---- another attention than the cache takes it for


@NAMES
@pytest.mark.parametrize("new", [1, 3])
def test_a_copy_of_the_model_on_another_attention_is_refused_in_that_forward(name: str, new: int) -> None:
    model, ids = tiny(name), tokens(40)
    other, wanted = copy.deepcopy(model), oracle(ids, name)
    with tieredkv.TieredCache(model, **SIZES) as cache:
        feed(model, ids[:, :20], cache)
        with pytest.raises(HandleError, match="TieredCache"):
            feed(other, ids[:, 20 : 20 + new], cache)
        assert cache.get_seq_length() == 20, "taken back"
        other.set_attn_implementation("tieredkv")
        assert_close(feed(other, ids[:, 20:], cache, [new, 1]), wanted[:, 20:])
        assert cache.mode == "blocks"


@NAMES
def test_a_cache_restored_by_value_follows_the_model_that_it_meets(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model, ids = tiny(name), tokens(60)
    wanted = oracle(ids, name)
    first = tieredkv.TieredCache(model, **SIZES)
    feed(model, ids[:, :20], first)
    with pickle.loads(pickle.dumps(first)) as cache:
        assert cache.mode == "gather"
        assert_close(feed(model, ids[:, 20:30], cache, [3, 3, 1]), wanted[:, 20:30])
        assert cache.mode == "blocks"
        first.close()
        assert implementation(model) == "sdpa"
        with caplog.at_level(logging.WARNING):
            assert_close(feed(model, ids[:, 30:45], cache, [1, 13, 1]), wanted[:, 30:45])
        assert (cache.mode, "'sdpa'" in str(cache.fallback_reason)) == ("gather", True)
        assert len([record for record in caplog.records if "any more" in record.getMessage()]) == 1
        model.set_attn_implementation("tieredkv")
        assert_close(feed(model, ids[:, 45:], cache, [1, 13, 1]), wanted[:, 45:])
        assert (cache.mode, cache.fallback_reason) == ("blocks", None)


@NAMES
@pytest.mark.parametrize(("before", "after"), [("sdpa", "tieredkv"), ("tieredkv", "sdpa"), ("tieredkv", "eager")])
def test_a_cache_restored_by_value_does_not_believe_its_config(name: str, before: str, after: str) -> None:
    model, ids = tiny(name), tokens(40)
    model.set_attn_implementation(before)
    with tieredkv.TieredCache(model.config, **SIZES) as first:
        feed(model, ids[:, :20], first)
        saved = pickle.dumps(first)
    model.set_attn_implementation(after)
    with pickle.loads(saved) as cache:
        assert_close(feed(model, ids[:, 20:], cache, [1, 5, 1, 1]), oracle(ids, name)[:, 20:])
        if after != "tieredkv":
            assert cache.mode == "gather" and "restored by value" in str(cache.fallback_reason)
            model.set_attn_implementation("tieredkv")
            more = tokens(50)
            assert torch.equal(more[:, :40], ids)
            assert_close(feed(model, more[:, 40:], cache, [5, 1]), oracle(more, name)[:, 40:])
        assert (cache.mode, cache.fallback_reason) == ("blocks", None)


@pytest.mark.parametrize("use", [lambda k: k + 1, lambda k: torch.cat([k, k]), lambda k: k.mul_(2), lambda k: k.T])
def test_new_keys_alone_are_for_attention_over_blocks_only(use: Callable[[torch.Tensor], Any]) -> None:
    plain = torch.randn(3, 4)
    guarded = NewTokens.of(plain)
    assert (guarded.shape, guarded.size(0), guarded.dtype, guarded.device) == ((3, 4), 3, plain.dtype, plain.device)
    assert guarded.contiguous() is guarded and guarded.to(plain.dtype) is guarded
    with pytest.raises(HandleError):
        use(guarded)
    assert type(plain) is torch.Tensor, "the caller's tensor is as it was"
    assert type(unguarded(guarded)) is torch.Tensor and torch.equal(guarded, plain)


@NAMES
def test_what_attention_refuses_is_no_part_of_the_text(name: str) -> None:
    """Also where the layer that refuses is the last one."""
    model, ids = tiny(name), tokens(40)
    with tieredkv.TieredCache(model, **SIZES) as cache:
        feed(model, ids[:, :20], cache)
        with pytest.raises(MismatchError, match="shorter"):
            feed(model, ids[:, 20:25], cache, attention_mask=torch.ones(1, 5, dtype=torch.long))
        assert cache.get_seq_length() == 20
        assert_close(feed(model, ids[:, 20:], cache, [5, 1]), oracle(ids, name)[:, 20:])


@pytest.mark.parametrize("part", ["q_proj", "k_proj", "v_proj"])
def test_gradients_that_would_be_lost_are_refused(part: str) -> None:
    model, ids = tiny(), tokens(40)
    for weight in model.parameters():
        weight.requires_grad_(False)
    trained = getattr(model.model.layers[-1].self_attn, part).weight
    with tieredkv.TieredCache(model, **SIZES) as cache:
        feed(model, ids[:, :20], cache)
        trained.requires_grad_(True)
        with pytest.raises(TrainingModeError, match="requires_grad"):
            model(ids[:, 20:25], past_key_values=cache)
        with torch.no_grad():
            assert_close(feed(model, ids[:, 20:], cache, [5]), oracle(ids)[:, 20:])


# ---- the model's own attention


def test_the_last_cache_gives_the_model_its_attention_back(caplog: pytest.LogCaptureFixture) -> None:
    model, ids = tiny(), tokens(60)
    first, second = tieredkv.TieredCache(model, **SIZES), tieredkv.TieredCache(model, **SIZES)
    feed(model, ids[:, :30], second)
    first.close()
    with caplog.at_level(logging.WARNING):
        assert_close(feed(model, ids[:, 30:], second, [1]), oracle(ids)[:, 30:])
    assert (second.mode, second.stats().gather_peak_bytes, caplog.records) == ("blocks", 0, [])
    second.close()
    assert implementation(model) == "sdpa"


@pytest.mark.parametrize("settings", [tieredkv.CacheSettings(**SIZES), DROP], ids=["demote", "drop"])
def test_a_copy_that_outlives_its_original_keeps_attention_over_blocks(settings: tieredkv.CacheSettings) -> None:
    model, ids = tiny(), tokens(60)
    with tieredkv.TieredCache(model, settings=settings) as first:
        feed(model, ids[:, :30], first)
        twin = copy.deepcopy(first)
        copy.deepcopy(twin)  # dropped, and never closed
    gc.collect()
    assert_close(feed(model, ids[:, 30:], twin, [1]), oracle(ids)[:, 30:])
    assert twin.mode == "blocks"
    twin.close()
    assert implementation(model) == "sdpa"


def test_what_somebody_chose_meanwhile_stays() -> None:
    model = tiny()
    first = tieredkv.TieredCache(model, **SIZES)
    model.set_attn_implementation("eager")
    first.close()
    assert implementation(model) == "eager"
    model.set_attn_implementation("tieredkv")
    tieredkv.TieredCache(model, **SIZES).close()
    assert implementation(model) == "tieredkv"


def test_a_copied_or_pickled_model_carries_nothing_of_the_caches() -> None:
    model = tiny()
    with tieredkv.TieredCache(model, **SIZES):
        other = copy.deepcopy(model)
        assert b"tieredkv.hf" not in pickle.dumps(model)
    assert (implementation(model), implementation(other)) == ("sdpa", "tieredkv")
    other.set_attn_implementation("eager")
    tieredkv.TieredCache(other, **SIZES).close()
    assert implementation(other) == "eager"


class Stopped(BaseException):
    """As Ctrl-C."""


@pytest.mark.parametrize("then", ["it is closed again", "another comes"])
@pytest.mark.parametrize("broken_off", [0, 1, 2, 3, 4, 5])
def test_each_part_of_a_model_gets_its_own_attention_back(
    monkeypatch: pytest.MonkeyPatch, broken_off: int, then: str
) -> None:
    """Also where closing is broken off after so many of them were set, and done again."""
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config=BASE | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
        vision_config=vision | {"image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_index=96,
        boi_token_index=95,
        eoi_token_index=94,
    )
    chosen = {"": "sdpa", "text_config": "sdpa", "vision_config": "eager"}
    model: Any = Gemma3ForConditionalGeneration._from_config(config, attn_implementation=chosen)
    parts = (model.config, model.config.text_config, model.config.vision_config)
    cache, chosen_for = tieredkv.TieredCache(model, **SIZES), PretrainedConfig._attn_implementation
    times = [0]

    def chosen_once(config: Any, name: Any) -> None:
        times[0] += 1
        if times[0] == broken_off:
            raise Stopped
        chosen_for.fset(config, name)

    with monkeypatch.context() as patched:
        patched.setattr(PretrainedConfig, "_attn_implementation", property(chosen_for.fget, chosen_once))
        with pytest.raises(Stopped) if broken_off else contextlib.nullcontext():
            cache.close()
    if then == "another comes":
        tieredkv.TieredCache(model, **SIZES).close()
    cache.close()
    assert [part._attn_implementation for part in parts] == ["sdpa", "sdpa", "eager"]


# ---- where there are no whole K and V


@pytest.mark.parametrize("how", ["load", "from_dynamic", "pickle"])
@NAMES
def test_a_cache_that_drops_goes_on_after_it_was_restored(name: str, how: str, tmp_path: Path) -> None:
    model, ids = tiny(name), tokens(40)
    with tieredkv.TieredCache(model, settings=DROP) as first:
        feed(model, ids[:, :20], first)
        if how == "load":
            first.save(tmp_path / "session")
            cache = tieredkv.TieredCache.load(tmp_path / "session", model, settings=DROP)
        elif how == "from_dynamic":
            cache = tieredkv.TieredCache.from_dynamic(first.to_dynamic(), model, settings=DROP)
        else:
            cache = pickle.loads(pickle.dumps(first))
        with cache:
            assert_close(feed(model, ids[:, 20:], cache, [1, 1, 10]), oracle(ids, name)[:, 20:])
            assert cache.mode == "blocks"


@NAMES
def test_a_cache_that_drops_refuses_a_model_on_another_attention(name: str) -> None:
    model, ids = tiny(name), tokens(40)
    with tieredkv.TieredCache(model, settings=DROP) as first:
        feed(model, ids[:, :20], first)
        saved = pickle.dumps(first)
    with pickle.loads(saved) as cache:
        for new in (1, 5):
            with pytest.raises(HandleError, match="set_attn_implementation"):
                feed(model, ids[:, 20 : 20 + new], cache)
        model.set_attn_implementation("tieredkv")
        assert_close(feed(model, ids[:, 20:], cache, [1, 5]), oracle(ids, name)[:, 20:])


@pytest.mark.parametrize("compiled", [False, True])
def test_a_compiled_model_is_guarded_too(compiled: bool) -> None:
    model, ids = tiny("gemma3"), tokens(24)
    other = copy.deepcopy(model)
    call: Any = torch.compile(model, backend="eager") if compiled else model
    foreign: Any = torch.compile(other, backend="eager") if compiled else other
    with tieredkv.TieredCache(model, **SIZES) as cache, torch.no_grad():
        got = [call(part, past_key_values=cache).logits for part in ids.split([20, 1, 1, 2], 1)]
        assert_close(torch.cat(got, 1), oracle(ids, "gemma3"))
        assert cache.mode == "blocks"
        with pytest.raises(HandleError):
            foreign(ids[:, :1], past_key_values=cache)


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
@pytest.mark.parametrize("dynamic", [True, False])
def test_a_compiled_model_is_served_with_sizes_of_any_kind(dynamic: bool) -> None:
    """A compiler that takes guarded keys for an input asks what kind of tensor they are."""
    torch._dynamo.reset()
    model, ids = tiny(), tokens(60)
    call: Any = torch.compile(model.forward, backend="eager", dynamic=dynamic)
    with torch.no_grad(), small(model, None, warm="200 tokens") as cache:
        pieces = [ids[:, :30], *ids[:, 30:50].split(1, 1), ids[:, 50:]]
        got = torch.cat([call(piece, past_key_values=cache).logits for piece in pieces], 1)
        assert_close(got, oracle(ids))
        assert cache.mode == "blocks"
