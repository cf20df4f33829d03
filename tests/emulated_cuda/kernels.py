"""What kernels of a GPU compute that a CPU has none of: the flash operator, and compiled FlexAttention.

Imports: torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask

FLASH = torch.ops.aten._scaled_dot_product_flash_attention.default


def flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout: float = 0.0,
    causal: bool = False,
    debug: bool = False,
    *,
    scale: float,
) -> tuple[Any, ...]:
    """The flash operator: what it refuses, the strides of what it returns, its LSE in fp32, and what dropout needs."""
    rows, heads, queries, dim = q.shape
    fits = q.dtype in (torch.float16, torch.bfloat16) and q.dtype == k.dtype == v.dtype and k.shape == v.shape
    if not fits or dim % 8 or dim > 256 or any(x.stride(-1) != 1 for x in (q, k, v)) or not k.shape[2]:
        raise RuntimeError("No available kernel: the flash operator takes no such tensors")
    group = heads // k.shape[1]
    k, v = (x.repeat_interleave(group, 1).float() for x in (k, v))
    scores = q.float() @ k.transpose(2, 3) * scale
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    out = (torch.softmax(scores, -1) @ v).to(q.dtype)
    packed = torch.empty((rows, queries, heads, dim), dtype=q.dtype, device=q.device).transpose(1, 2).copy_(out)
    nothing = torch.empty(0, device=q.device)
    return packed, torch.logsumexp(scores, -1), nothing, nothing, queries, queries, nothing, nothing, nothing


def histc(x: torch.Tensor, *bins: Any) -> torch.Tensor:
    """Of whole numbers too, which a CPU does not count; experts are counted with it."""
    return torch.histc(x.float(), *bins).to(x.dtype)


def flex(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: BlockMask, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """What compiled FlexAttention computes of a block mask without full blocks, as operations of the GPU.

    q [rows, 1, queries, dim]; k and v [1, 1, tokens, dim], of which only blocks that are listed are read.
    """
    device, size = q.device, mask.BLOCK_SIZE[1]
    tokens = torch.arange(k.shape[2], device=device)
    counts, lists = mask.kv_num_blocks[:, 0, 0], mask.kv_indices[:, 0, 0]  # [rows], [rows, tiles]
    entries = torch.arange(lists.shape[1], device=device)
    in_use = (entries < counts[:, None])[:, :, None]
    listed = ((lists[:, :, None] == entries) & in_use).any(1)[:, tokens // size]  # [rows, tokens]
    rows, queries = torch.arange(q.shape[0], device=device), torch.arange(q.shape[2], device=device)
    seen = listed[:, None] & mask.mask_mod(rows[:, None, None], rows * 0, queries[None, :, None], tokens[None, None])
    k, v = (torch.where(listed[:, :, None], x[0].float(), 0.0) for x in (k, v))
    scores = (q[:, 0].float() @ k.transpose(1, 2) * scale).masked_fill(~seen, -torch.inf)
    out = torch.softmax(scores, -1).nan_to_num(0.0) @ v
    return out.to(q.dtype)[:, None], torch.logsumexp(scores, -1)[:, None]


def compiled_flex(
    number: int, options: object, lse: bool, count: Callable[[], None]
) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    """In the place of `tieredkv.attention.kernels._compile`: a kernel as it is called."""
    count()

    def attend(*args: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        out, sums = flex(*args)
        return out, sums if lse else None

    return attend
