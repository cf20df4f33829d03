"""What attention over blocks means: an eager page, the specification that all fast attention is tested against.

Slow on purpose and in the dtype of its inputs (give it float64). Never imported by fast code.

Imports: torch only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

KeyValue = tuple[torch.Tensor, torch.Tensor]
"""K and V of one block or stretch of tokens: `[kv_heads, tokens, k_dim]` and `[kv_heads, tokens, v_dim]`."""


def attend(
    q: torch.Tensor,
    blocks: Sequence[Sequence[KeyValue]],
    *,
    scale: float,
    mask: Sequence[torch.Tensor | None] | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each row's queries over the row's blocks, in order.

    Args:
        q: `[rows, heads, queries, k_dim]`; query head h reads KV head `h // (heads // kv_heads)`.
        blocks: for each row its blocks, at least one; a block may hold zero tokens.
        scale: factor on q·k.
        mask: for each row a bool tensor that broadcasts to `[heads, queries, tokens]`, True where a key is seen;
            None for a row (or for all) hides nothing.
        softcap: scores become `softcap * tanh(scores / softcap)`, before the mask.
        sinks: `[heads]`, one more logit per head whose value is zero.

    Returns:
        out `[rows, heads, queries, v_dim]` and lse `[rows, heads, queries]`, the natural logarithm of the sum of
        the exponentials of all scores and the sink. A query that sees nothing has out 0 and lse -inf.
    """
    outs, lses = [], []
    for row, row_blocks in enumerate(blocks):
        out, lse = _attend_row(q[row], row_blocks, scale, mask[row] if mask is not None else None, softcap, sinks)
        outs.append(out)
        lses.append(lse)
    return torch.stack(outs), torch.stack(lses)


def _attend_row(
    q: torch.Tensor,
    blocks: Sequence[KeyValue],
    scale: float,
    mask: torch.Tensor | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    heads, queries, _ = q.shape
    k = torch.cat([block[0] for block in blocks], dim=1)  # [kv_heads, tokens, k_dim]
    v = torch.cat([block[1] for block in blocks], dim=1)  # [kv_heads, tokens, v_dim]
    group = heads // k.shape[0]
    k, v = k.repeat_interleave(group, dim=0), v.repeat_interleave(group, dim=0)
    scores = scale * (q @ k.transpose(1, 2))  # [heads, queries, tokens]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    logits = scores if sinks is None else torch.cat([scores, sinks[:, None, None].expand(heads, queries, 1)], dim=-1)
    lse = torch.logsumexp(logits, dim=-1)
    weights = torch.exp(scores - lse.unsqueeze(-1)).nan_to_num(nan=0.0)  # -inf - -inf: a query that sees nothing
    return weights @ v, lse
