"""The seam to transformers: the attention and mask functions named "tieredkv", and what differs between versions.

Registration is idempotent and happens when the cache is imported. Without a handle of ours the attention function
equals transformers' own SDPA, so a model may keep the name without a cache (use_cache=False, vision towers, encoders).

Imports: errors, attention, forwarding, layers, refusals, step; transformers.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from transformers import AttentionInterface, AttentionMaskInterface, cache_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from tieredkv.attention.call import LayerCall
from tieredkv.attention.lse import merge
from tieredkv.attention.masks import MaskSpec, TensorMask
from tieredkv.attention.plain import plain
from tieredkv.errors import HandleError, MismatchError, TieredKVError, TrainingModeError, UnsupportedModelError
from tieredkv.hf import refusals
from tieredkv.hf.layers import Handle, unguarded

if TYPE_CHECKING:
    from tieredkv.hf.forwarding import Forwarding
    from tieredkv.hf.step import StepCache

NAME = "tieredkv"
"""The attention implementation: `model.set_attn_implementation("tieredkv")`."""

F = TypeVar("F", bound=Callable[..., Any])


def outside_graphs(function: F) -> F:
    """Keep a function out of a user's `torch.compile`: it plans on the host and changes state.

    What `torch.compiler.disable` does, without a wrapper, which would take 9 µs at each call, twice a layer.
    """
    function.__dict__["_torchdynamo_disable"] = True  # not traced into
    # Nor, where a graph broke before it, traced as a frame of its own; nor what it calls.
    code = cast(FunctionType, function).__code__
    set_code_exec_strategy(code, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return function


HARMLESS = frozenset(
    {
        "position_ids",
        "cache_position",
        "sliding_window",
        "is_causal",
        "softcap",
        "s_aux",
        "output_attentions",
        "use_cache",
        "dropout",
        "scaling",
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "max_length_q",
        "max_length_k",
        "target_dtype",
        "deterministic",
        "position_embeddings",
        "labels",
        "num_items_in_batch",
    }
)
"""Keywords whose tensors say nothing that attention over blocks does not know already."""


FOREIGN = ("block_indices", "indices", "sinks")
"""Keywords that change the result and that neither SDPA nor ours knows: the keys that sparse attention chose, where the
model makes no mask of them, and sinks that depend on the query."""


@outside_graphs
def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over the blocks of a `TieredCache`, or SDPA where the key comes from elsewhere.

    Args:
        module: the attention module.
        query: [rows, heads, q, k_dim].
        key: [rows, kv_heads, k, k_dim], as `update` returned it.
        value: [rows, kv_heads, k, v_dim].
        attention_mask: a `MaskSpec`, a 4-D tensor, or None.
        scaling: factor on the scores; 1/sqrt(k_dim) when None.
        dropout: refused unless 0 when a cache is attended.
        kwargs: `softcap` and `s_aux` (sinks) are served; others as transformers passes them.

    Returns:
        ([rows, q, heads, v_dim], None).
    """
    handle = Handle.of(key, value)
    if handle is None:
        return plain_attention(module, query, key, value, attention_mask, scaling, dropout, kwargs), None
    cache = handle.cache()
    if cache is None:
        if not handle.full:
            raise refusals.not_attended("A layer")
        return plain_attention(module, query, key, value, attention_mask, scaling, dropout, kwargs), None
    mask = TensorMask(attention_mask) if isinstance(attention_mask, torch.Tensor) else attention_mask
    handle.claimed, handle.config = True, getattr(module, "config", None)
    try:
        over_blocks = _may_serve(cache, handle, module, query, mask, dropout, kwargs)
    except TieredKVError as error:
        handle.refuse(error)
    key, value = unguarded(key), unguarded(value)
    if not over_blocks:
        return plain_attention(module, query, key, value, attention_mask, scaling, dropout, kwargs), None
    call = LayerCall(
        layer=handle.layer,
        query=query,
        key=key,
        value=value,
        scale=1.0 / math.sqrt(query.shape[-1]) if scaling is None else float(scaling),
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
        mask=mask,
    )
    return cache.attend(handle.plan, call).transpose(1, 2).contiguous(), None


def _may_serve(
    cache: Forwarding | StepCache,
    handle: Handle,
    module: torch.nn.Module,
    query: torch.Tensor,
    mask: Any,
    dropout: float,
    kwargs: dict[str, Any],
) -> bool:
    """Whether this call is to be served over blocks; its cache is told what was found out.

    Raises:
        HandleError: blocks cannot serve it, and nothing else can.
        MismatchError: another model, or a mask that is too short.
        TrainingModeError: dropout, or gradients.
    """
    if module.training and dropout > 0.0:
        raise TrainingModeError(
            "A TieredCache was used in training mode.", wanted="eval mode", got="dropout > 0", change="model.eval()"
        )
    _check_model(cache.model_config, handle.config)
    _check_mask(handle, mask)
    reason = _why_not_blocks(handle, module, query, mask, kwargs)
    if reason is not None and not handle.full:
        raise _changed(reason)
    given = mask.tensor if isinstance(mask, TensorMask) else None
    over_blocks = reason is None and not (handle.full and handle.plan.past)
    if over_blocks and torch.is_grad_enabled():
        for name, tensor in (("query", query), ("attention_mask", given), ("s_aux", kwargs.get("s_aux"))):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                raise refusals.gradients(f"{name}.requires_grad")
    cache.handle_arrived(handle, reason, given)
    return over_blocks


def _check_model(config: Any, theirs: Any) -> None:
    """Refuse a model of another depth than the cache's: its forwards would look as if they had broken off."""
    if theirs is config or theirs is None:
        return
    layers, wanted = getattr(theirs, "num_hidden_layers", None), getattr(config, "num_hidden_layers", None)
    if isinstance(layers, int) and isinstance(wanted, int) and layers != wanted:
        raise MismatchError(
            "A model of another depth than the one that the cache was made for.",
            wanted=f"{wanted} layers",
            got=f"{layers} layers",
            change="use one cache per model",
        )


def _check_mask(handle: Handle, mask: Any) -> None:
    """Refuse a mask that ends before the new tokens do: transformers would hide them from everything."""
    if isinstance(mask, MaskSpec) and mask.padding is not None and mask.padding.shape[-1] < handle.plan.total:
        raise MismatchError(
            "The attention mask is shorter than the cache with the new tokens.",
            wanted=f"{handle.plan.total} columns: {handle.plan.past} stored tokens and {handle.plan.new} new ones",
            got=f"{mask.padding.shape[-1]} columns",
            change="pass a mask for the whole text, or none where nothing is padded",
        )


def _changed(reason: str) -> HandleError:
    return HandleError(
        "Attention over blocks cannot serve a layer that it has served before.",
        wanted="the same attention as in the first forward",
        got=reason,
        change="reset the cache after changing the model, or use another attention implementation",
    )


def _why_not_blocks(
    handle: Handle, module: torch.nn.Module, query: torch.Tensor, mask: Any, kwargs: dict[str, Any]
) -> str | None:
    """The reason why this call cannot be served over blocks, or None."""
    if query.shape[2] != handle.plan.new or query.shape[0] != handle.plan.rows:
        return "queries and new keys differ in number (cross-attention)"
    causal = getattr(module, "is_causal", True) and kwargs.get("is_causal") is not False
    if mask is None and not causal:
        return "attention that is not causal"
    if mask is not None and not isinstance(mask, MaskSpec | TensorMask):
        return f"a mask of type {type(mask).__name__}"
    if isinstance(mask, MaskSpec) and (mask.q_length, mask.kv_length) != (handle.plan.new, handle.plan.total):
        return "a mask of another size than the cache"
    if isinstance(mask, TensorMask) and mask.kv_length < handle.plan.total:
        return "a mask that is shorter than the cache"
    for name, given in kwargs.items():
        if name not in HARMLESS and isinstance(given, torch.Tensor):
            return f"the keyword {name!r} (a bias that depends on positions, for example)"
    return None


def plain_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None,
    dropout: float,
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """Attention over whole K and V, [rows, q, heads, v_dim]: SDPA, or the plain formula for softcap and sinks.

    Raises:
        UnsupportedModelError: the model leaves work to its attention that ours would not do.
    """
    for name in FOREIGN:
        if isinstance(kwargs.get(name), torch.Tensor):
            raise UnsupportedModelError(
                f"The model leaves work to its attention implementation that {NAME!r} would not do.",
                wanted="one of the implementations that the model's class supports",
                got=f"{NAME!r}, and the keyword {name!r}",
                change='model.set_attn_implementation("sdpa") or "eager"; TieredCache then gathers',
            )
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    if softcap is None and sinks is None:
        mask = attention_mask.sdpa() if isinstance(attention_mask, MaskSpec) else attention_mask
        if mask is None and isinstance(attention_mask, MaskSpec) and not getattr(module, "is_causal", True):
            mask = attention_mask.materialise_bool()  # SDPA would look at the module, and see nothing to hide
        return sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)[0]
    bias = attention_mask.materialise_bool() if isinstance(attention_mask, MaskSpec) else attention_mask
    causal = attention_mask is None and query.shape[2] > 1 and getattr(module, "is_causal", True)
    scale = 1.0 / math.sqrt(query.shape[-1]) if scaling is None else float(scaling)
    partial = plain(query, key, value, scale=scale, causal=causal, bias=bias, softcap=softcap)
    return merge([partial], sinks=sinks, dtype=query.dtype).transpose(1, 2).contiguous()


@outside_graphs
def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> MaskSpec:
    """What transformers' mask builders call for "tieredkv": the mask's description instead of a tensor."""
    source = {
        "batch_size": batch_size,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": mask_function,
        "attention_mask": attention_mask,
        **kwargs,
    }
    return MaskSpec(
        batch=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=int(q_offset),
        kv_offset=int(kv_offset),
        mask_function=mask_function,
        padding=attention_mask,
        use_vmap=bool(kwargs.get("use_vmap", False)),
        dtype=kwargs.get("dtype", torch.float32),
        device=torch.device(kwargs.get("device", "cpu")),
        is_causal=mask_function is causal_mask_function,
        to_sdpa=lambda: sdpa_mask(**source),
    )


def register() -> None:
    """Make "tieredkv" known to transformers; calling it again changes nothing."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


def passes_kwargs_to_update() -> bool:
    """Whether models hand `update` the keywords that the attention function will get (transformers 5.24 and later)."""
    from transformers.models.llama import modeling_llama

    return "kwargs=kwargs" in inspect.getsource(modeling_llama.LlamaAttention.forward)


def is_placeholder(layer: Any) -> bool:
    """Whether a layer of transformers' cache holds nothing; before transformers 5.24 there is no such layer."""
    kind = getattr(cache_utils, "DummyLayer", None)
    return kind is not None and isinstance(layer, kind)


def implementation_of(config: Any) -> str | None:
    """The attention implementation a config names."""
    return getattr(config, "_attn_implementation", None)


register()
