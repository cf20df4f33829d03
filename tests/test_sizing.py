"""Sizing: bytes per token of real configs, codecs, and whole plans. What layers store is in sizing/test_layers.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tieredkv import sizing
from tieredkv.codecs import CODEC_NAMES, get_codec
from tieredkv.errors import ConfigError
from tieredkv.sizing import LayerKV, encoded_block_bytes, kv_bytes, kv_bytes_per_token, kv_layers, plan
from tieredkv.sizing.record import Budgets, Encoding, Spread
from tieredkv.sizing.spread import spread_blocks

KIB, MIB, GIB = 2**10, 2**20, 2**30


def llama2_7b(**changes: Any) -> LlamaConfig:
    return LlamaConfig(**{"max_position_embeddings": 4096, **changes})


def llama_70b(kv_heads: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=kv_heads,
    )


# --- bytes of known models ---------------------------------------------------------------------------------------


def test_llama2_7b_takes_512_kib_per_token() -> None:
    assert kv_bytes_per_token(llama2_7b(), torch.float16) == 512 * KIB == 2 * 32 * 32 * 128 * 2


@pytest.mark.parametrize(
    ("context", "batch", "kv_heads", "gib"),
    [
        (16384, 1, 32, 8),
        (32768, 1, 32, 16),
        (1024, 8, 32, 4),
        (4096, 8, 32, 16),
        (2048, 32, 32, 32),
        (4096, 8, 16, 8),
        (4096, 8, 8, 4),
    ],
)
def test_llama2_7b_by_context_batch_and_heads(context: int, batch: int, kv_heads: int, gib: int) -> None:
    assert kv_bytes(llama2_7b(num_key_value_heads=kv_heads), context, batch, torch.float16) == gib * GIB


def test_70b_with_all_its_heads() -> None:
    assert kv_bytes_per_token(llama_70b(kv_heads=64), 2) == 2.5 * MIB
    assert kv_bytes(llama_70b(kv_heads=64), 8192, dtype="fp16") == 20 * GIB
    assert kv_bytes(llama_70b(kv_heads=64), 8193, dtype="fp16") > 20 * GIB
    assert kv_bytes_per_token(llama_70b(kv_heads=8), 2) == 320 * KIB


def test_multi_query_stores_one_head() -> None:
    grouped, single = llama2_7b(), llama2_7b(num_key_value_heads=1)
    assert kv_bytes_per_token(grouped, 2) == 32 * kv_bytes_per_token(single, 2)


def test_latent_attention_stores_the_latent() -> None:
    config = CONFIG_MAPPING["deepseek_v3"]()
    assert kv_bytes_per_token(config, 2) == 61 * (512 + 64) * 2
    assert {(x.kind, x.kv_heads, x.k_dim, x.v_dim) for x in kv_layers(config)} == {("latent", 1, 512, 64)}


def test_sliding_layers_count_their_window() -> None:
    config = CONFIG_MAPPING["gemma2"]()  # 26 layers, every other one with a window of 4,096
    layer = 4 * 2 * 256 * 2
    assert kv_bytes_per_token(config, 2) == 26 * layer
    assert kv_bytes(config, 4096, dtype=2) == 26 * 4096 * layer
    assert kv_bytes(config, 16384, dtype=2) == 13 * (4096 + 16384) * layer


# --- codecs ------------------------------------------------------------------------------------------------------

LAYER = LayerKV(0, "full", 8, 128, 64, None, "full_attention")


@pytest.mark.parametrize(("codec", "share"), [("raw", 1), ("fp8", 2), ("int8", 2), ("int4", 4)])
def test_codec_values_are_a_share_of_fp16(codec: str, share: int) -> None:
    assert encoded_block_bytes(LAYER, codec, 64, torch.float16).values_bytes * share == 8 * 64 * (128 + 64) * 2


def test_codec_scales_are_added() -> None:
    raw, fp8, int8, int4 = (encoded_block_bytes(LAYER, codec, 64, "fp16") for codec in ("raw", "fp8", "int8", "int4"))
    assert raw.scales_bytes == 0
    assert fp8.scales_bytes == int8.scales_bytes == 8 * (128 + 64) * 2  # one for each K channel and each V token
    # A scale and a centre for each 16 elements, a unit for each K channel, and four units for each head.
    assert int4.scales_bytes == 8 * 64 * (128 + 64) // 16 * 2 + 8 * (128 + 4) * 2
    assert int4.total_bytes == int4.values_bytes + int4.scales_bytes


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_codec_bytes_are_those_of_real_blocks(codec: str) -> None:
    k, v = torch.randn(8, 1, 64, 128).half(), torch.randn(8, 1, 64, 64).half()
    planes = get_codec(codec).encode(k, v)
    assert encoded_block_bytes(LAYER, codec, 64, 2).total_bytes == sum(plane.nbytes for plane in planes)


def test_codecs_per_token_with_scales() -> None:
    config, raw = llama2_7b(), 512 * KIB
    assert kv_bytes_per_token(config, 2, "int8", 128) == raw // 2 + 32 * 32 * 2 * (128 + 128) // 128
    assert kv_bytes_per_token(config, 2, "fp8", 128) == kv_bytes_per_token(config, 2, "int8", 128)
    int4 = raw // 4 + raw // 16 + 32 * 32 * 2 * (128 + 4) // 128
    assert kv_bytes_per_token(config, 2, "int4", 128) == int4
    assert kv_bytes(config, 4096, 2, 2, "int4", 128) == 2 * 4096 * int4


def test_unknown_codec_and_dtype_are_refused() -> None:
    with pytest.raises(ConfigError, match="Unknown codec"):
        kv_bytes_per_token(llama2_7b(), 2, "zip")
    with pytest.raises(ConfigError, match="dtype is unknown"):
        kv_bytes_per_token(llama2_7b(), "int3")


# --- plans -------------------------------------------------------------------------------------------------------


def test_24_gib_leaves_about_10_for_a_7b() -> None:
    found = plan(llama2_7b(), 16384, 1, 24 * GIB, dtype="fp16")
    device = found.device
    assert device.parameters == 6_738_415_616
    assert device.weights_bytes == 2 * device.parameters
    assert 9.5 * GIB < found.hot_budget_bytes < 10.5 * GIB
    parts = device.weights_bytes + device.activations_bytes + device.reserve_bytes + found.hot_budget_bytes
    assert parts == 24 * GIB
    told = "\n".join(found.how)
    for word in ("6,738,415,616 parameters", "activations", "reserve", "10.1 GiB for keys and values"):
        assert word in told
    assert found.spread.verdict == "hot" and found.fits and found.cost.streamed_bytes == 0


def test_what_does_not_fit_hot_is_streamed_and_costs_time() -> None:
    found = plan(llama2_7b(), 32768, 1, 24 * GIB, dtype="fp16")
    hot, warm, cold = found.spread.tiers
    assert (found.spread.verdict, cold.used_blocks) == ("warm", 0)
    assert hot.used_bytes + warm.used_bytes == found.spread.total_bytes == 16 * GIB
    assert hot.used_bytes + found.spread.staging_bytes <= hot.budget_bytes
    assert found.cost.streamed_bytes == warm.used_bytes
    assert found.cost.transfer_seconds == pytest.approx(warm.used_bytes / 25e9)
    assert found.cost.seconds == found.cost.transfer_seconds > found.cost.compute_seconds
    assert found.cost.compute_seconds == pytest.approx((found.device.weights_bytes + 16 * GIB) / 1000e9)


def test_1_gb_takes_40_to_50_ms_over_pcie() -> None:
    for rate, seconds in ((25e9, 0.040), (20e9, 0.050)):
        found = plan(llama2_7b(), 32768, 1, 24 * GIB, rates=sizing.Rates(pcie_bytes_per_second=rate))
        assert found.cost.pcie_seconds * 1e9 / found.cost.streamed_bytes == pytest.approx(seconds)


def test_a_cold_tier_costs_the_disk() -> None:
    found = plan(llama2_7b(), 32768, 1, 24 * GIB, host_memory_bytes=2 * GIB)
    _, warm, cold = found.spread.tiers
    assert found.spread.verdict == "cold" and warm.used_bytes <= 2 * GIB
    assert found.cost.nvme_seconds == pytest.approx(cold.used_bytes / 5e9)
    assert found.cost.transfer_seconds == found.cost.nvme_seconds
    assert 'cold="' in found.suggestion


def test_a_transfer_several_times_the_compute_is_warned_of() -> None:
    slow = plan(llama2_7b(), 32768, 8, 24 * GIB)
    assert any("times as long" in line for line in slow.warnings)
    fast = plan(llama2_7b(), 32768, 8, 24 * GIB, rates=sizing.Rates(25e12, 5e12, 1000e9))
    assert not any("times as long" in line for line in fast.warnings)


def test_a_codec_sizes_warm_and_cold() -> None:
    raw = plan(llama2_7b(), 32768, 8, 24 * GIB)
    int4 = plan(llama2_7b(), 32768, 8, 24 * GIB, codec="int4")
    assert [tier.codec for tier in int4.spread.tiers] == ["raw", "int4", "int4"]
    # 1/4, 1/16 of scales, and the units of the scales.
    assert 10 / 32 < int4.spread.tiers[1].block_bytes / raw.spread.tiers[1].block_bytes < 10.2 / 32
    assert int4.spread.total_bytes == raw.spread.total_bytes
    assert (raw.spread.verdict, int4.spread.verdict) == ("cold", "warm")
    assert 'codec="int4"' in int4.suggestion and "codec" not in raw.suggestion


def test_the_table_says_what_each_context_needs() -> None:
    found = plan(llama2_7b(), 4096, 8, 24 * GIB, host_memory_bytes=64 * GIB, disk_bytes=500 * GIB)
    cells = {(cell.context_tokens, cell.batch): (cell.kv_bytes, cell.verdict) for cell in found.table}
    assert cells[1024, 8] == (4 * GIB, "hot")
    assert cells[4096, 8] == (16 * GIB, "warm")
    assert cells[16384, 32] == (256 * GIB, "cold")
    assert cells[65536, 32] == (1024 * GIB, "too large")


def test_what_does_not_fit_says_which_tier_is_short() -> None:
    def short(device: int, host: int, disk: int) -> sizing.Plan:
        return plan(llama2_7b(), 32768, 1, device, host_memory_bytes=host, disk_bytes=disk)

    for found, tier in (
        (short(24 * GIB, GIB, GIB), "cold"),
        (short(24 * GIB, GIB, 0), "warm"),
        (short(8 * GIB, 64 * GIB, 0), "hot"),
    ):
        assert not found.fits and found.spread.shortfall_tier == tier and found.spread.verdict == "too large"
        assert any(line.startswith(f"{tier} is short of") for line in found.warnings)
        assert found.suggestion == ""


def test_a_window_smaller_than_the_default_is_suggested_where_hot_is_small() -> None:
    tight = plan(llama2_7b(), 4096, 16, 24 * GIB)
    hot_blocks = tight.spread.tiers[0].used_blocks
    assert f"window={hot_blocks * 128 // 16}" in tight.suggestion
    assert "window=" not in plan(llama2_7b(), 32768, 1, 24 * GIB).suggestion


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("context_tokens", {"context_tokens": 0}),
        ("batch", {"batch": 0}),
        ("device_memory_bytes", {"device_memory_bytes": 0}),
        ("disk_bytes", {"disk_bytes": -1}),
        ("multiple of 16", {"block_size": 40}),
        ("Unknown codec", {"codec": "zip"}),
    ],
)
def test_bad_numbers_are_refused(name: str, changes: dict[str, Any]) -> None:
    asked = {"context_tokens": 128, "batch": 1, "device_memory_bytes": GIB} | changes
    with pytest.raises(ConfigError, match=name):
        plan(llama2_7b(num_hidden_layers=1), **asked)


def test_bad_rates_are_refused() -> None:
    with pytest.raises(ConfigError, match="nvme_bytes_per_second"):
        sizing.Rates(nvme_bytes_per_second=0)


def test_a_model_that_transformers_does_not_know_is_counted_by_formula() -> None:
    fields = {"model_type": "newest", "num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 64}
    found = plan(fields | {"vocab_size": 100, "intermediate_size": 128}, 64, 1, GIB)
    assert "by formula" in found.device.counted
    assert found.device.parameters == 2 * 100 * 64 + 3 * (4 * 64 * 64 + 3 * 64 * 128)
    assert any("field by field" in line for line in found.warnings)


def test_dtype_comes_from_the_config_unless_asked() -> None:
    small = {"num_hidden_layers": 1, "vocab_size": 100}
    assert plan(llama2_7b(dtype="bfloat16", **small), 128, 1, GIB).dtype == "bfloat16"
    assert plan(llama2_7b(dtype="bfloat16", **small), 128, 1, GIB, dtype=torch.float32).dtype == "float32"
    assert plan(llama2_7b(**small), 128, 1, GIB).dtype == "float16"


def test_staging_and_windows_take_their_part_of_hot_first() -> None:
    full = LayerKV(0, "full", 2, 32, 32, None, "full_attention")
    sliding = LayerKV(1, "sliding", 2, 32, 32, 64, "sliding_attention")
    block = 64 * 2 * (32 + 32) * 2
    asked = Encoding(torch.float16, "raw", 64)

    def spread(hot_bytes: int) -> Spread:
        return spread_blocks([full, sliding], 640, 1, Budgets(hot_bytes, 100 * block, 0), asked)

    assert spread(11 * block).verdict == "hot"  # ten blocks, and a window of one
    assert spread(7 * block).staging_bytes == 3 * block  # three buffers of one block each
    for hot_bytes, in_hot in ((7 * block, 3), (7 * block - 1, 2), (5 * block, 1)):
        tiers = spread(hot_bytes).tiers
        assert [tier.used_blocks for tier in tiers] == [in_hot, 10 - in_hot, 0]
        assert tiers[0].used_bytes == (in_hot + 1) * block
    assert spread(5 * block - 1).shortfall_tier == "hot"
    assert spread(5 * block - 1).shortfall_bytes == 1


LAYERS = st.lists(
    st.one_of(
        st.builds(
            LayerKV, st.just(0), st.just("full"), st.integers(1, 4), st.sampled_from([32, 64]), st.just(32),
            st.none(), st.just(""),
        ),
        st.builds(
            LayerKV, st.just(0), st.just("sliding"), st.integers(1, 4), st.just(32), st.just(32),
            st.integers(1, 100), st.just(""),
        ),
        st.just(LayerKV(0, "linear", 0, 0, 0, None, "")),
    ),
    min_size=1,
    max_size=4,
)  # fmt: skip


@settings(deadline=None, max_examples=100)
@given(
    layers=LAYERS,
    context=st.integers(1, 500),
    batch=st.integers(1, 4),
    hot=st.integers(-1000, 400_000),
    warm=st.integers(0, 400_000),
    cold=st.integers(0, 400_000),
    codec=st.sampled_from(CODEC_NAMES),
)
def test_a_spread_places_every_block_and_exceeds_no_budget(
    layers: list[LayerKV], context: int, batch: int, hot: int, warm: int, cold: int, codec: str
) -> None:
    spread = spread_blocks(layers, context, batch, Budgets(hot, warm, cold), Encoding(torch.float16, codec, 32))
    growing = any(layer.grows and layer.window_tokens is None for layer in layers)
    blocks = batch * -(-context // 32) if growing else 0
    placed = sum(tier.used_blocks for tier in spread.tiers)
    assert placed <= blocks
    assert (spread.shortfall_tier is None) == (spread.shortfall_bytes == 0)
    if spread.shortfall_tier is None:
        assert placed == blocks
        first, *lower = spread.tiers
        assert first.used_bytes + spread.staging_bytes <= max(hot, 0)
        lower_raw_bytes = sum(tier.used_blocks for tier in lower) * first.block_bytes
        assert first.used_bytes + lower_raw_bytes == spread.total_bytes
    for tier in spread.tiers:
        assert 0 <= tier.used_bytes <= tier.budget_bytes
    if spread.total_bytes <= hot:
        assert spread.verdict == "hot" and spread.staging_bytes == 0
