"""Partials from the CPU's flash operator, which returns the LSE and takes grouped heads and strided K and V.

What the operator does not do by itself, done here: zero keys end the process (callers keep them out); a query that
sees nothing has LSE 0; masks must be additive and in q's dtype; work is spread over (row, KV head, stretch of
queries), so a single query over few heads leaves cores idle unless its keys are cut into pieces.

Imports: lse; torch.
"""

from __future__ import annotations

import math

import torch

from tieredkv.attention.lse import Partial, accumulator

SHORTEST_PIECE = 512
"""Keys per piece at least: below, merging a piece costs more than the idle core it feeds."""

MATRIX_LEAST_TOKENS = 16
"""New tokens a row from which on the operator wins where the processor has instructions for whole matrices."""
_MATRICES = {torch.bfloat16: "amx_bf16", torch.float16: "amx_fp16"}

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def serves(q: torch.Tensor, k_dim: int, v_dim: int, softcap: float | None) -> bool:
    """Whether the operator can serve these inputs."""
    return q.device.type == "cpu" and k_dim == v_dim and softcap is None


def beats_native(q: torch.Tensor, k_dim: int, v_dim: int, new: int) -> bool:
    """Whether the operator is faster than the native kernel for so many new tokens a row.

    It multiplies matrices by the processor's instructions for whole ones (Intel's AMX), of the dtypes that those take,
    where the native kernel computes in fp32: 2 to 3 times as fast for many tokens (docs/decisions/0003).
    """
    if new < MATRIX_LEAST_TOKENS or not serves(q, k_dim, v_dim, None):
        return False
    return bool(torch.cpu.get_capabilities().get(_MATRICES.get(q.dtype, ""), False))


def additive(bias: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A bool bias (True: seen) as 0 and -inf in `dtype`; an additive one cast to it. Worth doing once per forward."""
    if bias.dtype != torch.bool:
        return bias.to(dtype)
    return torch.zeros(bias.shape, dtype=dtype, device=bias.device).masked_fill_(~bias, -torch.inf)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool, bias: torch.Tensor | None
) -> Partial:
    """q `[rows, heads, q, dim]` over k and v `[rows, kv_heads, tokens, dim]`, tokens > 0; causal or with a bias."""
    mask = None if bias is None else additive(bias, q.dtype)
    out, lse = _flash(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    if mask is not None:
        lse = _unseen_to_minus_inf(lse, mask)
    return Partial(out.to(accumulator(q.dtype)), lse)


def attend_run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, bias: torch.Tensor | None, pieces: int
) -> list[Partial]:
    """q `[1, heads, q, dim]` over one run k and v `[kv_heads, tokens, dim]`, tokens > 0, grouped heads packed.

    The keys are attended in `pieces` stretches side by side, and each gives a partial. A bias is `[1, 1 or heads, 1,
    tokens]`: it needs a single query.
    """
    _, heads, queries, dim = q.shape
    kv_heads, tokens, _ = k.shape
    group = heads // kv_heads
    packed = q.reshape(1, kv_heads, group * queries, dim)
    if pieces == 1 and bias is None:
        out, lse = _flash(packed, k.unsqueeze(0), v.unsqueeze(0), 0.0, False, scale=scale)
        return [Partial(out.to(accumulator(q.dtype)).view(1, heads, queries, dim), lse.reshape(1, heads, queries))]
    # All pieces have one length and one distance, so they are a view. Where the tokens do not divide, neighbours
    # overlap by a few keys, which the later one does not see: cheaper than a second call for a remainder.
    step = (tokens - -(-tokens // pieces)) // (pieces - 1) if pieces > 1 else tokens
    length = tokens - step * (pieces - 1)
    mask = _piece_mask(q, bias, (pieces, kv_heads, group, length), step)
    shape = (pieces, kv_heads, length, dim)
    k = k.as_strided(shape, (step * k.stride(1), *k.stride()))
    v = v.as_strided(shape, (step * v.stride(1), *v.stride()))
    if mask is None:
        out, lse = _flash(packed.expand(pieces, -1, -1, -1), k, v, 0.0, False, scale=scale)
    else:
        out, lse = _flash(packed.expand(pieces, -1, -1, -1), k, v, 0.0, False, attn_mask=mask, scale=scale)
    if bias is not None and mask is not None:
        lse = _unseen_to_minus_inf(lse, mask)
    outs = out.to(accumulator(q.dtype)).view(pieces, 1, heads, queries, dim).unbind()
    return [Partial(*both) for both in zip(outs, lse.reshape(pieces, 1, heads, queries).unbind(), strict=True)]


def pieces_for(kv_heads: int, queries: int, tokens: int, threads: int) -> int:
    """Into how many pieces to cut the keys of one row, so that all threads have the same work."""
    if queries > 1 or tokens < 2 * SHORTEST_PIECE:
        return 1
    return max(1, min(threads // math.gcd(kv_heads, threads), tokens // SHORTEST_PIECE))


def _piece_mask(
    q: torch.Tensor, bias: torch.Tensor | None, shape: tuple[int, int, int, int], step: int
) -> torch.Tensor | None:
    """The additive mask of the pieces, `[pieces, kv_heads or 1, group or 1, length]`: the bias, and what overlaps."""
    pieces, kv_heads, group, length = shape
    if bias is None:
        if length == step:
            return None
        mask = q.new_zeros((pieces, 1, 1, length))
    else:
        heads = (kv_heads, group) if bias.shape[1] > 1 else (1, 1)
        whole = additive(bias, q.dtype).view(*heads, bias.shape[3])
        mask = whole.unfold(2, length, step).permute(2, 0, 1, 3).contiguous()
    if length > step:
        mask[1:, :, :, : length - step].fill_(-torch.inf)
    return mask


def _unseen_to_minus_inf(lse: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The operator gives a query that sees nothing LSE 0; only where one is exactly 0 is the mask looked at."""
    suspicious = lse == 0
    if not bool(suspicious.any()):
        return lse
    return lse.masked_fill((mask == -torch.inf).all(-1) & suspicious, -torch.inf)
