"""What each layer stores: predicted from configs, and compared with what tiny models of each family really cache."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, DynamicCache, EncoderDecoderCache, LlamaConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tieredkv.errors import ConfigError, UnsupportedModelError
from tieredkv.sizing import cross_kv_layers, kv_bytes, kv_layers

TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MHA = {name: value for name, value in TINY.items() if name != "num_key_value_heads"}
GPT = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
MIXED = {"head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
SHARED = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": MIXED["layer_types"] * 2}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 20}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", TINY),
    "llama, head_dim of its own": ("llama", TINY | {"head_dim": 24}),
    "qwen2": ("qwen2", TINY),
    "qwen2, sliding": ("qwen2", TINY | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3": ("qwen3", TINY | {"head_dim": 16}),
    "mistral": ("mistral", TINY | {"sliding_window": 8}),
    "mistral, full": ("mistral", TINY | {"sliding_window": None}),
    "gemma2": ("gemma2", TINY | {"head_dim": 16, "sliding_window": 8}),
    "gemma3_text": ("gemma3_text", TINY | MIXED),
    "gemma3": ("gemma3", {"text_config": TINY | MIXED, "vision_config": VISION | {"image_size": 28, "patch_size": 14}}),
    "gemma3n": (
        "gemma3n_text",
        TINY
        | MIXED
        | SHARED
        | {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8, "laurel_rank": 4}
        # One width for each layer.
        | {"intermediate_size": [48] * 4, "activation_sparsity_pattern": [0.0] * 4},
    ),
    "gemma4": (
        "gemma4_text",
        TINY
        | MIXED
        | SHARED
        | {"global_head_dim": 32, "vocab_size_per_layer_input": 64}
        | {"hidden_size_per_layer_input": 8},
    ),
    "phi": ("phi", TINY),
    "phi3": ("phi3", TINY),
    "gpt_neox": ("gpt_neox", MHA),
    "olmo": ("olmo", TINY),
    "deepseek_v3": (
        "deepseek_v3",
        TINY
        | LATENT
        | {"num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1}
        | {"topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 16, "n_shared_experts": 1},
    ),
    "minicpm3": ("minicpm3", TINY | LATENT | {"num_key_value_heads": 4}),
    "gpt_oss": (
        "gpt_oss",
        TINY | {"head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 8},
    ),
    "granite": ("granite", TINY),
    "falcon": ("falcon", MHA),
    "falcon, new architecture": ("falcon", MHA | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon, multi-head": ("falcon", MHA | {"multi_query": False}),
    "bloom": ("bloom", {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "gpt2": ("gpt2", GPT),
    "opt": ("opt", MHA | {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "gptj": ("gptj", GPT | {"rotary_dim": 8}),
    "mpt": ("mpt", {"vocab_size": 64, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}),
    "starcoder2": ("starcoder2", TINY),
    "cohere": ("cohere", TINY),
    "stablelm": ("stablelm", TINY),
    "gpt_bigcode": ("gpt_bigcode", GPT),
    "gpt_bigcode, multi-head": ("gpt_bigcode", GPT | {"multi_query": False}),
    "llama4": (
        "llama4_text",
        TINY
        | {"head_dim": 8, "attention_chunk_size": 8, "num_local_experts": 2, "intermediate_size_mlp": 48}
        | {"no_rope_layers": [1, 0]},
    ),
    "qwen3_next": (
        "qwen3_next",
        TINY
        | EXPERTS
        | {"head_dim": 16, "shared_expert_intermediate_size": 16, "linear_num_key_heads": 2}
        | {"linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
        | {"layer_types": ["linear_attention", "full_attention"]},
    ),
    "mimo_v2_flash": (
        "mimo_v2_flash",
        TINY
        | {"head_dim": 16, "v_head_dim": 8, "sliding_window": 8, "n_routed_experts": 2, "num_experts_per_tok": 1}
        | {"layer_types": ["full_attention", "sliding_attention"], "moe_intermediate_size": 16},
    ),
    "falcon_h1": (
        "falcon_h1",
        TINY | {"head_dim": 16, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8},
    ),
}


def cached_shapes(cache: DynamicCache) -> list[tuple[int, int, int]]:
    """(KV heads, K dim, V dim) of each layer, zeros where it holds neither."""
    shapes = []
    for layer in cache.layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        held = keys is not None and values is not None
        shapes.append((keys.shape[1], keys.shape[3], values.shape[3]) if held else (0, 0, 0))
    return shapes


@pytest.mark.parametrize("family", FAMILIES)
def test_geometry_is_what_the_model_caches(family: str, tmp_path: Path) -> None:
    model_type, fields = FAMILIES[family]
    config = CONFIG_MAPPING[model_type](**fields)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    cache = DynamicCache(config=config)
    predicted = kv_layers(config)
    with torch.no_grad():
        model(input_ids=torch.arange(3, 15)[None], past_key_values=cache)
    assert [(x.kv_heads, x.k_dim, x.v_dim) for x in predicted] == cached_shapes(cache)
    assert [x.window_tokens for x in predicted] == [getattr(x, "sliding_window", None) for x in cache.layers]
    assert [x.index for x in predicted] == list(range(len(cache.layers)))
    config.save_pretrained(tmp_path)
    assert kv_layers(tmp_path) == predicted


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("t5", {"vocab_size": 64, "d_model": 32, "d_kv": 12, "d_ff": 48, "num_layers": 2, "num_heads": 4}),
        (
            "bart",
            {"vocab_size": 64, "d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2}
            | {"decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48},
        ),
    ],
)
def test_encoder_decoder_counts_the_decoder(model_type: str, fields: dict[str, Any]) -> None:
    config = CONFIG_MAPPING[model_type](**fields, decoder_start_token_id=0, pad_token_id=0)
    model = AutoModelForSeq2SeqLM.from_config(config).eval()
    cache = EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))
    with torch.no_grad():
        source, target = torch.arange(3, 12)[None], torch.arange(3, 8)[None]
        model(input_ids=source, decoder_input_ids=target, past_key_values=cache)
    own, cross = kv_layers(config), cross_kv_layers(config)
    assert [(x.kv_heads, x.k_dim, x.v_dim) for x in own] == cached_shapes(cache.self_attention_cache)
    assert [(x.kv_heads, x.k_dim, x.v_dim) for x in cross] == cached_shapes(cache.cross_attention_cache)
    assert {x.kind for x in own} == {"full"} and {x.kind for x in cross} == {"cross"}
    assert not any(x.grows for x in cross)


def test_a_decoder_of_another_depth_than_its_encoder() -> None:
    config = CONFIG_MAPPING["t5"](num_layers=6, num_decoder_layers=2)
    assert len(kv_layers(config)) == 2


def test_cross_layers_of_a_vision_model_do_not_grow() -> None:
    config = CONFIG_MAPPING["mllama"]()
    cross = [x.index for x in kv_layers(config) if x.kind == "cross"]
    assert cross == list(config.text_config.cross_attention_layers)
    assert kv_bytes(config, 100, dtype=2) == (40 - len(cross)) * 100 * 2 * 8 * 128 * 2


@pytest.mark.parametrize("model_type", ["rwkv", "xlstm", "deepseek_v32", "inkling2_loop_text", "minimax"])
def test_models_whose_cache_is_something_else_are_refused(model_type: str) -> None:
    with pytest.raises(UnsupportedModelError):
        kv_layers(CONFIG_MAPPING[model_type]())


def test_geometry_for_the_cache_core() -> None:
    first = kv_layers(CONFIG_MAPPING["deepseek_v3"]())[0].geometry(torch.bfloat16)
    assert (first.kv_heads, first.k_dim, first.v_dim, first.dtype) == (1, 512, 64, torch.bfloat16)
    linear = kv_layers(CONFIG_MAPPING["mamba2"]())[0]
    with pytest.raises(UnsupportedModelError, match="stores no keys and values"):
        linear.geometry(torch.bfloat16)


def test_folder_file_dict_and_object_are_the_same(tmp_path: Path) -> None:
    config = LlamaConfig(num_key_value_heads=8)
    config.save_pretrained(tmp_path)
    wanted = kv_layers(config)
    for source in (tmp_path, str(tmp_path), tmp_path / "config.json", config.to_dict()):
        assert kv_layers(source) == wanted
    plain = types.SimpleNamespace(n_layer=32, n_head=32, num_kv_heads=8, n_embd=4096)
    assert kv_layers(plain) == wanted


def test_a_model_type_that_transformers_does_not_know_is_read_field_by_field() -> None:
    fields = {"model_type": "newest", "num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 64}
    assert [(x.kv_heads, x.k_dim) for x in kv_layers(fields)] == [(4, 16)] * 3
    nested = {"model_type": "newest_vl", "text_config": fields | {"head_dim": 8}}
    assert [(x.kv_heads, x.k_dim) for x in kv_layers(nested)] == [(4, 8)] * 3


def test_bad_configs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no model config at the path"):
        kv_layers(tmp_path)
    (tmp_path / "config.json").write_text("[1, 2]")
    with pytest.raises(ConfigError, match="JSON object"):
        kv_layers(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="JSON file"):
        kv_layers(tmp_path)
    with pytest.raises(ConfigError, match="num_hidden_layers"):
        kv_layers({"hidden_size": 64})
    with pytest.raises(ConfigError, match="num_attention_heads"):
        kv_layers({"model_type": "llama", "num_attention_heads": "many"})
    with pytest.raises(ConfigError, match="fewer layer types"):
        kv_layers(types.SimpleNamespace(num_hidden_layers=2, layer_types=["full_attention"]))
