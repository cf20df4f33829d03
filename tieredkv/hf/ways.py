"""Which way each layer's attention gets K and V: over blocks, or gathered whole. Found out by probing, then kept.

`update` returns tensors that carry a handle. While a layer's way is unknown they are all of the layer's K and V, so
that any attention is right over them; if the attention function then sees the handle arrive untouched, blocks serve
the layer from the next forward on. New tokens alone are guarded where nothing later in the forward would notice that
another attention took them for all there is; elsewhere a handle that nobody claimed raises at the next update.

Imports: hf.layers, hf.refusals.
"""

from __future__ import annotations

import logging

import torch

from tieredkv.hf import refusals
from tieredkv.hf.layers import Handle, NewTokens

logger = logging.getLogger("tieredkv")


UNTOUCHED = "the attention function did not get the layer's key and value untouched"

NOT_SELECTED = 'the attention implementation is not "tieredkv"'

OWN_MASK = "each layer makes a mask of its own, which may depend on all keys and values"


class Ways:
    """The way of each tiered layer of one cache.

    Args:
        tiered: the model's index of each tiered layer.
        refusal: why blocks were not selected at all, or None.
        presumed: there are no whole K and V to probe with: blocks serve, or the forward is an error.
    """

    def __init__(self, tiered: list[int], refusal: str | None, presumed: bool = False) -> None:
        self._tiered, self._presumed = tiered, presumed
        self._ways = ["unknown"] * len(tiered)
        self._reasons: list[str | None] = [refusal] * len(tiered)
        self._with_keywords = [False] * len(tiered)
        self._handles: list[Handle] = []
        self._last: Handle | None = None
        self._warned = False
        self._selected = False

    @property
    def all_blocks(self) -> bool:
        """Whether every layer is attended over blocks."""
        return set(self._ways) == {"blocks"}

    @property
    def reason(self) -> str | None:
        """Why the first layer that gathers does, or None."""
        if not self._ways:
            return "the model has no full-attention layer"
        return next((r for w, r in zip(self._ways, self._reasons, strict=True) if w != "blocks" and r), None)

    def serves_blocks(self, layer: int, with_keywords: bool) -> bool:
        """Whether new tokens alone may be returned: blocks serve the layer, and the call is like the probed one."""
        if self._ways[layer] == "unknown":
            return self._presumed
        return self._ways[layer] == "blocks" and self._with_keywords[layer] == with_keywords

    def wants_handle(self, layer: int, selected: bool, perhaps: bool, with_keywords: bool) -> bool:
        """Whether the tensors returned for this call carry a handle.

        Args:
            layer: tiered layer.
            selected: the model uses the attention implementation "tieredkv".
            perhaps: where not selected, it may do so nevertheless: a handle that arrives shows it.
            with_keywords: the call carried the attention's keywords.
        """
        self._selected = selected
        if self._ways[layer] == "unknown":
            if selected or perhaps:
                self._with_keywords[layer] = with_keywords
            elif self._reasons[layer] is None:
                self._reasons[layer] = NOT_SELECTED
            return selected or perhaps
        if self._ways[layer] == "blocks" and not selected:
            self._warn(f"{NOT_SELECTED} any more")
        return selected and self.serves_blocks(layer, with_keywords)

    def issue(
        self, handle: Handle, key: torch.Tensor, value: torch.Tensor, is_last: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's tensors with their handle, which is remembered; `is_last` of the forward's layers."""
        if not handle.full and (is_last or handle.plan.new > 1 or self._ways[handle.layer] == "unknown"):
            # Not in each layer at each token, as it takes 3 µs: there the next layer's update notices in time.
            key, value = NewTokens.of(key), NewTokens.of(value)
        handle.attach(key, value)
        self._handles.append(handle)
        self._last = handle
        return key, value

    def arrived(self, handle: Handle, reason: str | None) -> None:
        """The attention function saw the handle; `reason` is why blocks cannot serve its call, or None."""
        if self._ways[handle.layer] != "unknown":
            return
        self._choose(handle.layer, "blocks" if reason is None else "gather", reason)
        # One mask for all layers comes from the user. One for each was made of the keys or values at hand, which over
        # blocks would be the new ones alone.
        others = [earlier for earlier in self._handles if earlier.mask is not None and earlier.mask is not handle.mask]
        if handle.mask is not None and others:
            for own in (*others, handle):
                self._choose(own.layer, "gather", OWN_MASK)

    def check_claims(self) -> None:
        """Refuse to go on when the last layer's attention cannot have been right.

        Raises:
            HandleError: a handle over new tokens alone was not claimed.
        """
        handle = self._last
        if handle is not None and not handle.claimed and not handle.full:
            self.forget_forward()
            raise refusals.not_attended(f"Layer {self._tiered[handle.layer]}")

    def end_forward(self) -> None:
        """Every layer was updated: settle what was probed.

        Raises:
            HandleError: as `check_claims`.
        """
        self.check_claims()
        for handle in self._handles:
            if not handle.claimed and self._ways[handle.layer] == "unknown":
                # Without the attention's keywords it may have been a direct call, which proves nothing.
                if not self._selected:
                    self._reasons[handle.layer] = NOT_SELECTED
                elif self._with_keywords[handle.layer]:
                    self._choose(handle.layer, "gather", UNTOUCHED)
                else:
                    self._reasons[handle.layer] = UNTOUCHED
        self.forget_forward()

    def forget_forward(self) -> None:
        """The forward is over, or was taken back."""
        self._handles, self._last = [], None

    def copy(self) -> Ways:
        """The same ways, without handles."""
        twin = Ways(self._tiered, None, self._presumed)
        twin._ways, twin._reasons = list(self._ways), list(self._reasons)
        twin._with_keywords, twin._warned = list(self._with_keywords), self._warned
        return twin

    def _choose(self, layer: int, way: str, reason: str | None) -> None:
        self._ways[layer], self._reasons[layer] = way, reason
        if way == "gather":
            self._warn(reason)

    def _warn(self, reason: str | None) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("tieredkv: whole K/V is gathered for attention: %s", reason)
