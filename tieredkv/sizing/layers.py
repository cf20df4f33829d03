"""What each layer of a model puts into a KV cache: how many heads, how wide, and for how many tokens.

Read from a transformers config (or any object with the same attributes), as transformers' own cache and attention
classes read it. Where a family stores something else than its config says, the reason stands beside the rule.

Imports: errors, block, source.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch

from tieredkv.block import LayerGeometry
from tieredkv.errors import ConfigError, UnsupportedModelError
from tieredkv.sizing.source import decoder_config, load_config, read_field, read_int

Kind = Literal["full", "sliding", "chunked", "latent", "cross", "linear", "dummy"]
"""full: every token. sliding, chunked: only the window. latent: every token, compressed (K and V are two parts of one
latent). cross: keys of another sequence, none of this one. linear: a state of fixed size. dummy: nothing."""

_KIND_OF_LAYER_TYPE: dict[str, Kind] = {
    "full_attention": "full",
    "attention": "full",
    "hybrid": "full",
    "sliding_attention": "sliding",
    "hybrid_sliding": "sliding",
    "chunked_attention": "chunked",
    "linear_attention": "linear",
    "conv": "linear",
    "mamba": "linear",
    "mamba2": "linear",
    "recurrent": "linear",
    "dummy": "dummy",
    "moe": "dummy",
    "mlp": "dummy",
}
# Models whose config reads like plain attention, and whose cache is something else.
_REFUSED_MODELS: dict[str, str] = {
    "dory": "runs its layers in loops and numbers the cache's layers by loop",
    "inkling2_loop_text": "runs its layers in loops and adds layers to the cache while it runs",
    "minimax": "takes no cache but its own",
    "openai-gpt": "stores no keys and values in a cache",
    "reformer": "stores no keys and values in a cache",
    "rwkv": "stores a state of fixed size instead of keys and values",
    "xlnet": "stores no keys and values in a cache",
    "xlstm": "stores a state of fixed size instead of keys and values",
}


@dataclasses.dataclass(frozen=True)
class LayerKV:
    """What one layer stores for a token of a sequence.

    Args:
        index: layer index, as given to `Cache.update`.
        kind: see `Kind`.
        kv_heads: K/V heads as stored, 0 where the layer stores none.
        k_dim: elements of a key.
        v_dim: elements of a value.
        window_tokens: how many recent tokens are stored at most, or None for all of them.
        layer_type: transformers' name of the layer type.
    """

    index: int
    kind: Kind
    kv_heads: int
    k_dim: int
    v_dim: int
    window_tokens: int | None
    layer_type: str

    @property
    def grows(self) -> bool:
        """Whether the layer stores K and V of the sequence itself, token by token."""
        return self.kind in ("full", "sliding", "chunked", "latent")

    def stored_tokens(self, context_tokens: int) -> int:
        """How many tokens of a context the layer still holds."""
        if not self.grows:
            return 0
        return context_tokens if self.window_tokens is None else min(context_tokens, self.window_tokens)

    def geometry(self, dtype: torch.dtype) -> LayerGeometry:
        """The layer's shape for the cache core, with K and V in `dtype`.

        Raises:
            UnsupportedModelError: the layer stores no keys and values.
        """
        if self.kv_heads == 0:
            raise UnsupportedModelError(
                f"Layer {self.index} ({self.layer_type}) stores no keys and values.",
                wanted="a layer with attention of its own",
                got=self.kind,
                change="ask only layers whose kind is full, sliding, chunked, latent or cross",
            )
        return LayerGeometry(self.kv_heads, self.k_dim, self.v_dim, dtype)


def kv_layers(config: object) -> tuple[LayerKV, ...]:
    """What every decoder layer of a model stores, in the order of layer indices.

    An encoder-decoder counts as its decoder's self-attention; see `cross_kv_layers` for the rest.

    Args:
        config: a transformers config, a dict of its fields, a folder or file that holds one, or any object with the
            same attributes.

    Raises:
        ConfigError: a field that is needed is missing.
        UnsupportedModelError: a layer type, or a model, whose storage is not K and V.
    """
    whole = load_config(config)
    text = decoder_config(whole)
    _refuse_models(text)
    configs = _layer_configs(text)
    return tuple(_layer(text, configs[i], i, layer_type) for i, layer_type in enumerate(_layer_types(text, configs)))


def cross_kv_layers(config: object) -> tuple[LayerKV, ...]:
    """What an encoder-decoder's cross-attention stores for each token of the *source*, per decoder layer.

    Empty for a decoder-only model. Arguments and errors as in `kv_layers`.
    """
    whole = load_config(config)
    if not read_field(whole, "is_encoder_decoder"):
        return tuple(layer for layer in kv_layers(whole) if layer.kind == "cross")
    layers = kv_layers(whole)
    return tuple(dataclasses.replace(layer, kind="cross", window_tokens=None) for layer in layers if layer.grows)


def _refuse_models(text: object) -> None:
    model_type = read_field(text, "model_type")
    reason = _REFUSED_MODELS.get(str(model_type))
    if reason is not None:
        raise UnsupportedModelError(
            f"A {model_type} model {reason}.",
            wanted="a decoder with attention over keys and values of its own, layer by layer",
            got=model_type,
            change="use the model without a TieredCache",
        )


def _layer_configs(text: object) -> list[object]:
    count = read_int(text, "num_decoder_layers", default=0) if read_field(text, "is_encoder_decoder") else 0
    count = count or read_int(text, "num_hidden_layers")
    per_layer = read_field(text, "per_layer_config")
    # Only a heterogeneous config has more to say per layer, and only transformers' own view is a sequence.
    if per_layer is not None and read_field(text, "is_heterogeneous"):
        return [per_layer[i] for i in range(count)]
    return [text] * count


def _layer_types(text: object, configs: list[object]) -> list[str]:
    types = read_field(text, "layer_types")
    if types is None:
        types = [_inferred_type(config) for config in configs]
    elif len(types) < len(configs):
        raise ConfigError(
            "A config names fewer layer types than layers.",
            wanted=f"{len(configs)} layer types",
            got=len(types),
            change="correct layer_types or num_hidden_layers in the config",
        )
    types = list(types[: len(configs)])
    sharing = read_field(text, "kv_sharing_modes")
    shared = 0 if sharing is not None else read_int(text, "num_kv_shared_layers", default=0)
    for i in range(len(types)):
        reuses = sharing[i] == "reuse" if sharing is not None else i >= len(types) - shared
        if reuses:
            types[i] = "dummy"
    for i in read_field(text, "cross_attention_layers") or ():
        types[i] = "cross_attention"
    return types


def _inferred_type(config: object) -> str:
    if read_field(config, "sliding_window") is not None:
        return "sliding_attention"
    return "full_attention" if read_field(config, "attention_chunk_size") is None else "chunked_attention"


def _layer(text: object, config: object, index: int, layer_type: str) -> LayerKV:
    kind: Kind | None = "cross" if layer_type == "cross_attention" else _KIND_OF_LAYER_TYPE.get(layer_type)
    if kind is None:
        raise UnsupportedModelError(
            f"Layer {index} has a layer type whose storage is more than keys and values.",
            wanted=", ".join(sorted(_KIND_OF_LAYER_TYPE)),
            got=layer_type,
            change="use the model without a TieredCache",
        )
    if kind in ("linear", "dummy"):
        return LayerKV(index, kind, 0, 0, 0, None, layer_type)
    window = None
    if kind == "sliding":
        window = read_int(config, "sliding_window")
    elif kind == "chunked":
        window = read_int(config, "attention_chunk_size")
    rank = read_field(config, "kv_lora_rank")
    if rank is not None:
        latent: Kind = "latent" if window is None else kind
        return LayerKV(index, latent, 1, int(rank), read_int(config, "qk_rope_head_dim"), window, layer_type)
    heads, k_dim, v_dim = _heads_and_dims(config, is_sliding=kind == "sliding")
    return LayerKV(index, kind, heads, k_dim, v_dim, window, layer_type)


def _heads_and_dims(config: object, *, is_sliding: bool) -> tuple[int, int, int]:
    prefix = "swa_" if is_sliding and read_field(config, "swa_num_key_value_heads") is not None else ""
    query_heads = read_int(config, "num_attention_heads")
    heads = read_int(config, prefix + "num_key_value_heads", default=query_heads)
    if read_field(config, "multi_query"):
        heads = 1
    # MiMo-V2-Flash doubles the heads of its sliding layers in code, not in its config.
    if is_sliding and read_field(config, "model_type") == "mimo_v2_flash":
        heads *= 2
    # Falcon's new architecture groups its heads in the weights but repeats K and V before it caches them.
    if read_field(config, "new_decoder_architecture"):
        heads = query_heads
    k_dim = read_int(config, prefix + "head_dim", default=0) or read_int(config, "hidden_size") // query_heads
    v_dim = read_int(config, prefix + "v_head_dim", default=0) or k_dim
    return heads, k_dim, v_dim
