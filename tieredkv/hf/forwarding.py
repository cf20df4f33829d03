"""A forward through the cache: what the model calls, layer by layer, between two public operations.

When a forward ends, and what becomes of it, is `cycle`'s.

Imports: everything to its left; transformers' cache layers.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DynamicLayer

from tieredkv.attention.call import LayerCall
from tieredkv.attention.engine import Engine
from tieredkv.config import CacheSettings
from tieredkv.device import Device
from tieredkv.errors import HandleError, TieredKVError
from tieredkv.hf import refusals, seam
from tieredkv.hf.attachment import Attachment, check_layers, tierable_layers
from tieredkv.hf.cycle import Cycle
from tieredkv.hf.layers import Handle, tiered_layer
from tieredkv.hf.others import OtherLayers
from tieredkv.hf.positions import Positions
from tieredkv.hf.tenancy import SharedStore, Tenancy
from tieredkv.hf.ways import Ways
from tieredkv.plan import ForwardPlan
from tieredkv.store import check_tensors, gather, planner, read_layer, requests, steady, write
from tieredkv.store.dropping import refuse_dropped

if TYPE_CHECKING:
    from tieredkv.hf.watching import TokenWatch


class Forwarding(Cycle):
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
        super().__init__(attachment.config)
        self._attachment, self._settings = attachment, settings
        self._tiered = tierable_layers(attachment.config, self.layers)
        self._first = next((i for i, layer in enumerate(self.layers) if isinstance(layer, DynamicLayer)), -1)
        self._index = {layer_idx: t for t, layer_idx in enumerate(self._tiered)}
        plain = {i for i in self._tiered if type(self.layers[i]) is DynamicLayer}
        self._others = OtherLayers({i: layer for i, layer in enumerate(self.layers) if i not in plain})
        for layer_idx in self._tiered:
            self.layers[layer_idx] = tiered_layer(self, layer_idx, self.layers[layer_idx])
        self._place = Tenancy(attachment, settings, device, self._tiered)
        self._positions = Positions()
        self._gather_peak_bytes = 0
        self._self = weakref.ref(self)
        self._selected = False  # of the forward that is open: reading it from a config takes 12 µs
        self.watch: TokenWatch | None = None
        attachment.select()
        self._ways = Ways(self._tiered, attachment.refusal, settings.beyond == "drop")

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
                self.refuse(refusals.no_such_layer(layer_idx, len(self.layers)))
            self._begin_with_other_layer(key_states, layer_idx, kwargs)
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if (key_states.requires_grad or value_states.requires_grad) and torch.is_grad_enabled():
            raise refusals.gradients("key_states.requires_grad or value_states.requires_grad")
        rows, _, new, _ = key_states.shape
        if rows == 0:
            return key_states, value_states
        layer = self._index[layer_idx]
        if new == 0:
            whole = self.gather_layer(layer_idx)
            return (key_states, value_states) if whole is None else whole
        self._check_claims()
        if self._place.store is None:
            self._check_open()  # before one is made
        store = self._place.open(layer, key_states, value_states)
        check_tensors(store, layer, key_states, value_states)
        plan = self._plan(layer, rows, new, kwargs)
        with store.lock:
            write(store, plan, layer, key_states, value_states)
        plan.updated.add(layer)
        self._asked = False
        return self._result(plan, layer, key_states, value_states, "kwargs" in kwargs)

    def refuse(self, error: TieredKVError) -> None:
        """Raise an error, and take back what was written of this forward."""
        self._take_back()
        raise error

    def _result(
        self, plan: ForwardPlan, layer: int, key: torch.Tensor, value: torch.Tensor, with_keywords: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The new K and V with a handle where blocks serve, else all of the layer's."""
        selected, ways = self._selected, self._ways
        full = plan.past == 0 or not (selected and ways.serves_blocks(layer, with_keywords))
        if full and plan.past:
            key, value = self._gather(plan, layer, key, value)
        if ways.wants_handle(layer, selected, self._attachment.is_copy, with_keywords):
            is_last = len(plan.updated) == len(self._tiered)
            key, value = ways.issue(Handle(self._self, layer, plan, full), key, value, is_last)
        return key, value

    def _gather(
        self, plan: ForwardPlan, layer: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        try:
            with steady(self._place.need_store(), self._place.need_holder(), plan) as placed:
                k, v = gather(self._place.need_store(), placed, layer, key, value)
        except BaseException:
            plan.updated.discard(layer)  # a forward that fails in its last layer is to be taken back too
            raise
        self._gather_peak_bytes = max(self._gather_peak_bytes, k.nbytes + v.nbytes)
        return k, v

    def _plan(self, layer: int, rows: int, new: int, kwargs: dict[str, Any]) -> ForwardPlan:
        """The forward this update belongs to; a new one when the layer already has its tokens."""
        store, holder = self._place.need_store(), self._place.need_holder()
        plan = holder.plan
        if plan is not None and layer not in plan.updated and (plan.rows, plan.new) == (rows, new):
            return plan
        if plan is not None and layer in plan.updated and len(plan.updated) < len(self._tiered) and not self._asked:
            self.refuse(refusals.layer_again(self._tiered[layer]))
        self._finish()
        if holder.table.rows and len(holder.table) != rows:
            raise refusals.other_rows(len(holder.table), rows)
        self._positions.check(kwargs.get("kwargs"), holder.tokens, new)
        self._broken = self._broken or self._others.out_of_step(holder.tokens, new)
        self._check_usable()
        self._check_beginning(layer < 0 or self._tiered[layer] == self._first)
        self._selected = self._attachment.selected
        if not self._selected:
            refuse_dropped(store)
        try:
            if not holder.table.rows:
                holder.table.rows = [[] for _ in range(rows)]
            self.check_max_tokens()
            self._others.remember()
            plan = planner.begin(store, holder, new)
        except Exception:
            if not holder.tokens:
                self._empty()
            raise
        self._states.planned()
        self._positions.accept()
        planner.announce(store, plan)
        return plan

    def check_max_tokens(self) -> None:
        """Before the first forward, be it into an empty cache or after a known prefix, so many tokens have to fit.

        Raises:
            BudgetError: they do not.
        """
        store, holder, most = self._place.need_store(), self._place.need_holder(), self._settings.max_tokens
        if most is not None and not (holder.tokens and holder.last_access):
            requests.reserve(store, holder, most)

    def _begin_with_other_layer(self, key: torch.Tensor, layer_idx: int, kwargs: dict[str, Any]) -> None:
        """A layer that is not tiered is updated first: plan now, so that a refusal comes before any write."""
        rows, _, new, _ = key.shape
        if new == 0:
            return
        if layer_idx != self._first:
            if self._open is None:
                self._check_beginning(False)
        elif not self._tiered:
            self._finish()
            self._check_usable()
            self._others.remember()
            self._untiered = ForwardPlan(number=0, past=self._tokens, new=new, rows=rows)
            self._states.planned()
            self._interrupted = False
        elif self._place.holder is None:
            if self._states.follows(self._first):
                self._broken = self._states.ahead
                self._check_usable()
            # What is there is left over from a forward that stopped before the first tiered layer.
            self._others.reset_windows()
        elif self._place.store is not None:
            self._finish()
            self._plan(-1, rows, new, kwargs)

    def _check_claims(self) -> None:
        """Raises HandleError when the last layer's attention did not use its handle."""
        try:
            self._ways.check_claims()
        except HandleError as unclaimed:
            self.refuse(unclaimed)

    def handle_arrived(self, handle: Handle, reason: str | None, mask: torch.Tensor | None) -> None:
        """The attention function got a handle, and perhaps a mask that is a tensor; see `Ways.arrived`."""
        handle.mask = mask
        self._attachment.met(handle.config)
        self._ways.arrived(handle, reason)

    # ---- lengths and masks

    def get_seq_length(self, layer_idx: int | None = None) -> int:
        """Tokens of each row: of a layer, or (by default) those that every tiered layer has."""
        if layer_idx is not None and layer_idx not in self._index:
            return int(super().get_seq_length(layer_idx))
        return self._length(layer_idx)

    def _length(self, layer_idx: int | None = None) -> int:
        self._asked = True
        plan = self._open
        if plan is None:
            return self._tokens
        whole = self._is_whole(plan) if layer_idx is None else self._index[layer_idx] in plan.updated
        return plan.past + (plan.new if whole else 0)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(keys, offset) of the next forward's mask in this layer."""
        if layer_idx in self._index:
            return self._length() + query_length, 0
        if layer_idx not in self._others.layers or self.is_linear[layer_idx]:
            # transformers 5.17 asks layer 0 for its mask even where it is linear: the first attention layer answers.
            sizes: tuple[int, int] = super().get_mask_sizes(query_length, layer_idx)
            return sizes
        return self._others.mask_sizes(layer_idx, query_length, self._length() if self._first >= 0 else None)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Position of the next forward's first query."""
        return self._length() if self._first >= 0 else int(super().get_seq_length(layer_idx))

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

    def ended(self) -> Tenancy:
        """End the forward that is open; then the cache's place in its store."""
        self._finish(is_public=True)
        return self._place

    def joins_step(self) -> Tenancy:
        """A token will come together with those of other caches (see StepCache): the forward before it ends."""
        self._end_forward()
        self._positions.forget()
        if self._place.holder is not None:
            self._place.holder.padding = None  # there every token is seen
        return self._place

    @property
    def place(self) -> Tenancy:
        """The cache's place in its store."""
        return self._place

    def move_in(self, shared: SharedStore, watch: TokenWatch | None) -> Tenancy:
        """Before the first forward: the cache's blocks are to lie in a store that several caches share."""
        self._place.shared, self.watch = shared, watch
        return self._place

    @property
    def is_all_blocks(self) -> bool:
        """Whether every layer is tiered, and known to be attended over blocks."""
        return len(self._tiered) == len(self.layers) and self._ways.all_blocks

    @property
    def ways(self) -> Ways:
        """How attention gets K and V of each layer, as far as that is known: a copy."""
        return self._ways.copy()

    @ways.setter
    def ways(self, ways: Ways) -> None:
        self._ways = ways.copy()

    def expand(self, rows: int) -> None:
        """A prefix that the cache was given for some rows serves the copies that generation makes of them."""
        chosen = self._place.expand(rows)
        if chosen is not None and self.watch is not None:
            self.watch.select(chosen)

    @property
    def model_config(self) -> Any:
        """The config of the model's decoder."""
        return self._attachment.config

    def attend(self, plan: ForwardPlan, call: LayerCall) -> torch.Tensor:
        """One layer's attention in an open forward, for the attention function; see `Engine.attend`."""
        store, holder = self._place.need_store(), self._place.need_holder()
        try:
            with steady(store, holder, plan, call.starts(plan.rows)) as placed:
                return self.engine.attend(placed, call)
        except BaseException:
            plan.updated.discard(call.layer)  # as in `_gather`
            raise

    @property
    def engine(self) -> Engine:
        """What attends the layers."""
        self._check_usable()
        return self._place.engine
