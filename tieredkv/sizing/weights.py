"""What a model takes on the device besides its keys and values: weights and activations, and how they were counted.

Weights are counted on a model built on the meta device, which allocates nothing; a model that transformers cannot
build from its config is counted by formula, and says so.

Imports: this package's source and record. transformers is imported only to count weights.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch

from tieredkv.sizing.record import DeviceUse
from tieredkv.sizing.source import decoder_config, load_config, read_field, read_int

_RESERVE_PERCENT = 5
_TOKENS_IN_FLIGHT = 2048  # of a prefill in chunks, all rows together


@dataclasses.dataclass(frozen=True)
class WeightCount:
    """How many weights a model has.

    Args:
        parameters: elements, tied ones once.
        how: how they were counted, for people to read.
    """

    parameters: int
    how: str


def count_weights(config: object) -> WeightCount:
    """Count a model's weights from its config (arguments and errors as in `kv_layers`)."""
    whole = load_config(config)
    model_class = _model_class(whole)
    if model_class is None:
        return WeightCount(_parameters_by_formula(whole), "by formula (transformers has no model for this config)")
    try:
        with torch.device("meta"):
            # A copy, because building a model writes its attention implementation into the config.
            model = model_class.from_config(copy.deepcopy(whole))
    except Exception as error:  # any model's own code runs here; the reason is reported, not hidden
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return WeightCount(_parameters_by_formula(whole), f"by formula (building the model failed: {reason})")
    return WeightCount(sum(p.numel() for p in model.parameters()), "counted on the meta device, tied weights once")


def activation_bytes(config: object, tokens_in_flight: int, batch: int, dtype: torch.dtype) -> int:
    """An estimate of the largest transient of a forward: one layer's, and the logits of the last token of each row.

    Per token in flight: the residual and its norm, queries and attention output (four times hidden size), and what a
    gated MLP holds at once (three times intermediate size). Logits are held once in `dtype` and once in fp32.

    Args:
        config: as in `kv_layers`.
        tokens_in_flight: tokens of one forward, all rows together.
        batch: rows.
        dtype: dtype of the activations.
    """
    text = decoder_config(load_config(config))
    hidden = read_int(text, "hidden_size")
    wide = 4 * hidden + 3 * _mlp_width(text)
    vocabulary = read_int(text, "vocab_size", default=0)
    return tokens_in_flight * wide * dtype.itemsize + batch * vocabulary * (dtype.itemsize + 4)


def device_use(
    config: object, device_memory_bytes: int, context_tokens: int, batch: int, dtype: torch.dtype
) -> DeviceUse:
    """What a model takes of a device while `batch` rows of `context_tokens` tokens are prefilled in chunks.

    Arguments and errors as in `kv_layers`; weights and activations have the same dtype.
    """
    weights = count_weights(config)
    chunk_tokens = min(context_tokens, max(1, _TOKENS_IN_FLIGHT // batch))
    return DeviceUse(
        device_bytes=device_memory_bytes,
        parameters=weights.parameters,
        counted=weights.how,
        weights_bytes=weights.parameters * dtype.itemsize,
        activations_bytes=activation_bytes(config, chunk_tokens * batch, batch, dtype),
        reserve_bytes=device_memory_bytes * _RESERVE_PERCENT // 100,
        prefill_chunk_tokens=chunk_tokens,
    )


def _mlp_width(text: object) -> int:
    hidden = read_int(text, "hidden_size")
    width = read_field(text, "intermediate_size")
    # Some configs list the width of each layer.
    return int(max(width)) if isinstance(width, (list, tuple)) else read_int(text, "intermediate_size", 4 * hidden)


def _model_class(config: object) -> Any:
    """The auto class that builds a model of this config, None where there is none."""
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSeq2SeqLM,
        AutoModelForSpeechSeq2Seq,
    )

    autos: list[Any] = [AutoModelForCausalLM, AutoModelForImageTextToText]
    if read_field(config, "is_encoder_decoder"):
        autos = [AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq, *autos]
    for auto in autos:
        if type(config) in auto._model_mapping:
            return auto
    return None


def _parameters_by_formula(config: object) -> int:
    """Embeddings, and per layer the projections of attention and of a gated MLP (one for each expert)."""
    text = decoder_config(config)
    hidden, layers = read_int(text, "hidden_size"), read_int(text, "num_hidden_layers")
    heads = read_int(text, "num_attention_heads")
    head_dim = read_int(text, "head_dim", default=hidden // heads)
    kv_heads = read_int(text, "num_key_value_heads", default=heads)
    attention = 2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim
    experts = read_int(text, "num_local_experts", default=1)
    tables = 1 if read_field(text, "tie_word_embeddings") else 2
    embeddings = tables * hidden * read_int(text, "vocab_size", default=0)
    return embeddings + layers * (attention + 3 * hidden * _mlp_width(text) * experts)
