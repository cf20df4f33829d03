"""What the cache needs to know of a model: its config, its layers' geometry, its attention implementation.

Imports: errors, block, sizing, layers, seam, selection.
"""

from __future__ import annotations

import dataclasses
import hashlib
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    get_layer_types_and_kwargs,
)

from tieredkv.block import LayerGeometry
from tieredkv.errors import ConfigError, UnsupportedModelError
from tieredkv.hf import seam
from tieredkv.hf.layers import is_tierable
from tieredkv.hf.selection import Selection
from tieredkv.sizing import LayerKV, kv_layers

SPARSE = frozenset(
    {
        "indexed_attention",
        "deepseek_sparse_attention",
        "qwen_sparse_attention",
        "minimax_m3_sparse",
    }
)
"""Layer types that keep the keys of an indexer beside their K and V; see `others`."""


@dataclasses.dataclass(eq=False)  # each is one cache's
class Attachment:
    """A cache's tie to its model.

    Args:
        config: the text decoder's config.
        model: the model, when the cache was given it.
        refusal: why attention over blocks was not selected, or None.
        is_copy: `config` is a copy that no model reads, until a forward shows the one that is read.
        presumed: whether "tieredkv" is taken to be selected as long as `is_copy`.
    """

    config: Any
    model: weakref.ref[Any] | None = None
    refusal: str | None = None
    is_copy: bool = False
    presumed: bool = False

    def __post_init__(self) -> None:
        self._read = self.config
        self._selection: Selection | None = None

    @classmethod
    def to(cls, model: Any) -> Attachment:
        """The tie to a model or to a config.

        Raises:
            UnsupportedModelError: neither, or an encoder-decoder model.
        """
        if hasattr(model, "get_text_config"):
            return cls(model.get_text_config(decoder=True))
        config = getattr(model, "config", None)
        if config is None or not hasattr(config, "get_text_config"):
            raise UnsupportedModelError(
                "Not a transformers model.",
                wanted="a PreTrainedModel or its config",
                got=type(model).__name__,
                change="TieredCache(model) or TieredCache(model.config)",
            )
        if getattr(config, "is_encoder_decoder", False):
            raise UnsupportedModelError(
                "An encoder-decoder model needs a cache for each kind of attention.",
                wanted="EncoderDecoderCache(TieredCache(model.config), DynamicCache(config=model.config))",
                got=f"TieredCache({type(model).__name__})",
                change="write it like that",
            )
        return cls(config.get_text_config(decoder=True), model=weakref.ref(model))

    def select(self) -> None:
        """Select attention over blocks on the model, if the cache was given one that can."""
        model = None if self.model is None else self.model()
        if model is None:
            return
        if seam.implementation_of(self.config) == seam.NAME:
            self._join(model)
            return
        if not model._can_set_attn_implementation():
            self.refusal = f"{type(model).__name__} does not use transformers' attention interface"
            return
        if not (model._supports_sdpa or model._supports_attention_backend):
            self.refusal = f"{type(model).__name__} says that no attention but its own can serve it"
            return
        if any(name in SPARSE for name in get_layer_types_and_kwargs(self.config)[0]):
            self.refusal = "the keys that an indexer chooses are known to transformers' own attention only"
            return
        self._join(model)

    def _join(self, model: Any) -> None:
        self._selection = Selection.of(model)
        self._selection.join(self, model, self.config)

    def restore(self) -> None:
        """Put the old implementation back if no other cache needs ours, unless somebody has changed it since."""
        if self._selection is not None:
            self._selection.leave(self)

    def fork(self, twin: Attachment) -> None:
        """`twin` is that of a deep copy of the cache, which needs the implementation as this one does."""
        twin.model, twin.refusal, twin._selection = self.model, self.refusal, self._selection
        twin.is_copy, twin.presumed, twin._read = self.is_copy, self.presumed, self._read
        if self._selection is not None:
            self._selection.stay(self, twin)

    def detach(self, presumed: bool) -> None:
        """The cache was restored by value, and the config with it: what it says of attention is the past."""
        self.is_copy, self.presumed = True, presumed

    def met(self, config: Any) -> None:
        """Our attention was called by a module that has this config, and reads its implementation there."""
        if self.is_copy and config is not None:
            self.is_copy, self._read = False, config

    @property
    def selected(self) -> bool:
        """Whether the model will call our attention, as far as is known. Takes 12 µs."""
        return self.presumed if self.is_copy else seam.implementation_of(self._read) == seam.NAME

    @property
    def why_not_selected(self) -> str:
        """The reason to give where it is not."""
        if self.is_copy:
            return "the cache was restored by value, and no forward since then has called attention over blocks"
        return f"the model's attention implementation is {seam.implementation_of(self._read)!r}, not {seam.NAME!r}"

    @property
    def fingerprint(self) -> str:
        """Names the config in cold files; says nothing of the weights."""
        return hashlib.sha256(self.config.to_json_string(use_diff=False).encode()).hexdigest()[:32]


def check_layers(config: Any) -> None:
    """Refuse models and layer types whose state the cache would not carry.

    Raises:
        UnsupportedModelError: such a model or type, by name.
    """
    try:
        types, _ = get_layer_types_and_kwargs(config)
    except AttributeError as missing:
        raise UnsupportedModelError(
            "The config does not say which layers its decoder has.",
            wanted="num_hidden_layers, and layer_types where they differ",
            got=f"{type(config).__name__}: {missing}",
            change="use transformers' own cache for this model",
        ) from missing
    served = (DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin)
    for layer_idx, name in enumerate(types):
        kind = DYNAMIC_LAYER_TYPE_MAPPING.get(name)
        known = kind in served[:2] or name in ("dummy", *SPARSE) or (kind is not None and issubclass(kind, served[2]))
        if not known:
            raise UnsupportedModelError(
                f"Layer {layer_idx} keeps state that a TieredCache does not carry.",
                wanted="full, sliding or chunked attention, linear attention, or no cache",
                got=repr(name),
                change="use transformers' DynamicCache for this model",
            )
    _predicted(config, types)  # refuses models that keep something else than their config says


def _predicted(config: Any, types: Sequence[str]) -> Sequence[LayerKV] | None:
    """What each layer stores by the config, or None where that does not tell."""
    if not SPARSE.isdisjoint(types):
        return None  # sizing does not know what such layers hold beside K and V
    try:
        return kv_layers(config)
    except ConfigError:
        return None


def tierable_layers(config: Any, layers: Sequence[Any]) -> list[int]:
    """Which of transformers' layers keep K and V of every token of the text.

    Those that attend another sequence, as Mllama's do an image, keep K and V that do not grow with the text.
    """
    predictions = _predicted(config, get_layer_types_and_kwargs(config)[0]) or ()
    cross = {layer.index for layer in predictions if layer.kind == "cross"}
    return [i for i, layer in enumerate(layers) if is_tierable(layer) and i not in cross]


def predicted_geometry(
    config: Any, tiered: Sequence[int], layer: int, key: torch.Tensor, value: torch.Tensor
) -> list[LayerGeometry]:
    """The geometry of every tiered layer, from the config and from the first layer's real tensors.

    Where the config's prediction for that layer is off (a wrapper that changes heads, for example), layers that were
    predicted alike are taken to be like it; where there is no prediction, all are.
    """
    actual = LayerGeometry(key.shape[1], key.shape[3], value.shape[3], key.dtype)
    predictions = _predicted(config, get_layer_types_and_kwargs(config)[0])
    if predictions is None:
        return [actual] * len(tiered)
    by_index = [predictions[layer_idx].geometry(key.dtype) for layer_idx in tiered]
    wrong = by_index[layer]
    return [actual if geometry == wrong else geometry for geometry in by_index]
