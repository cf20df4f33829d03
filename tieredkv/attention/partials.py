"""Which partial serves: new tokens among themselves (`dense`), one row over a run of its past (`over_run`).

The choice depends on device, shapes and arguments alone, never on timing, so outputs are reproducible.

Imports: flash, flash_gpu, lse, plain; torch.
"""

from __future__ import annotations

import torch

from tieredkv.attention import flash, flash_gpu
from tieredkv.attention.lse import Partial, accumulator, merge_partials, nothing_seen
from tieredkv.attention.plain import plain


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    causal: bool,
    bias: torch.Tensor | None = None,
    softcap: float | None = None,
) -> Partial:
    """The new tokens among themselves, where they are.

    Args:
        q: `[rows, heads, q, k_dim]`.
        k: `[rows, kv_heads, q, k_dim]`, of q's dtype.
        v: `[rows, kv_heads, q, v_dim]`.
        scale: factor on q·k.
        causal: token i sees tokens up to i.
        bias: bool (True: seen) or additive, broadcasts to `[rows, heads, q, q]`; adds to `causal`.
        softcap: scores become `softcap * tanh(scores / softcap)`, before the bias.
    """
    queries = q.shape[2]
    if queries == 1 and softcap is None:
        return _single(q, k, v, scale, bias)
    if queries and flash_gpu.serves(q, k.shape[3], v.shape[3], softcap, bias):
        return flash_gpu.attend(q, k, v, scale, causal)
    if queries == 0 or not flash.serves(q, k.shape[3], v.shape[3], softcap):
        return plain(q, k, v, scale=scale, causal=causal, bias=bias, softcap=softcap)
    if bias is not None and causal:
        bias, causal = flash.additive(bias, q.dtype) + _causal_bias(queries, q.dtype), False
    return flash.attend(q, k, v, scale, causal, bias)


def over_run_parts(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    bias: torch.Tensor | None = None,
    softcap: float | None = None,
    splits: int | None = None,
) -> list[Partial]:
    """One row's queries over one run of its past keys, all of them visible unless a bias says otherwise.

    Returns as many partials as the keys were cut into; hand them to `merge` together with the others of the row,
    which is cheaper than merging them first.

    Args:
        q: `[1, heads, q, k_dim]`.
        k: `[kv_heads, tokens, k_dim]`, a view of a pool: tokens are contiguous, heads have any stride. Zero tokens
            are allowed and give a partial that saw nothing.
        v: `[kv_heads, tokens, v_dim]`, likewise.
        scale: factor on q·k.
        bias: bool (True: seen) or additive, `[1, 1 or heads, q, tokens]`.
        softcap: scores become `softcap * tanh(scores / softcap)`, before the bias.
        splits: into how many pieces to cut the keys of a single query; None decides by heads, tokens and threads.
    """
    queries, tokens = q.shape[2], k.shape[1]
    if tokens == 0 or queries == 0:
        return [nothing_seen(q, v.shape[2])]
    if flash_gpu.serves(q, k.shape[2], v.shape[2], softcap, bias):
        return [flash_gpu.attend_run(q, k, v, scale)]
    if not flash.serves(q, k.shape[2], v.shape[2], softcap):
        return [plain(q, k.unsqueeze(0), v.unsqueeze(0), scale=scale, bias=bias, softcap=softcap)]
    if bias is not None and queries > 1:  # packed, the bias would have to be copied for each head of the group
        return [flash.attend(q, k.unsqueeze(0), v.unsqueeze(0), scale, False, bias)]
    if splits is None:
        splits = flash.pieces_for(k.shape[0], queries, tokens, torch.get_num_threads())
    return flash.attend_run(q, k, v, scale, bias, max(1, min(splits, tokens)))


def over_run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    bias: torch.Tensor | None = None,
    softcap: float | None = None,
    splits: int | None = None,
) -> Partial:
    """`over_run_parts`, merged into one partial."""
    return merge_partials(over_run_parts(q, k, v, scale=scale, bias=bias, softcap=softcap, splits=splits))


def _single(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, bias: torch.Tensor | None) -> Partial:
    """One token that sees itself: its value is the output and its score the LSE."""
    rows, heads, _, k_dim = q.shape
    kv_heads, v_dim = k.shape[1], v.shape[3]
    group, dtype = heads // kv_heads, accumulator(q.dtype)
    scores = (q.reshape(rows, kv_heads, group, k_dim).to(dtype) * k).sum(-1) * scale  # [rows, kv_heads, group]
    lse = scores.view(rows, heads, 1)
    out = v.to(dtype).expand(rows, kv_heads, group, v_dim).reshape(rows, heads, 1, v_dim)
    if bias is None:
        return Partial(out, lse)
    lse = lse + flash.additive(bias, dtype)[..., 0]
    return Partial(out.masked_fill((lse == -torch.inf).unsqueeze(-1), 0.0), lse)


def _causal_bias(queries: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((queries, queries), -torch.inf, dtype=dtype).triu_(1)
