"""A forward through the cache: what the model calls, layer by layer, between two public operations.

There is no hook after the last layer, so a forward ends at the next one or at the next public call (`_finish`). A
forward that did not reach every tiered layer is taken back.

Imports: everything to its left; transformers' DynamicCache.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from tieredkv.attention.engine import Engine, LayerCall
from tieredkv.config import CacheSettings
from tieredkv.device import Device
from tieredkv.errors import ClosedError, HandleError, MismatchError, TrainingModeError
from tieredkv.hf import seam
from tieredkv.hf.attachment import Attachment, check_layers, no_such_layer
from tieredkv.hf.layers import Handle, TieredLayer
from tieredkv.hf.others import OtherLayers, StateWatch
from tieredkv.hf.positions import Positions
from tieredkv.hf.tenancy import Tenancy
from tieredkv.hf.ways import Ways
from tieredkv.plan import ForwardPlan
from tieredkv.store import BlockStore, Holder, check_tensors, gather, planner, read_layer, requests, steady, write


class Forwarding(DynamicCache):
    """The part of a `TieredCache` that models call. Not made by itself.

    Args:
        attachment: the tie to the model or config.
        settings: sizes and choices.
        device: the computing device, or None for the one of the first keys.

    Raises:
        UnsupportedModelError: layer types that the cache refuses.
    """

    def __init__(self, attachment: Attachment, settings: CacheSettings, device: Device | None) -> None:
        check_layers(attachment.config)
        super().__init__(config=attachment.config)
        self._attachment, self._settings = attachment, settings
        self._tiered = [i for i, layer in enumerate(self.layers) if type(layer) is DynamicLayer]
        self._index = {layer_idx: t for t, layer_idx in enumerate(self._tiered)}
        for layer_idx in self._tiered:
            self.layers[layer_idx] = TieredLayer(self, layer_idx)
        self._others = OtherLayers({i: layer for i, layer in enumerate(self.layers) if i not in self._index})
        self._place = Tenancy(attachment, settings, device, self._tiered)
        self._positions = Positions()
        self._gather_peak_bytes = 0
        self._closed = False
        self._broken: str | None = None
        self._forwards = 0  # that were complete
        self._states = StateWatch()
        self._self = weakref.ref(self)
        self._selected = False  # of the forward that is open: reading it from a config takes 12 µs
        attachment.select()
        self._ways = Ways(self._tiered, attachment.refusal)

    @seam.outside_graphs
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values of one layer, and return what its attention needs.

        Args:
            key_states: [rows, kv_heads, new, k_dim].
            value_states: [rows, kv_heads, new, v_dim].
            layer_idx: layer of the model.
            kwargs: `kwargs=` may hold the keywords of the attention function (transformers 5.24).

        Returns:
            All keys and values of the layer, or, where attention over blocks is known to follow, the new ones, which
            carry a handle to it. Not overwritten before the forward ends.

        Raises:
            BudgetError: the forward does not fit; nothing was written.
            PositionError: the positions do not continue the cache; nothing was written.
            MismatchError: tensors of another model, batch or dtype.
            TrainingModeError: keys that need gradients.
            HandleError: attention did not use the last layer's handle.
        """
        if layer_idx not in self._index:
            if layer_idx >= len(self.layers):
                self._refuse_layer(layer_idx)
            self._begin_with_other_layer(key_states, layer_idx, kwargs)
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if key_states.requires_grad and torch.is_grad_enabled():
            raise TrainingModeError(
                "Keys that need gradients cannot be stored.",
                wanted="inference",
                got="key_states.requires_grad with gradients enabled",
                change="model.eval() and `with torch.no_grad():` (generate does both)",
            )
        rows, _, new, _ = key_states.shape
        if rows == 0:
            return key_states, value_states
        layer = self._index[layer_idx]
        if new == 0:
            whole = self.gather_layer(layer_idx)
            return (key_states, value_states) if whole is None else whole
        self._check_claims()
        store = self._place.open(layer, key_states, value_states)
        check_tensors(store, layer, key_states, value_states)
        plan = self._plan(layer, rows, new, kwargs)
        with store.lock:
            write(store, plan, layer, key_states, value_states)
        plan.updated.add(layer)
        return self._result(plan, layer, key_states, value_states, "kwargs" in kwargs)

    def _refuse_layer(self, layer_idx: int) -> None:
        """A deeper model than the cache's own: what it wrote of this forward is taken back."""
        if self._place.store is not None and self._place.holder is not None:
            self._take_back(self._place.store, self._place.holder)
        raise no_such_layer(layer_idx, len(self.layers))

    def _result(
        self, plan: ForwardPlan, layer: int, key: torch.Tensor, value: torch.Tensor, with_keywords: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The new K and V with a handle where blocks serve, else all of the layer's."""
        selected = self._selected
        full = plan.past == 0 or not (selected and self._ways.serves_blocks(layer, with_keywords))
        if full and plan.past:
            key, value = self._gather(plan, layer, key, value)
        if self._ways.wants_handle(layer, selected, with_keywords):
            handle = Handle(self._self, layer, plan, full)
            handle.attach(key, value)
            self._ways.issue(handle)
        return key, value

    def _gather(
        self, plan: ForwardPlan, layer: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with steady(self._place.need_store(), self._place.need_holder(), plan) as placed:
            k, v = gather(self._place.need_store(), placed, layer, key, value)
        self._gather_peak_bytes = max(self._gather_peak_bytes, k.nbytes + v.nbytes)
        return k, v

    def _plan(self, layer: int, rows: int, new: int, kwargs: dict[str, Any]) -> ForwardPlan:
        """The forward this update belongs to; a new one when the layer already has its tokens."""
        store, holder = self._place.need_store(), self._place.need_holder()
        plan = holder.plan
        if plan is not None and layer not in plan.updated and (plan.rows, plan.new) == (rows, new):
            return plan
        self._finish()
        if holder.table.rows and len(holder.table) != rows:
            raise MismatchError(
                "Another number of batch rows than the cache holds.",
                wanted=len(holder.table),
                got=rows,
                change="reset the cache, or batch_repeat_interleave / batch_select_indices it first",
            )
        self._positions.check(kwargs.get("kwargs"), holder.tokens, new)
        try:
            if not holder.table.rows:
                holder.table.rows = [[] for _ in range(rows)]
                if self._settings.max_tokens is not None:
                    requests.reserve(store, holder, self._settings.max_tokens)
            self._others.remember()
            plan = planner.begin(store, holder, new)
        except Exception:
            if not holder.tokens:
                self._empty()
            raise
        self._selected = seam.implementation_of(self._attachment.config) == seam.NAME
        store.counters.begin_forward(new, rows)
        self._positions.accept()
        if plan.chunks:
            store.prefetcher.start(range(len(self._tiered)), plan.chunks)
        return plan

    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Any:
        """Same as transformers'; refuses when the last forward stopped between linear and tiered layers.

        Raises:
            MismatchError: it did, and a state cannot be rolled back.
        """
        self._watch_state(("conv", layer_idx, state_idx))
        return super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Any:
        """Same as transformers'; refuses as `update_conv_state` does."""
        self._watch_state(("recurrent", layer_idx, state_idx))
        return super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)

    def _watch_state(self, state: tuple[str, int, int]) -> None:
        if self._tiered and self._states.begins_forward(state):
            self._finish()
            if self._states.broke_off(self._forwards):
                self._broken = f"the linear-attention state of layer {state[1]} went ahead in a forward that broke off"
                self._check_usable()

    def _begin_with_other_layer(self, key: torch.Tensor, layer_idx: int, kwargs: dict[str, Any]) -> None:
        """A layer that is not tiered is updated first: plan now, so that a refusal comes before any write."""
        holder = self._place.holder
        first = not any(i < layer_idx for i in self.attention_layers())
        if first and holder is None and self._tiered:
            # What is there is left over from a forward that stopped before the first tiered layer.
            self._others.reset()
        if holder is None or self._place.store is None or not self._tiered or key.shape[-2] == 0:
            return
        if first:
            self._finish()
            self._plan(-1, key.shape[0], key.shape[-2], kwargs)

    def attention_layers(self) -> list[int]:
        """Indices of the layers that are updated with keys and values, tiered or not."""
        return [i for i, layer in enumerate(self.layers) if isinstance(layer, DynamicLayer)]

    def _finish(self) -> None:
        """End the forward that is open: it counts if every tiered layer has its tokens, else it is taken back."""
        self._check_usable()
        holder, store = self._place.holder, self._place.store
        if holder is None or store is None or holder.plan is None:
            return
        if len(holder.plan.updated) < len(self._tiered):
            self._take_back(store, holder)
            return
        try:
            self._ways.end_forward()
            planner.commit(store, holder)
            self._forwards += 1
            self._others.forget()
        except Exception:
            self._take_back(store, holder)
            raise

    def _take_back(self, store: BlockStore, holder: Holder) -> None:
        """The forward that is open did not happen."""
        planner.rollback(store, holder)
        self._ways.forget_forward()
        self._positions.take_back()
        self._broken = self._others.roll_back(holder.tokens)

    def _check_claims(self) -> None:
        """Raises HandleError when the last layer's attention did not use its handle."""
        try:
            self._ways.check_claims()
        except HandleError:
            if self._place.store is not None and self._place.holder is not None:
                self._take_back(self._place.store, self._place.holder)
            raise

    def handle_arrived(self, handle: Handle, reason: str | None) -> None:
        """The attention function got a handle; see `Ways.arrived`."""
        self._ways.arrived(handle, reason)

    # ---- lengths and masks

    def get_seq_length(self, layer_idx: int | None = None) -> int:
        """Tokens of each row: of a layer, or (by default) those that every tiered layer has."""
        if layer_idx is not None and layer_idx not in self._index:
            return int(super().get_seq_length(layer_idx))
        if not self._tiered:
            return int(super().get_seq_length(0))
        return self._length(layer_idx)

    def _length(self, layer_idx: int | None = None) -> int:
        holder = self._place.holder
        if holder is None:
            return 0
        plan = holder.plan
        if plan is None:
            return holder.tokens
        whole = len(plan.updated) == len(self._tiered) if layer_idx is None else self._index[layer_idx] in plan.updated
        return holder.tokens + (plan.new if whole else 0)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(keys, offset) of the next forward's mask in this layer."""
        if layer_idx in self._index:
            return self._length() + query_length, 0
        if layer_idx not in self._others.layers or self.is_linear[layer_idx]:
            # transformers 5.17 asks layer 0 for its mask even where it is linear: the first attention layer answers.
            sizes: tuple[int, int] = super().get_mask_sizes(query_length, layer_idx)
            return sizes
        return self._others.mask_sizes(layer_idx, query_length, self._length() if self._tiered else None)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Position of the next forward's first query."""
        return self._length() if self._tiered else int(super().get_seq_length(layer_idx))

    def gather_layer(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Copies of all K and V of a tiered layer, [rows, kv_heads, tokens, dim], or None while there are none."""
        store, holder = self._place.store, self._place.holder
        if store is None or holder is None or layer_idx not in self._index:
            return None
        tokens = self.get_seq_length(layer_idx)
        if not tokens:
            return None
        return read_layer(store, holder, self._index[layer_idx], tokens)

    # ---- the store

    def attend(self, plan: ForwardPlan, call: LayerCall) -> torch.Tensor:
        """One layer's attention in an open forward, for the attention function; see `Engine.attend`."""
        with steady(self._place.need_store(), self._place.need_holder(), plan) as placed:
            return self.engine.attend(placed, call)

    @property
    def engine(self) -> Engine:
        """What attends the layers."""
        self._check_usable()
        return self._place.engine

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("The cache is closed.", wanted="an open cache", got="closed", change="make a new one")
        if self._place.store is not None:
            self._place.store.check_usable()

    def _check_usable(self) -> None:
        self._check_open()
        if self._broken is not None:
            raise MismatchError(
                "The cache's layers no longer agree.",
                wanted="layers of one length",
                got=self._broken,
                change="cache.reset() and prefill again",
            )

    def _empty(self) -> None:
        """Drop every token."""
        self._ways.forget_forward()
        self._states = StateWatch()
        self._broken = None
        if self._place.store is not None and self._place.holder is not None:
            with self._place.store.lock:
                planner.rollback(self._place.store, self._place.holder)
                self._place.holder.table.clear()
                self._place.holder.tokens = 0
        self._positions.forget()
        self._others.reset()
