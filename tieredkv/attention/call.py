"""`LayerCall`: what attention was given for one layer.

Imports: torch, and this package's masks, those of windows too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from tieredkv.attention.masks import MaskSpec, TensorMask
from tieredkv.attention.windowed import WindowedMask


@dataclasses.dataclass(slots=True)  # not frozen: made once a layer, and that takes three times as long
class LayerCall:
    """What the attention function was given for one layer.

    Args:
        layer: tiered layer.
        query: [rows, heads, new, k_dim].
        key: the new keys, [rows, kv_heads, new, k_dim].
        value: the new values, [rows, kv_heads, new, v_dim].
        scale: factor on the scores.
        softcap: scores become `softcap * tanh(scores / softcap)`, or None.
        sinks: one more logit for each head, [heads], or None.
        mask: None for causal, else what the mask function made; the engine adds what a plan hides.
    """

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    softcap: float | None
    sinks: torch.Tensor | None
    mask: MaskSpec | TensorMask | WindowedMask | None

    def starts(self, rows: int) -> Sequence[int] | None:
        """For each row the first token that is seen, where the mask is causal and padding is on the left; else None."""
        if self.mask is None:
            return [0] * rows
        if not isinstance(self.mask, MaskSpec) or not self.mask.is_causal:
            return None
        return self.mask.row_starts()
