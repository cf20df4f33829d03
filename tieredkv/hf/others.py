"""The layers of a cache that are not tiered: sliding windows, linear states, placeholders. Transformers' own layers.

They bound their own memory (a window, a state), so they stay on the device. What the cache must do is keep them in
step with the tiered layers.

Imports: transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin


class OtherLayers:
    """Layers by their index in the model.

    Args:
        layers: the model's index of each layer, and the layer.
    """

    def __init__(self, layers: dict[int, Any]) -> None:
        self.layers = layers

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
