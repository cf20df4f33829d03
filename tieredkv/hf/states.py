"""Linear-attention states: which of them the forward that is open has reached, and whether one broke off between them.

A state cannot go back, and models update it in two ways: by telling the cache, or, for a single token, in place in the
tensor that the cache has handed out. So a state counts as gone ahead once it was read, and as moved once the cache was
told or its tensor is seen to have changed (PyTorch counts writes in place; kernels that it does not know of stay
unseen, and then nothing is concluded from that).

Imports: hf.seam; transformers' DynamicCache.
"""

from __future__ import annotations

import abc
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import DynamicCache

from tieredkv.hf import seam

State = tuple[str, int, int]
"""Its kind, its layer and its number there."""

_READS_ARE_TOLD = hasattr(DynamicCache, "get_conv_state")  # up to transformers 5.23 models take states off the layers


class Touch(NamedTuple):
    """What a model does to a state."""

    how: str  # "read" or "update"; "look" where it asks whether there is one, and then reads it unseen
    kind: str
    layer: int
    number: int


class StateWatch:
    """Knows which linear states the forward that is open has touched, and notices one that broke off.

    States before the model's first attention come before a forward is planned, and begin it.
    """

    def __init__(self) -> None:
        self._touched: set[Touch] = set()
        self._told: set[State] = set()
        self._before: dict[int, list[_Held]] = {}  # of the layers touched, as they were then
        self._moved: set[State] = set()  # as `came_to` saw it last
        self._ended = False  # the forward that they belong to
        self._taken_back = False
        self._leads: dict[Touch, bool] = {}  # of the layer with the first attention: whether it comes before that
        self._moves_for_one: set[State] = set()  # states seen to move in every forward of one token

    @property
    def ahead(self) -> str | None:
        """Why states went ahead of the tokens, or None: a forward that touched them was neither ended nor taken back.

        Not to be asked by the forward itself.
        """
        if not self._touched or self._ended or self._taken_back:
            return None
        layer = min(touch.layer for touch in self._touched)
        return f"the linear-attention state of layer {layer} went ahead in a forward that broke off, or is not over"

    def follows(self, first: int) -> bool:
        """Whether a state behind the first attention was touched, which has to be of an earlier forward there."""
        return self.ahead is not None and any(touch.layer > first for touch in self._touched)

    def begins_forward(self, touch: Touch, layer: Any, *, first: int, is_open: bool, is_over: bool) -> bool:
        """Note a touch; if it begins a forward while another is not ended, end that one and then call `start`.

        Args:
            touch: what is done to which state.
            layer: transformers' layer that holds it.
            first: the model's first layer with attention; the number of layers where none has.
            is_open: a forward was planned and is not ended.
            is_over: its attention is done in every layer.
        """
        if self.leads(touch, first, is_open):
            if self._ended:
                self._clear()
            elif touch in self._touched or (is_open and (touch.layer < first or is_over)):
                return True
        self._note(touch, layer)
        return False

    def leads(self, touch: Touch, first: int, is_open: bool) -> bool:
        """Whether it comes before the first attention."""
        return touch.layer < first or (touch.layer == first and self._leads.setdefault(touch, not is_open))

    def start(self, touch: Touch, layer: Any) -> bool:
        """A touch begins a forward; whether the one before broke off, after it had touched states."""
        broke_off = bool(self._touched) and not self._ended
        self._clear()
        self._note(touch, layer)
        return broke_off

    def planned(self) -> None:
        """Attention begins a forward, or goes on with one that states have begun."""
        if self._ended or self._taken_back:
            self._clear()

    def told(self, state: State) -> None:
        """The cache has updated a state."""
        self._told.add(state)

    def is_looked_at(self, touch: Touch) -> bool:
        """Whether it was touched so before."""
        return touch in self._touched and not self._ended

    @property
    def is_of_one(self) -> bool:
        """Whether a forward without attention is of one token: no convolution was told."""
        return not any(kind == "conv" for kind, _, _ in self._told)

    def came_to(self, layers: dict[int, Any], *, one: bool, past: int) -> bool:
        """Whether the forward that is open has moved the states of these linear layers.

        Args:
            layers: the linear layers.
            one: it is of one token, after others.
            past: tokens before it.
        """
        if not past and not self._touched:  # the cache was restored as a whole
            return all(has_state(layer) for layer in layers.values())
        if not layers.keys() <= {touch.layer for touch in self._touched}:
            return False
        moved = self._moved = self._told.union(*(self._moved_in(i, layer) for i, layer in layers.items()))
        classes = {(kind, number) for kind, _, number in moved}
        held = {each.state for i, layer in layers.items() for each in _held(i, layer) if each.tensor is not None}
        if one:
            wanted = {state for state in held if (state[0], state[2]) in classes} | self._moves_for_one
        else:
            wanted = held.union(
                (touch.kind, touch.layer, touch.number) for touch in self._touched if touch.how == "read"
            )
        return wanted <= moved

    def are_elsewhere(self, layers: dict[int, Any]) -> bool:
        """Whether no state was ever kept here: RecurrentGemma's modules keep their own."""
        return not self._touched and not any(has_state(layer) for layer in layers.values())

    def end(self, layers: dict[int, Any], *, one: bool) -> None:
        """A forward came to its end."""
        if one and not any(layer.record_past for layer in layers.values()):
            self._moves_for_one |= self._moved
        self._ended = True
        self._told, self._before = set(), {}

    def take_back(self) -> None:
        """The forward that is open did not happen. Models may have read a state by then: too late to empty it."""
        self._taken_back = True

    def rest(self) -> None:
        """No forward is open, and what was taken back left nothing behind."""
        if self._taken_back:
            self._clear()

    def _note(self, touch: Touch, layer: Any) -> None:
        if touch.layer not in self._before:
            self._before[touch.layer] = _held(touch.layer, layer)
        self._touched.add(touch)

    def _clear(self) -> None:
        self._touched, self._told, self._before = set(), set(), {}
        self._ended = self._taken_back = False

    def _moved_in(self, layer_idx: int, layer: Any) -> list[State]:
        now = _held(layer_idx, layer)
        before = self._before.get(layer_idx, now)
        return [
            new.state
            for old, new in zip(before, now, strict=True)
            if new.tensor is not old.tensor or new.writes != old.writes
        ]


class _Held(NamedTuple):
    """A state as a layer holds it."""

    state: State
    tensor: torch.Tensor | None
    writes: int | None  # how often the tensor was written, as far as PyTorch knows


def _held(layer_idx: int, layer: Any) -> list[_Held]:
    return [
        _Held((kind, layer_idx, number), tensor, None if tensor is None or tensor.is_inference() else tensor._version)
        for kind, states in (("conv", layer.conv_states), ("recurrent", layer.recurrent_states))
        for number, tensor in states.items()
    ]


def has_state(layer: Any) -> bool:
    """Whether a linear layer was ever updated."""
    return any(layer.has_previous_state.values()) or any(layer.is_recurrent_states_initialized.values())


class LinearStates(DynamicCache):
    """The part of a `TieredCache` by which models come to linear states. Not made by itself."""

    @seam.outside_graphs
    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        """Same as transformers'; MismatchError where the last forward broke off, as a state cannot go back."""
        self._watch_state(Touch("read", "conv", layer_idx, state_idx))
        return super().get_conv_state(layer_idx, state_idx)

    @seam.outside_graphs
    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        """Same as transformers'; refuses as `get_conv_state` does."""
        self._watch_state(Touch("read", "recurrent", layer_idx, state_idx))
        return super().get_recurrent_state(layer_idx, state_idx)

    @seam.outside_graphs
    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Same as transformers'; up to 5.23 it comes before a model reads a state, and refuses as `get_conv_state`."""
        if not _READS_ARE_TOLD and layer_idx is not None:
            self._watch_state(Touch("look", "any", layer_idx, state_idx or 0))
        return bool(super().has_previous_state(layer_idx, state_idx))

    @seam.outside_graphs
    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Any:
        """Same as transformers'; refuses as `get_conv_state` does."""
        self._watch_state(Touch("update", "conv", layer_idx, state_idx))
        updated = super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)
        self._told_of_state(("conv", layer_idx, state_idx))
        return updated

    @seam.outside_graphs
    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Any:
        """Same as transformers'; refuses as `get_conv_state` does."""
        self._watch_state(Touch("update", "recurrent", layer_idx, state_idx))
        updated = super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)
        self._told_of_state(("recurrent", layer_idx, state_idx))
        return updated

    @abc.abstractmethod
    def _watch_state(self, touch: Touch) -> None:
        """A model comes to a state; it may begin a forward."""

    @abc.abstractmethod
    def _told_of_state(self, state: State) -> None:
        """A state was updated through the cache."""
