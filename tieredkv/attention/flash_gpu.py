"""Partials from the flash operator of an NVIDIA GPU: fp16 and bf16, causal or all of the keys, LSE in fp32.

What the operator does not take, and `plain` then serves: a mask, fp32, a softcap, dims that are no multiple of 8 or
above 256, unlike dims of K and V. Over a run of past keys the heads of a group are packed as queries of one KV head, so
that keys are read once.

Imports: device, lse; torch.
"""

from __future__ import annotations

import torch

from tieredkv.attention.lse import Partial
from tieredkv.device import has_flash

LARGEST_DIM = 256

_flash = torch.ops.aten._scaled_dot_product_flash_attention


def serves(q: torch.Tensor, k_dim: int, v_dim: int, softcap: float | None, bias: torch.Tensor | None) -> bool:
    """Whether the operator can serve these inputs."""
    if q.device.type != "cuda" or q.dtype not in (torch.float16, torch.bfloat16) or bias is not None:
        return False
    return k_dim == v_dim <= LARGEST_DIM and not k_dim % 8 and softcap is None and has_flash(q.device)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool) -> Partial:
    """q `[rows, heads, q, dim]` over k and v `[rows, kv_heads, tokens, dim]`; tokens > 0, and equal to q if causal."""
    out, lse = _flash(*(_dense_dim(x) for x in (q, k, v)), 0.0, causal, False, scale=scale)[:2]
    return Partial(out.to(torch.float32, memory_format=torch.contiguous_format), lse)


def attend_run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> Partial:
    """q `[1, heads, q, dim]` over one run k and v `[kv_heads, tokens, dim]`, tokens > 0."""
    _, heads, queries, dim = q.shape
    packed = q.reshape(1, k.shape[0], -1, dim)  # [1, kv_heads, group * q, dim]
    out, lse = attend(packed, k.unsqueeze(0), v.unsqueeze(0), scale, False)
    return Partial(out.view(1, heads, queries, dim), lse.reshape(1, heads, queries))


def _dense_dim(x: torch.Tensor) -> torch.Tensor:
    """The operator takes any strides but in the last dimension."""
    return x if x.stride(-1) == 1 else x.contiguous()
