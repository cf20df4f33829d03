"""Bad input: a typed error that says what was wanted, what was got and what to change, and a cache that goes on."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support import (
    DIM,
    assert_close,
    at_rest,
    audit,
    config_of,
    feed,
    generate,
    locations,
    oracle,
    small,
    tiny,
    tokens,
)

import tieredkv
from tieredkv.errors import (
    BudgetError,
    ColdTierError,
    ConfigError,
    MismatchError,
    PositionError,
    TieredKVError,
    TrainingModeError,
    UnsupportedModelError,
)


def complete(error: TieredKVError) -> None:
    """Each of the three parts is there."""
    assert str(error.wanted) and str(error.got) and error.change


# ---- sizes


@pytest.mark.parametrize("hot", ["16 tokens", 100])
def test_hot_that_cannot_hold_the_tail_of_the_batch(hot: Any, cold_dir: Path) -> None:
    model = tiny()
    with small(model, cold_dir, hot=hot, window=None) as cache:
        with pytest.raises(BudgetError, match="batch row") as caught:
            feed(model, tokens(10, rows=3), cache)
        complete(caught.value)
        assert caught.value.tier == "hot"
        assert cache.get_seq_length() == 0


def test_a_batch_that_is_too_large_leaves_the_cache_for_a_smaller_one(cold_dir: Path) -> None:
    model, ids = tiny(), tokens(100)
    row_bytes = 16 * 2 * 2 * 2 * DIM * 4  # tokens, layers, K and V, heads, dim, fp32
    with small(model, cold_dir, hot=5 * row_bytes) as cache:
        with pytest.raises(BudgetError, match="batch row"):
            feed(model, tokens(10, rows=8), cache)
        assert_close(feed(model, ids, cache, [70, 1]), oracle(ids))


def test_a_batch_that_outgrows_hot_leaves_the_cache_as_it_was(cold_dir: Path) -> None:
    """Rows that come later, by beams or a repeat, need tails of their own."""
    model, ids = tiny(), tokens(100)
    with small(model, cold_dir) as cache:
        feed(model, ids[:, :90], cache)
        cache.batch_repeat_interleave(12)
        with pytest.raises(BudgetError) as caught:
            feed(model, ids[:, 90:91].expand(12, 1), cache)
        complete(caught.value)
        assert caught.value.tier == "hot"
        cache.batch_select_indices(torch.tensor([3]))
        assert_close(feed(model, ids[:, 90:], cache, [1]), oracle(ids)[:, 90:])
        audit(cache)


def test_a_window_larger_than_hot() -> None:
    model = tiny()
    with small(model, None, window=96) as cache, pytest.raises(BudgetError, match="window") as caught:
        feed(model, tokens(10), cache)
    complete(caught.value)
    assert caught.value.tier == "hot"


def test_hot_larger_than_the_device() -> None:
    model = tiny()
    with small(model, None, hot="900TiB") as cache, pytest.raises(BudgetError, match="would take more than") as caught:
        feed(model, tokens(10), cache)
    complete(caught.value)


def test_caches_on_one_device_together_never_exceed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that fit alone and not together: the second is refused, and fits once the first is closed."""
    model, ids = tiny(), tokens(10)
    monkeypatch.setattr("tieredkv.device.cpu.host_memory", lambda: (100_000, 100_000))
    with small(model, None, hot=60_000) as first, small(model, None, hot=60_000) as second:
        feed(model, ids, first)
        with pytest.raises(BudgetError) as caught:
            feed(model, ids, second)
        complete(caught.value)
        first.close()
        assert_close(feed(model, ids, second), oracle(ids))


@pytest.mark.parametrize("block_size", [24, 8, 0])
def test_a_block_size_that_is_not_a_multiple_of_16(block_size: int) -> None:
    with pytest.raises(ConfigError, match="multiple of 16") as caught:
        small(tiny(), None, block_size=block_size)
    complete(caught.value)


def test_an_unknown_codec_is_refused_when_the_cache_is_made() -> None:
    with pytest.raises(ConfigError, match="codec") as caught:
        small(tiny(), None, codec="zip")
    complete(caught.value)


# ---- cold directories


def test_a_cold_directory_that_cannot_be_made(tmp_path: Path) -> None:
    """Below a file, since permissions do not stop root."""
    (tmp_path / "file").write_text("in the way")
    model = tiny()
    with small(model, tmp_path / "file" / "cold") as cache, pytest.raises(ColdTierError) as caught:
        feed(model, tokens(10), cache)
    complete(caught.value)
    assert "file" in str(caught.value)


def test_a_full_disk_is_met_before_a_write_and_names_cold(cold_dir: Path) -> None:
    model, ids = tiny(), tokens(400)
    cold = tieredkv.ColdSettings(cold_dir, free_floor="900TiB")
    with small(model, cold) as cache:
        with pytest.raises(BudgetError) as caught:
            feed(model, ids, cache)
        complete(caught.value)
        assert caught.value.tier == "cold"
        assert cache.get_seq_length() == 0
        assert_close(feed(model, ids[:, :60], cache, [20, 1]), oracle(ids[:, :60]))
        audit(cache)


@pytest.mark.parametrize("way", ["blocks", "gather"])
def test_a_full_disk_breaks_nothing_that_fits_above(cold_dir: Path, way: str) -> None:
    """Hot is filled past the mark for writing down, and warm too: the copies that have no place are left out."""
    model, ids = tiny(), tokens(110)
    cold = tieredkv.ColdSettings(cold_dir, free_floor="900TiB")
    with small(model if way == "blocks" else model.config, cold) as cache:
        assert_close(feed(model, ids, cache, [20, 20, *[1] * 60]), oracle(ids))
        audit(cache)


def test_a_write_that_fails_is_told_once_and_the_generation_goes_on(
    cold_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, ids = tiny(), tokens(90)

    def full(*_: Any, **__: Any) -> int:
        raise OSError(28, "No space left on device")

    with small(model, cold_dir, hot="160 tokens", warm=0) as cache:
        feed(model, ids[:, :16], cache)
        monkeypatch.setattr("os.pwritev", full)
        monkeypatch.setattr("os.posix_fallocate", full, raising=False)
        with caplog.at_level(logging.WARNING):
            rest = feed(model, ids[:, 16:], cache, [1] * 74)
            at_rest(cache).stats()  # a write that comes late fails late
        assert_close(rest, oracle(ids)[:, 16:])
        assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1, caplog.text
        assert cache.stats().tier_failures >= 1
        audit(cache)


@pytest.mark.parametrize("way", ["blocks", "gather"])
def test_a_cold_directory_that_is_lost_breaks_nothing_that_fits_above(
    cold_dir: Path, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    model, ids = tiny(), tokens(170)
    with small(model if way == "blocks" else model.config, cold_dir, hot="160 tokens", warm="64 tokens") as cache:
        first = feed(model, ids[:, :40], cache)
        shutil.rmtree(cold_dir)
        with caplog.at_level(logging.WARNING):
            rest = feed(model, ids[:, 40:], cache, [1] * 50 + [20] * 3)
        assert_close(torch.cat([first, rest], 1), oracle(ids))
        warned = [r for r in caplog.records if "cold" in r.getMessage()]
        assert len(warned) == 1, caplog.text
        assert cache.stats().tier_failures >= 1
        assert "cold" not in locations(cache)
        audit(cache)


def test_two_caches_that_lose_their_cold_directory_both_go_on(cold_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, ids = tiny(), [tokens(100, seed=1), tokens(100, seed=2)]
    big = {"hot": "160 tokens", "warm": "64 tokens"}
    with small(model, cold_dir, **big) as first, small(model, cold_dir, **big) as second:
        for cache, some in zip((first, second), ids, strict=True):
            feed(model, some[:, :40], cache)
        shutil.rmtree(cold_dir)
        with caplog.at_level(logging.WARNING):
            for cache, some in zip((first, second), ids, strict=True):
                assert_close(feed(model, some[:, 40:], cache, [1] * 59), oracle(some)[:, 40:])
        assert len([r for r in caplog.records if "cold" in r.getMessage()]) == 2
        assert min(first.stats().tier_failures, second.stats().tier_failures) >= 1


def test_blocks_lost_with_their_directory_are_an_error_and_never_a_wrong_logit(cold_dir: Path) -> None:
    model, ids = tiny(), tokens(400)
    with small(model, cold_dir) as cache:
        feed(model, ids[:, :300], cache)
        assert "cold" in locations(cache)
        shutil.rmtree(cold_dir)
        wanted = oracle(ids)
        try:
            for step in range(300, 400):
                logits = feed(model, ids[:, step : step + 1], cache)
                assert_close(logits, wanted[:, step : step + 1], f"step {step}")
        except (ColdTierError, BudgetError) as error:
            complete(error)
        cache.reset()
        short = ids[:, :60]
        assert_close(feed(model, short, cache, [30, 1]), oracle(short))


# ---- models and tensors


def test_layer_types_that_are_not_supported() -> None:
    """DeepSeek V4 compresses what has left its window, and keeps what is not compressed yet."""
    from transformers import DeepseekV4Config

    config = DeepseekV4Config(num_hidden_layers=2, hidden_size=32, num_attention_heads=4)
    with pytest.raises(UnsupportedModelError, match="DynamicCache") as caught:
        tieredkv.TieredCache(config)
    complete(caught.value)


@pytest.mark.parametrize("thing", [None, 5, "llama", torch.nn.Linear(2, 2)])
def test_what_is_not_a_model(thing: Any) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        tieredkv.TieredCache(thing)
    complete(caught.value)


def test_an_encoder_decoder_model_is_told_how() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(T5Config(vocab_size=97, d_model=16, d_kv=4, d_ff=8, num_layers=1, num_heads=2))
    with pytest.raises(UnsupportedModelError, match="EncoderDecoderCache"):
        tieredkv.TieredCache(model)


@pytest.mark.parametrize(
    "other",
    [
        {"head_dim": 32},
        {"num_key_value_heads": 1},
        {"num_hidden_layers": 3},
        {"dtype": torch.float64},
        {"dtype": torch.bfloat16},
    ],
)
@pytest.mark.parametrize("way", ["blocks", "gather"])
def test_a_second_models_tensors(cold_dir: Path, other: dict[str, Any], way: str) -> None:
    model, ids = tiny(), tokens(60)
    second = tiny("llama", **other)
    if way == "blocks":
        second.set_attn_implementation("tieredkv")
    with small(model if way == "blocks" else model.config, cold_dir) as cache:
        feed(model, ids[:, :40], cache)
        with pytest.raises(MismatchError) as caught:
            feed(second, ids[:, 40:41], cache)
        complete(caught.value)
        assert_close(feed(model, ids[:, 40:], cache, [1]), oracle(ids)[:, 40:])


@pytest.mark.parametrize("way", ["blocks", "gather"])
def test_a_second_model_of_fewer_layers(cold_dir: Path, way: str) -> None:
    """Its forwards look as if they had broken off: found by its depth, or by positions that go on all the same."""
    model, ids = tiny(), tokens(60)
    second = tiny(num_hidden_layers=1)
    if way == "blocks":
        second.set_attn_implementation("tieredkv")
    with small(model if way == "blocks" else model.config, cold_dir) as cache:
        with pytest.raises((MismatchError, PositionError), match=r"layer|depth") as caught:
            generate(second, ids[:, :40], cache)
        complete(caught.value)
        assert cache.get_seq_length() == 0
        cache.reset()
        assert_close(feed(model, ids, cache, [40, 1]), oracle(ids))


@pytest.mark.parametrize("past", [0, 40])
def test_a_model_with_cross_attention_and_a_bare_cache(cold_dir: Path, past: int) -> None:
    """Keys of the source would be stored among those of the text: each layer comes twice in a forward."""
    model, ids = tiny(), tokens(60)
    with small(model.config, cold_dir) as cache:
        feed(model, ids[:, :past], cache)
        k, v = torch.zeros(1, 2, 7, DIM), torch.zeros(1, 2, 7, DIM)
        cache.update(k, v, 0, kwargs={})
        with pytest.raises(MismatchError, match="second time") as caught:
            cache.update(k[:, :, :5], v[:, :, :5], 0, kwargs={})
        complete(caught.value)
        assert "EncoderDecoderCache" in caught.value.change
        assert_close(feed(model, ids[:, past:], cache, [1]), oracle(ids)[:, past:])


def test_a_model_that_was_moved_to_another_device(cold_dir: Path) -> None:
    model, ids = tiny(), tokens(60)
    with small(model, cold_dir) as cache:
        feed(model, ids[:, :40], cache)
        with torch.no_grad(), pytest.raises(MismatchError, match="do not belong") as caught:
            tiny().to("meta")(ids[:, 40:].to("meta"), past_key_values=cache)
        complete(caught.value)
        assert_close(feed(model, ids[:, 40:], cache, [1]), oracle(ids)[:, 40:])


def test_a_mask_that_ends_before_the_new_tokens(cold_dir: Path) -> None:
    """Of the new tokens alone, where the text has 40 more."""
    model, ids = tiny(), tokens(60)
    with small(model, cold_dir) as cache:
        feed(model, ids[:, :40], cache)
        with torch.no_grad(), pytest.raises(MismatchError, match="shorter") as caught:
            model(ids[:, 40:], past_key_values=cache, attention_mask=torch.ones(1, 20, dtype=torch.int64))
        complete(caught.value)
        got = feed(model, ids[:, 40:], cache, attention_mask=torch.ones(1, 60, dtype=torch.int64))
        assert_close(got, oracle(ids)[:, 40:])


@pytest.mark.parametrize("way", ["blocks", "gather"])
def test_a_cache_that_is_longer_than_the_prompt(cold_dir: Path, way: str) -> None:
    model, ids = tiny(), tokens(60)
    with small(model if way == "blocks" else model.config, cold_dir) as cache:
        feed(model, ids, cache)
        with pytest.raises(PositionError, match="do not continue") as caught:
            generate(model, ids[:, :40], cache)
        complete(caught.value)
        assert cache.get_seq_length() == 60


@pytest.mark.parametrize("way", ["blocks", "gather"])
def test_generate_without_use_cache_and_with_a_cache(cold_dir: Path, way: str) -> None:
    """Each step would append the whole text again."""
    model, ids = tiny(), tokens(60)
    with small(model if way == "blocks" else model.config, cold_dir) as cache:
        with pytest.raises(PositionError) as caught:
            generate(model, ids, cache, use_cache=False)
        assert "use_cache" in caught.value.change
        rest = tokens(9, seed=4)
        assert_close(feed(model, rest, cache, [1]), oracle(torch.cat([ids, rest], 1))[:, 60:])


def test_another_number_of_rows(cold_dir: Path) -> None:
    model, ids = tiny(), tokens(60)
    with small(model, cold_dir) as cache:
        feed(model, ids[:, :40], cache)
        with pytest.raises(MismatchError, match="rows") as caught:
            feed(model, tokens(1, rows=2), cache)
        complete(caught.value)
        assert_close(feed(model, ids[:, 40:], cache, [1]), oracle(ids)[:, 40:])


@pytest.mark.parametrize("way", ["blocks", "gather"])
def test_training_mode(cold_dir: Path, way: str) -> None:
    model, ids = tiny().train(), tokens(60)
    with small(model if way == "blocks" else model.config, cold_dir) as cache:
        with torch.enable_grad(), pytest.raises(TrainingModeError, match="no_grad") as caught:
            model(ids, past_key_values=cache)
        complete(caught.value)
        assert_close(feed(model.eval(), ids, cache, [40, 1]), oracle(ids))


def test_a_positive_crop(cold_dir: Path) -> None:
    with small(tiny(), cold_dir) as cache, pytest.raises(ConfigError, match=r"crop\(-n\)") as caught:
        cache.crop(5)
    complete(caught.value)


def test_a_prompt_that_is_fed_twice(cold_dir: Path) -> None:
    model, ids = tiny(), tokens(60)
    with small(model, cold_dir) as cache:
        feed(model, ids, cache)
        with torch.no_grad(), pytest.raises(PositionError) as caught:
            model(ids, past_key_values=cache, position_ids=torch.arange(60)[None])
        complete(caught.value)
        more = tokens(5, seed=7)
        assert_close(feed(model, more, cache), oracle(torch.cat([ids, more], 1))[:, 60:])


# ---- prompts that exceed all tiers


@pytest.mark.parametrize("way", ["blocks", "gather"])
@pytest.mark.parametrize(
    ("tiers", "named"),
    [
        ({"warm": 0}, "hot"),
        ({"warm": "64 tokens"}, "warm"),
        ({"cold": "capped"}, "cold"),
    ],
)
@pytest.mark.parametrize("past", [0, 50])
def test_a_prompt_that_exceeds_all_tiers(
    cold_dir: Path, tiers: dict[str, Any], named: str, past: int, way: str
) -> None:
    model, ids = tiny(), tokens(80)
    cold = tieredkv.ColdSettings(cold_dir, cap="48 tokens", free_floor=0) if tiers.get("cold") else None
    written: list[int] = []
    with small(model if way == "blocks" else model.config, **{**tiers, "cold": cold}) as cache:
        first = feed(model, ids[:, :past], cache)
        update = cache.update

        def watched(*arguments: Any, **keywords: Any) -> Any:
            result = update(*arguments, **keywords)
            written.append(arguments[2])
            return result

        cache.update = watched  # type: ignore[method-assign]
        with pytest.raises(BudgetError) as caught:
            feed(model, tokens(400, seed=9), cache)
        del cache.update
        complete(caught.value)
        assert caught.value.tier == named
        assert f"{named}=" in caught.value.change
        assert any(digit.isdigit() for digit in str(caught.value.wanted)), "no shortfall"
        assert not written, "refused after a write"
        assert cache.get_seq_length() == past
        if past:
            audit(cache)
        rest = feed(model, ids[:, past:], cache, [10, 1])
        assert_close(torch.cat([first, rest], 1), oracle(ids))


def test_a_refused_prompt_of_a_hybrid_model_leaves_every_layer_as_it_was() -> None:
    """The sliding layer comes first and must not go ahead of the one that refuses."""
    model, ids = tiny("gemma3"), tokens(60)
    with small(model, None) as cache:
        for past in (0, 40):
            first = feed(model, ids[:, :past], cache)
            with pytest.raises(BudgetError):
                feed(model, tokens(400), cache)
            rest = feed(model, ids[:, past:], cache, [5, 1])
            assert_close(torch.cat([first, rest], 1), oracle(ids, "gemma3"))
            cache.reset()


def test_a_refused_prompt_of_a_linear_model_is_never_followed_by_a_wrong_logit() -> None:
    """The recurrent state went ahead before the refusal, and cannot go back: the cache asks for a reset."""
    model, ids = tiny("qwen3next"), tokens(60)
    with small(model, None) as cache:
        feed(model, ids[:, :40], cache)
        with pytest.raises(BudgetError):
            feed(model, tokens(400), cache)
        with pytest.raises(MismatchError, match="reset"):
            feed(model, ids[:, 40:], cache)
        cache.reset()
        assert_close(feed(model, ids, cache, [40, 1]), oracle(ids, "qwen3next"), tolerance=1e-4)


def test_a_refused_length_is_asked_for_again_and_of_another_batch() -> None:
    model, ids = tiny(), tokens(20)
    with small(model, None, max_tokens=96, hot=80 * 2 * 2 * 2 * DIM * 4, window=None) as cache:
        for _ in range(2):
            with pytest.raises(BudgetError, match="96 tokens"):
                feed(model, tokens(20, rows=2), cache)
        assert_close(feed(model, ids, cache), oracle(ids))


@pytest.mark.parametrize("by", ["max_tokens", "reserve"])
def test_a_length_that_is_asked_for_up_front(by: str) -> None:
    model, ids = tiny(), tokens(100)
    with small(model, None, max_tokens=1000 if by == "max_tokens" else None) as cache:
        if by == "max_tokens":
            with pytest.raises(BudgetError, match="1000 tokens") as caught:
                feed(model, ids, cache)
        else:
            feed(model, ids[:, :50], cache)
            with pytest.raises(BudgetError, match="1000 tokens") as caught:
                cache.reserve(1000)
        complete(caught.value)
    with small(model, None) as cache:
        feed(model, ids[:, :50], cache)
        cache.reserve(100)
        assert_close(feed(model, ids[:, 50:], cache), oracle(ids)[:, 50:])


@pytest.mark.parametrize("shared", [False, True])
def test_what_reserve_allows_fits_and_what_it_refuses_does_not(shared: bool) -> None:
    """Row by row, with a prefix that the rows share, and with one that each has of its own."""
    model, ids = tiny(), tokens(40)
    for wanted in range(41, 200, 9):
        with small(model, None) as cache:
            feed(model, ids if shared else tokens(40, rows=2), cache)
            if shared:
                cache.batch_repeat_interleave(2)
            try:
                cache.reserve(wanted)
            except BudgetError:
                with pytest.raises(BudgetError):
                    feed(model, tokens(wanted - 40, rows=2), cache)
            else:
                feed(model, tokens(wanted - 40, rows=2), cache)


def test_generate_that_outgrows_the_tiers_stops_with_the_error() -> None:
    model = tiny()
    with small(model, None) as cache, pytest.raises(BudgetError) as caught:
        generate(model, tokens(90), cache, new=100)
    complete(caught.value)


def test_a_model_without_full_attention_is_served_by_transformers_layers() -> None:
    model, ids = tiny("mistral"), tokens(60)
    with small(model, None) as cache:
        assert_close(feed(model, ids, cache, [30, 1]), oracle(ids, "mistral"))
        assert cache.mode == "gather"


def test_settings_are_checked_before_the_model_is_touched() -> None:
    model = tiny()
    with pytest.raises(ConfigError):
        small(model, None, window=0)
    assert model.config._attn_implementation == config_of("llama")._attn_implementation or (
        model.config._attn_implementation == "sdpa"
    )
