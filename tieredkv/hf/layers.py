"""What transformers sees as one layer of the cache: a view of a tiered layer, and the handle it passes to attention.

Imports: errors, plan, forwarding, refusals, step; transformers' cache layers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch._guards import TracingContext
from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin

from tieredkv.errors import TieredKVError
from tieredkv.hf import refusals
from tieredkv.plan import ForwardPlan

if TYPE_CHECKING:
    from tieredkv.hf.forwarding import Forwarding
    from tieredkv.hf.step import StepCache

HANDLE = "_tieredkv_handle"
"""Name of the attribute by which K and V carry their handle from `update` to the attention function."""


class Handle:
    """Says which layer of which cache K and V belong to.

    It travels on the tensors themselves, so that it arrives exactly when the model passes both on untouched.

    Args:
        cache: weak reference to the cache, or to the step of several.
        layer: tiered layer.
        plan: the forward.
        full: the tensors are all of the layer's K and V, so that any attention is right over them.
    """

    __slots__ = ("cache", "claimed", "config", "full", "layer", "mask", "plan")

    def __init__(
        self, cache: weakref.ref[Forwarding] | weakref.ref[StepCache], layer: int, plan: ForwardPlan, full: bool
    ) -> None:
        self.cache, self.layer, self.plan, self.full = cache, layer, plan, full
        self.claimed = False
        self.mask: torch.Tensor | None = None  # what attention was given, where it was a tensor already
        self.config: Any = None  # of the module that called attention

    def attach(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Send the handle with both tensors. They hold the handle, and it holds neither of them."""
        setattr(key, HANDLE, self)
        setattr(value, HANDLE, self)

    @staticmethod
    def of(key: torch.Tensor, value: torch.Tensor) -> Handle | None:
        """The handle that both tensors carry, or None when either was made anew on the way."""
        handle = getattr(key, HANDLE, None)
        return handle if isinstance(handle, Handle) and getattr(value, HANDLE, None) is handle else None

    def refuse(self, error: TieredKVError) -> NoReturn:
        """Raise an error of this layer's attention; of its forward nothing stays, so that it can be fed again."""
        take_back: Callable[[TieredKVError], NoReturn] | None = getattr(self.cache(), "refuse", None)
        if take_back is not None:  # a step of several caches is abandoned by who began it
            take_back(error)
        raise error


class NewTokens(torch.Tensor):
    """K or V of the new tokens alone, on their way to attention over blocks. Any other use of the values is an error.

    Another attention would take them for all there is, and after a model's last layer nothing comes that could notice.
    """

    @classmethod
    def of(cls, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory, guarded. Tensors of other classes stay as they are: a guard would take their class away."""
        return tensor.as_subclass(cls) if type(tensor) is torch.Tensor else tensor

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """What says nothing of the values is allowed, and what gives back the same tensor."""
        if TracingContext.try_get() is not None:  # a compiler asks what kind of tensor it is
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name == "__get__" or name in _UNSEEING:
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **(kwargs or {}))
            if result is args[0] or not isinstance(result, torch.Tensor):
                return result
        error = refusals.not_attended("A layer")
        for tensor in _guarded(args, kwargs):
            handle = getattr(tensor, HANDLE, None)
            if isinstance(handle, Handle):
                handle.refuse(error)
        raise error


_UNSEEING = frozenset(
    {"contiguous", "dim", "element_size", "get_device", "is_complex", "is_contiguous", "is_floating_point", "nelement"}
    | {"numel", "size", "stride", "to", "type_as"}
)


def unguarded(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that came to the attention it was meant for."""
    if type(tensor) is NewTokens:
        # Half the time of another view. mypy takes it for a variable of the narrower type.
        tensor.__class__ = torch.Tensor  # type: ignore[assignment]
    return tensor


def _guarded(*values: Any) -> Iterator[NewTokens]:
    for value in values:
        if isinstance(value, NewTokens):
            yield value
        elif isinstance(value, list | tuple):
            yield from _guarded(*value)
        elif isinstance(value, dict):
            yield from _guarded(*value.values())


class TieredLayer(DynamicLayer):
    """One full-attention layer of a `TieredCache`; its data lives in the cache's store.

    `keys` and `values` gather the whole layer, [rows, kv_heads, tokens, dim], each time they are read.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False

    def __init__(self, cache: Forwarding, layer_idx: int) -> None:
        self._cache = weakref.ref(cache)
        self.layer_idx = layer_idx
        DynamicLayer.__init__(self)

    @property
    def cache(self) -> Forwarding:
        """The cache that owns the layer."""
        cache = self._cache()
        if cache is None:
            raise ReferenceError("the cache of this layer is gone")
        return cache

    @property
    def keys(self) -> torch.Tensor | None:
        """All keys, or None while there are none."""
        pair = self.cache.gather_layer(self.layer_idx)
        return None if pair is None else pair[0]

    @keys.setter
    def keys(self, value: torch.Tensor | None) -> None:
        self._refuse(value)

    @property
    def values(self) -> torch.Tensor | None:
        """All values, or None while there are none."""
        pair = self.cache.gather_layer(self.layer_idx)
        return None if pair is None else pair[1]

    @values.setter
    def values(self, value: torch.Tensor | None) -> None:
        self._refuse(value)

    @property
    def is_initialized(self) -> bool:
        """Whether the layer has been updated since it was made or reset."""
        return self.cache.get_seq_length(self.layer_idx) > 0

    @is_initialized.setter
    def is_initialized(self, value: bool) -> None:
        if value:
            self._refuse(value)

    @staticmethod
    def _refuse(value: object) -> None:
        """transformers' base class sets None at construction; anything else would be lost silently."""
        if value is not None:
            raise AttributeError("K and V of a TieredCache are written by `update` only")

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Same as `TieredCache.update` for this layer."""
        return self.cache.update(key_states, value_states, self.layer_idx, *args, **kwargs)

    def get_seq_length(self) -> int:
        """Tokens of each row in this layer."""
        return self.cache.get_seq_length(self.layer_idx)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(tokens that the next forward attends to, 0)."""
        return self.cache.get_mask_sizes(query_length, self.layer_idx)

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: layers of one cache are cropped together."""
        self._refuse_alone("crop")

    def reset(self) -> None:
        """Refused: layers of one cache are reset together."""
        self._refuse_alone("reset")

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Refused: layers of one cache are reordered together."""
        self._refuse_alone("reorder_cache")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refused: layers of one cache are repeated together."""
        self._refuse_alone("batch_repeat_interleave")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Refused: layers of one cache are selected together."""
        self._refuse_alone("batch_select_indices")

    def offload(self) -> None:
        """Nothing: the store places blocks."""

    def prefetch(self) -> None:
        """Nothing: the store places blocks."""

    def _refuse_alone(self, method: str) -> None:
        raise AttributeError(f"call {method} on the cache, not on one of its layers")


class TieredLayerBeside(TieredLayer):
    """A tiered layer that keeps more than K and V, as sparse attention keeps the keys of its indexer.

    Args:
        cache: the cache.
        layer_idx: layer of the model.
        beside: transformers' own layer, whose K and V stay empty: what models ask of it beyond those, it answers.
    """

    def __init__(self, cache: Forwarding, layer_idx: int, beside: Any) -> None:
        self.beside = beside
        super().__init__(cache, layer_idx)

    def __getattr__(self, name: str) -> Any:
        if name == "beside" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.beside, name)

    def __setattr__(self, name: str, value: Any) -> None:
        beside = self.__dict__.get("beside")
        if beside is not None and name in vars(beside) and not hasattr(type(self), name):
            setattr(beside, name, value)
        else:
            super().__setattr__(name, value)

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """Whether everything beside K and V can go back."""
        return bool(self.beside.is_croppable)


# The two bases disagree in transformers' own layers of both kinds too.
class TieredLinearLayer(TieredLayerBeside, LinearAttentionCacheLayerMixin):  # type: ignore[misc]
    """A layer with full attention and a linear state: K and V are tiered, the state stays on the device."""

    def update_conv_state(self, conv_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        """As transformers' layer does it."""
        updated: torch.Tensor = self.beside.update_conv_state(conv_states, state_idx, **kwargs)
        return updated

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        """As transformers' layer does it."""
        updated: torch.Tensor = self.beside.update_recurrent_state(recurrent_states, state_idx, **kwargs)
        return updated

    def activate_past_recording(self) -> None:
        """As transformers' layer does it."""
        self.beside.activate_past_recording()


def is_tierable(layer: Any) -> bool:
    """Whether a layer of transformers' cache keeps K and V of every token, as a plain full-attention layer does."""
    return isinstance(layer, DynamicLayer) and type(layer).update is DynamicLayer.update


def tiered_layer(cache: Forwarding, layer_idx: int, layer: Any) -> TieredLayer:
    """What takes the place of a layer of transformers' cache."""
    if type(layer) is DynamicLayer:
        return TieredLayer(cache, layer_idx)
    kind = TieredLinearLayer if isinstance(layer, LinearAttentionCacheLayerMixin) else TieredLayerBeside
    return kind(cache, layer_idx, layer)
