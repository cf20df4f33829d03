"""What a cache keeps that is not tiered: sliding windows, linear states, placeholders, and what a tiered layer keeps
beside its K and V. Transformers' own layers.

They bound their own memory (a window, a state) or are thin (an indexer's keys), so they stay on the device. What the
cache must do is keep them in step with the tiered layers.

Imports: errors; transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin

from tieredkv.errors import MismatchError

_BESIDE = {"indexer_keys": 1, "indexer_position_ids": 2, "idx_keys": 2}
"""Tensors that layers keep beside K and V, one entry for each token, and the dimension of the tokens."""


class OtherLayers:
    """Layers by their index in the model.

    Args:
        layers: the model's index of each layer, and the layer.
    """

    def __init__(self, layers: dict[int, Any]) -> None:
        self.layers = layers
        self._before: dict[int, tuple[Any, Any, int]] = {}  # keys, values and tokens of sliding layers

    def remember(self) -> None:
        """Before a forward: keep what sliding layers hold, since a window that has slid cannot be cropped back."""
        self._before = {
            layer_idx: (layer.keys, layer.values, layer.cumulative_length)
            for layer_idx, layer in self.layers.items()
            if isinstance(layer, DynamicSlidingWindowLayer) and layer.is_initialized
        }

    def forget(self) -> None:
        """After a forward: let go of what was kept for `roll_back`."""
        self._before = {}

    def mask_sizes(self, layer_idx: int, query_length: int, tokens: int | None) -> tuple[int, int]:
        """(keys, offset) of the next forward's mask in a layer.

        Args:
            layer_idx: the layer.
            query_length: new tokens.
            tokens: tokens that the cache holds; a layer may be ahead of it after a forward that broke off. None where
                nothing but the layer knows.
        """
        layer = self.layers[layer_idx]
        if tokens is None or not isinstance(layer, DynamicSlidingWindowLayer):
            sizes: tuple[int, int] = layer.get_mask_sizes(query_length)
            return sizes
        hidden = max(tokens - layer.sliding_window + 1, 0)
        return tokens - hidden + query_length, hidden

    def __iter__(self) -> Iterator[Any]:
        return iter(self.layers.values())

    def each(self, call: Callable[[Any], object]) -> None:
        """Do something to every layer that can."""
        for layer in self:
            call(layer)

    def reset(self) -> None:
        """Empty every layer; the next forward may have another number of rows."""
        for layer in self:
            layer.reset()
            if isinstance(layer, DynamicLayer):
                _drop(layer)
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                for held in (layer.conv_states, layer.recurrent_states, layer.conv_kernel_size):
                    held.update(dict.fromkeys(held))
                for flags in (layer.is_conv_states_initialized, layer.is_recurrent_states_initialized):
                    flags.update(dict.fromkeys(flags, False))

    def crop(self, tokens_to_remove: int) -> None:
        """Remove tokens, as transformers' `crop` counts them, from all layers or from none.

        Raises:
            RuntimeError: a window or a state has moved on, and its past was not recorded (`activate_past_recording`).
            MismatchError: a recurrent state, which never can go back.
        """
        before = self._noted()
        try:
            for layer_idx, layer in self.layers.items():
                if tokens_to_remove and any(getattr(layer, "is_recurrent_states_initialized", {}).values()):
                    raise MismatchError(
                        f"The recurrent state of layer {layer_idx} cannot go back.",
                        wanted="a cache whose is_croppable is True",
                        got=f"crop({tokens_to_remove})",
                        change="reset the cache and prefill what is to stay, or copy the cache (deepcopy) in time",
                    )
                if _has_tokens(layer):
                    layer.crop(tokens_to_remove)
        except BaseException:
            _put_back(before)
            raise

    def _noted(self) -> list[tuple[Any, dict[str, Any]]]:
        """Each layer and what it holds, for `_put_back`."""
        return [(layer, {k: dict(v) if isinstance(v, dict) else v for k, v in vars(layer).items()}) for layer in self]

    def select(self, rows: Sequence[int]) -> None:
        """Make row i of every layer what row `rows[i]` was, or leave all layers as they are.

        Of the methods that transformers has for it, `reorder_cache` alone is there for every kind of layer, and takes
        rows more than once or not at all.
        """
        chosen, before = torch.tensor(rows, dtype=torch.long), self._noted()
        try:
            self.each(lambda layer: layer.reorder_cache(chosen))
        except BaseException:
            _put_back(before)
            raise

    @property
    def rows(self) -> int:
        """Batch rows that the layers hold; 0 while they are empty."""
        for layer in self:
            states = (getattr(layer, name, None) for name in ("conv_states", "recurrent_states"))
            for held in (getattr(layer, "keys", None), *(state for each in states if each for state in each.values())):
                if isinstance(held, torch.Tensor):
                    return held.shape[0]
        return 0

    def roll_back(self, tokens: int) -> str | None:
        """Bring layers that went ahead in a forward that was taken back to `tokens` tokens.

        Returns:
            Why that is impossible, or None.
        """
        if not tokens:
            self.reset()
            return None
        for layer_idx, layer in self.layers.items():
            before = self._before.get(layer_idx)
            if before is not None and before[2] == tokens:
                layer.keys, layer.values, layer.cumulative_length = before
                continue
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                return f"the linear-attention state of layer {layer_idx} may have gone ahead"
            for name, dim, beside in _tensors_beside(layer):
                setattr(layer, name, beside.narrow(dim, 0, min(tokens, beside.shape[dim])))
            if (
                isinstance(layer, DynamicLayer)
                and not _is_cross(layer)
                and (ahead := layer.get_seq_length() - tokens) > 0
            ):
                try:
                    layer.crop(-ahead)
                except RuntimeError as failure:
                    return f"layer {layer_idx} cannot be rolled back: {failure}"
        return None

    def have(self, tokens: int) -> bool:
        """Whether every sliding layer has seen so many tokens."""
        windows = (layer for layer in self if isinstance(layer, DynamicSlidingWindowLayer))
        return all(layer.cumulative_length == tokens for layer in windows)

    @property
    def linear(self) -> dict[int, Any]:
        """Layers that hold a linear state."""
        return {i: layer for i, layer in self.layers.items() if isinstance(layer, LinearAttentionCacheLayerMixin)}

    def reset_windows(self) -> None:
        """Empty sliding layers, and leave the linear states that some of them hold too."""
        for layer in self:
            if isinstance(layer, DynamicSlidingWindowLayer):
                DynamicSlidingWindowLayer.reset(layer)
                _drop(layer)

    def out_of_step(self, tokens: int, new: int) -> str | None:
        """Why what is kept beside K and V does not fit a cache of `tokens` tokens as a forward begins, or None.

        A forward may have added its `new` tokens there before it came to the first tiered layer.
        """
        for layer_idx, layer in self.layers.items():
            for name, dim, beside in _tensors_beside(layer):
                if beside.shape[dim] not in (tokens, tokens + new):
                    return f"{name} of layer {layer_idx} went ahead in a forward that broke off"
        return None

    @property
    def nbytes(self) -> int:
        """Bytes of every tensor the layers hold."""
        total = 0
        for layer in self.layers.values():
            for value in vars(layer).values():
                for tensor in value.values() if isinstance(value, dict) else (value,):
                    total += tensor.nbytes if isinstance(tensor, torch.Tensor) else 0
        return total


def _put_back(noted: list[tuple[Any, dict[str, Any]]]) -> None:
    """Layers as `OtherLayers._noted` found them."""
    for layer, state in noted:
        vars(layer).update(state)


def _drop(layer: DynamicLayer) -> None:
    """Let go of K and V, which transformers 5.17 fills with zeros at a reset and then goes on from."""
    layer.keys = layer.values = None
    layer.is_initialized = False


def _tensors_beside(layer: Any) -> list[tuple[str, int, torch.Tensor]]:
    """(name, dimension of the tokens, tensor) of what a layer keeps beside K and V."""
    held = vars(layer)
    return [(name, dim, held[name]) for name, dim in _BESIDE.items() if isinstance(held.get(name), torch.Tensor)]


def _is_cross(layer: Any) -> bool:
    """Whether a layer holds K and V of another sequence: with those of the text a plain layer would be tiered."""
    return type(layer) is DynamicLayer


def _has_tokens(layer: Any) -> bool:
    """Whether there is something of the text that a crop could remove; transformers' own crop fails on empty layers."""
    if isinstance(layer, LinearAttentionCacheLayerMixin) and not any(layer.is_conv_states_initialized.values()):
        return False
    empty = isinstance(layer, DynamicSlidingWindowLayer) and not layer.is_initialized
    return not empty and not _is_cross(layer)
