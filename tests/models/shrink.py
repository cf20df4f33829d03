"""A tiny config of any model type: what transformers' default config says, with small numbers by name of the field.

A few layers of each kind that the default has, and random weights. What no rule gets right is in `SPECIAL`.

Imports: torch, transformers.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

VOCABULARY = 97
FIRST_SPECIAL = 90
"""Ids from here on stand for images and the like: text has none of them."""

_NAMES: dict[int, str] = {
    1: "n_group topk_group num_expert_group n_groups mamba_n_groups mamba_ngroups num_nextn_predict_layers o_groups "
    "n_shared_experts num_shared_experts moe_num_shared_experts first_k_dense_replace num_dense_layers "
    "num_experts_per_token num_mem_blocks moe_layer_start_index interleave_moe_layer_step",
    2: "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers "
    "num_encoder_layers num_key_value_heads num_kv_heads kv_n_heads depth num_blocks num_experts_per_tok moe_topk "
    "moe_top_k moe_k temporal_patch_size linear_num_key_heads linear_num_value_heads linear_num_heads "
    "swa_num_key_value_heads n_mamba_heads num_query_groups num_codebooks",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads "
    "num_decoder_attention_heads num_encoder_attention_heads num_experts n_routed_experts num_local_experts "
    "moe_num_experts attention_heads swa_num_attention_heads laurel_rank gated_norm_rank",
    8: "index_n_heads head_dim qk_rope_head_dim qk_nope_head_dim linear_key_head_dim linear_value_head_dim "
    "linear_head_dim dim_head swa_head_dim mamba_d_state ssm_state_size state_size d_head kv_channels "
    "attention_head_dim query_pre_attn_scalar hidden_size_per_layer_input time_step_rank mamba_dt_rank global_head_dim "
    "rotary_dim d_rel",
    16: "q_lora_rank v_head_dim moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size "
    "o_lora_rank expert_ffn_hidden_size shared_experts_intermediate_size moe_shared_expert_intermediate_size "
    "qk_head_dim index_head_dim mamba_chunk_size chunk_size adapter_rank sliding_window sliding_window_size "
    "attention_chunk_size attention_window_size router_hidden_size",
    24: "kv_lora_rank",
    28: "image_size",
    14: "patch_size",
    32: "index_topk hidden_size d_model n_embd emb_dim embedding_dim embedding_size hidden_size_global lru_width "
    "word_embed_proj_dim attention_hidden_size input_embedding_size output_embedding_size out_hidden_size "
    "backbone_hidden_size mamba_d_ssm adapter_out_dim adapter_in_dim vision_output_dim projector_input_dim "
    "projector_output_dim embed_dim encoder_hidden_size",
    48: "intermediate_size intermediate_size_mlp decoder_ffn_dim encoder_ffn_dim ffn_dim dim_ff dff ffn_hidden_size "
    "d_inner feed_forward_size dense_intermediate_size mlp_dim",
    VOCABULARY: "vocab_size vocab_size_per_layer_input encoder_hash_byte_group_vocab unpadded_vocab_size "
    "decoder_vocab_size",
    512: "max_position_embeddings n_positions n_ctx max_seq_len context_length max_target_positions "
    "max_source_positions model_max_length",
}
SMALL = {name: number for number, names in _NAMES.items() for name in names.split()}
WIDE = {name: {8: 16, 32: 64}.get(number, number) for name, number in SMALL.items()}
"""Heads of 16, which the native kernel serves; not every class can be built so, next to what `SPECIAL` says."""

_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
_LEFT_ALONE = ("eod_token_id", "forced_eos_token_id", "mask_token_id")
_NEEDED = (
    "head_dim",
    "n_group",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "num_key_value_heads",
    "topk_group",
)
"""Fields that are None by default in some configs, which then build no model."""

_CONV = {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4}
_QSA = {
    "indexer_n_heads": 8,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 32,
    "indexer_compress_ratio": 4,
    "hc_lowrank": 8,
}
_MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_expand": 2}

SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": _MAMBA2 | {"attn_layer_indices": [1, 3], "num_hidden_layers": 4},
    "big_bird": {"attention_type": "original_full"},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8}, "ffn_config": {"hidden_size": 32}},
    "dots3_note_text": {"per_layer_config": {}, "head_dim": 16},
    "falcon_h1": {"mamba_n_heads": 4, "mamba_d_head": 8},
    "gemma3n": {"text_config": {"num_kv_shared_layers": 2}},
    "gemma3n_text": {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 16},
    "granitemoehybrid": _MAMBA2 | {"layer_types": ["mamba", "attention"] * 2, "num_hidden_layers": 4},
    "hrm_text": {"num_hidden_layers": 1, "num_layers_per_stack": ...},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_hidden_layers": 4},
    "laguna": {"layer_types": ["full_attention", "sliding_attention"], "num_attention_heads_per_layer": [4, 4]},
    "lfm2": _CONV,
    "lfm2_moe": _CONV,
    "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2},
    "mistral": {"sliding_window": None},
    "mllama": {"text_config": {"num_hidden_layers": 3, "cross_attention_layers": [1]}},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "num_hidden_layers": 4},
    "qwen4_exp": {"text_config": _QSA},
    "qwen4_exp_text": _QSA,
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "lsh"]},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 64, "attention_head_dim": 16},
    "zamba2": {"attention_hidden_size": 64, "attention_head_dim": 16, "mamba_headdim": 16, "n_mamba_heads": 4},
    "zaya": {"num_experts_per_tok": 1},
}
"""By model type: fields that the rules get wrong. A dict of a sub-config's name belongs to that; ... leaves out."""


def kinds_of_layers(fields: dict[str, Any]) -> tuple[list[int], int]:
    """Which of the default's layers to keep, the first two of each kind, and how many there are; none kept where the
    config names no kinds."""
    types = fields.get("layer_types") or fields.get("layers_block_type")
    if not isinstance(types, list):
        return [], 0
    kept: list[int] = []
    for kind in dict.fromkeys(types):
        kept += [i for i, other in enumerate(types) if other == kind][:2]
    return sorted(kept), len(types)


def shrink(fields: dict[str, Any], special: dict[str, Any], sizes: dict[str, int]) -> dict[str, Any]:
    """Small values for a config's fields; `sizes` are SMALL or WIDE."""
    kept, layers = kinds_of_layers(fields)
    small: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict) and "model_type" in value:
            small[name] = shrink(value, special.get(name, {}), sizes) | {"model_type": value.get("model_type")}
        elif name in sizes and (isinstance(value, int) or value is None):
            small[name] = sizes[name] if value is not None or name in _NEEDED else None
        elif name in sizes and isinstance(value, list):
            small[name] = [sizes[name]] * len(kept or value)
        elif name in _TOKENS:
            small[name] = _TOKENS[name]
        elif name.endswith(("_token_id", "_token_index")) and name not in _LEFT_ALONE and isinstance(value, int):
            small[name] = FIRST_SPECIAL
        elif kept and isinstance(value, list) and len(value) == layers:
            small[name] = [value[i] for i in kept]
    if kept:
        small["num_hidden_layers"] = len(kept)
    if small.get("kv_lora_rank"):
        small["num_key_value_heads"] = small["num_attention_heads"]  # a latent is expanded to every head
    small = {name: value for name, value in small.items() if value is not None}
    if fields.get("is_decoder") is False:
        small["is_decoder"] = True
    small.update({name: value for name, value in special.items() if not isinstance(value, dict) or name not in small})
    return {name: value for name, value in small.items() if value is not ...}


def tiny_config(model_type: str, sizes: dict[str, int]) -> Any:
    """A tiny config of a model type; `sizes` are SMALL or WIDE."""
    kind = CONFIG_MAPPING[model_type]
    return kind(**shrink(kind().to_dict(), SPECIAL.get(model_type, {}), sizes))


def tiny_model(config: Any, scale: float = 8.0) -> PreTrainedModel:
    """A causal LM in eval mode; the same weights each time.

    Args:
        config: see `tiny_config`.
        scale: factor on weights of small spread, since attention over nearly equal keys hides errors.
    """
    torch.manual_seed(0)
    if hasattr(config, "audio_encoder") and hasattr(config, "decoder"):  # Musicgen's class wants its decoder's config
        model: PreTrainedModel = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._from_config(config.decoder)
    else:
        model = AutoModelForCausalLM.from_config(config)
    model.eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1 and weight.std() < 0.1:
                weight.mul_(scale)
    return model
