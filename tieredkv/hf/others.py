"""The layers of a cache that are not tiered: sliding windows, linear states, placeholders. Transformers' own layers.

They bound their own memory (a window, a state), so they stay on the device. What the cache must do is keep them in
step with the tiered layers.

Imports: transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin


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

    def each(self, call: Callable[[Any], object]) -> None:
        """Do something to every layer that can."""
        for layer in self.layers.values():
            call(layer)

    def reset(self) -> None:
        """Empty every layer."""
        self.each(lambda layer: layer.reset())

    def crop(self, tokens_to_remove: int) -> None:
        """Remove tokens, as transformers' `crop` counts them."""
        self.each(lambda layer: layer.crop(tokens_to_remove))

    def reorder(self, beam_idx: torch.Tensor) -> None:
        """Reorder rows."""
        self.each(lambda layer: layer.reorder_cache(beam_idx))

    def repeat(self, repeats: int) -> None:
        """Repeat rows; linear states have no method for it in transformers, and are left as stock leaves them."""
        self.each(lambda layer: layer.batch_repeat_interleave(repeats))

    def select(self, indices: torch.Tensor) -> None:
        """Keep some rows."""
        self.each(lambda layer: layer.batch_select_indices(indices))

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
            if isinstance(layer, DynamicLayer) and (ahead := layer.get_seq_length() - tokens) > 0:
                try:
                    layer.crop(-ahead)
                except RuntimeError as failure:
                    return f"layer {layer_idx} cannot be rolled back: {failure}"
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


class StateWatch:
    """Notices that a forward updated linear-attention states and then broke off: such states cannot go back.

    A forward updates each state once, so a state that comes a second time begins the next forward.
    """

    def __init__(self) -> None:
        self._updated: set[tuple[str, int, int]] = set()
        self._broke_off = False
        self._forwards = 0

    def begins_forward(self, state: tuple[str, int, int]) -> bool:
        """Note an update; whether it is the first of a forward. Then ask `broke_off`, once."""
        if self._updated and state not in self._updated:
            self._updated.add(state)
            return False
        self._broke_off = bool(self._updated)
        self._updated = {state}
        return True

    def broke_off(self, forwards: int) -> bool:
        """Whether the forward before the one that begins now did not come to its end.

        Args:
            forwards: how many forwards the cache has completed so far.
        """
        broke_off, self._broke_off = self._broke_off and forwards == self._forwards, False
        self._forwards = forwards
        return broke_off
