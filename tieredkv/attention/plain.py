"""The plain partial: matmul, softmax and matmul, on any device, in any dtype, for any K and V dims.

Serves where no kernel does: softcap, K dim unlike V dim, devices without the flash op. Scores are computed in fp32
and held for one stretch of keys at a time, so memory is bounded however long K is.

Imports: lse; torch.
"""

from __future__ import annotations

import torch

from tieredkv.attention.lse import Partial, accumulator, merge_partials, nothing_seen

SCORES_PER_CHUNK = 1 << 23
"""How many scores are held at once (32 MiB in fp32)."""
SHORTEST_CHUNK = 64
"""Keys per chunk at least, however many queries there are."""


def plain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    causal: bool = False,
    bias: torch.Tensor | None = None,
    softcap: float | None = None,
) -> Partial:
    """Attention of q over all of k and v.

    Args:
        q: `[rows, heads, q, k_dim]`.
        k: `[rows, kv_heads, tokens, k_dim]`, any strides; zero tokens are allowed.
        v: `[rows, kv_heads, tokens, v_dim]`.
        scale: factor on q·k.
        causal: query i sees keys up to i (with q and k of one length).
        bias: bool (True: seen) or additive, broadcasts to `[rows, heads, q, tokens]`.
        softcap: scores become `softcap * tanh(scores / softcap)`, before the bias.
    """
    rows, heads, queries, _ = q.shape
    tokens = k.shape[2]
    if tokens == 0:
        return nothing_seen(q, v.shape[3])
    chunk = max(SHORTEST_CHUNK, SCORES_PER_CHUNK // (rows * heads * queries))
    merged: Partial | None = None
    for start in range(0, tokens, chunk):
        stop = min(start + chunk, tokens)
        # A bias may be one column wide where it broadcasts over the keys.
        part = bias if bias is None or bias.shape[3] == 1 else bias[..., start:stop]
        seen = _causal(queries, start, stop, q.device) if causal else None
        partial = _chunk(q, k[:, :, start:stop], v[:, :, start:stop], scale, seen, part, softcap)
        merged = partial if merged is None else merge_partials((merged, partial))
    return merged if merged is not None else nothing_seen(q, v.shape[3])


def _causal(queries: int, start: int, stop: int, device: torch.device) -> torch.Tensor:
    """Bool `[1, 1, q, stop - start]`: which of the keys from `start` each query sees."""
    keys = torch.arange(start, stop, device=device)
    return (keys <= torch.arange(queries, device=device).unsqueeze(1))[None, None]


def _chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    seen: torch.Tensor | None,
    bias: torch.Tensor | None,
    softcap: float | None,
) -> Partial:
    rows, heads, queries, k_dim = q.shape
    kv_heads, tokens, v_dim = v.shape[1:]
    group = heads // kv_heads
    dtype = accumulator(q.dtype)
    packed = (q.to(dtype) * scale).reshape(rows, kv_heads, group * queries, k_dim)
    scores = (packed @ k.to(dtype).transpose(2, 3)).view(rows, heads, queries, tokens)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    for mask in (seen, bias):
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -torch.inf)
        elif mask is not None:
            scores = scores + mask
    # The clamp keeps exp from -inf - -inf where a query sees nothing: its weights become 0, its lse -inf.
    top = scores.amax(-1, keepdim=True).clamp_min(torch.finfo(dtype).min)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)  # [rows, heads, q, 1]
    out = (weights.view(rows, kv_heads, group * queries, tokens) @ v.to(dtype)).view(rows, heads, queries, v_dim)
    return Partial(out / total.clamp_min(torch.finfo(dtype).tiny), (top + torch.log(total)).squeeze(-1))
