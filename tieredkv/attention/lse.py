"""Partials: attention over some of the keys, and how several of them become attention over all.

A softmax over a union of key sets is the average of the softmaxes over each set, weighted by the exponential of each
set's log-sum-exp (LSE). Everything here is a handful of small tensor operations, since a decode step pays for each
of them in every layer.

Imports: torch only.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

LOGADDEXP_UP_TO = 8
"""Partials up to which a chain of logaddexp is cheaper than one logsumexp."""


class Partial(NamedTuple):
    """Attention over some of the keys, complete in itself.

    Args:
        out: `[rows, heads, q, v_dim]`, normalised over the keys it saw; fp32 (fp64 for fp64 inputs). A query that saw
            no key has 0.
        lse: `[rows, heads, q]`, natural logarithm of the sum of the exponentials of the scores, in out's dtype (fp64
            while partials are folded). A query that saw no key has -inf.
    """

    out: torch.Tensor
    lse: torch.Tensor


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which partials of this input dtype are kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def nothing_seen(q: torch.Tensor, v_dim: int) -> Partial:
    """The partial of zero keys for queries `[rows, heads, q, k_dim]`."""
    dtype = accumulator(q.dtype)
    out = q.new_zeros((*q.shape[:3], v_dim), dtype=dtype)
    return Partial(out, q.new_full(q.shape[:3], -torch.inf, dtype=dtype))


def merge_partials(partials: Sequence[Partial]) -> Partial:
    """One partial over the union of the keys, which must be disjoint; all partials have one shape."""
    return partials[0] if len(partials) == 1 else Partial(*_merge(partials))


def merge(partials: Sequence[Partial], *, sinks: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Attention over the union of the partials' keys, `[rows, heads, q, v_dim]` in `dtype`.

    Args:
        partials: at least one, over disjoint keys, all of one shape.
        sinks: `[heads]`, one more logit per head whose value is zero; None for models without.
        dtype: of the result; the merge itself runs in the partials' dtype.
    """
    if sinks is not None:
        merged = merge_partials(partials)
        lse = merged.lse.clamp_min(torch.finfo(merged.lse.dtype).min)  # -inf - -inf is NaN, and so is 0 times it
        share = torch.sigmoid(lse - sinks.to(lse.dtype).unsqueeze(-1))
        return (merged.out * share.unsqueeze(-1)).to(dtype)
    out = partials[0].out if len(partials) == 1 else _merge(partials)[0]
    return out if out.dtype == dtype else out.to(dtype)  # `to` takes 2 µs to see that there is nothing to do


def _merge(partials: Sequence[Partial]) -> tuple[torch.Tensor, torch.Tensor]:
    # Small operations only: softmax would wake all threads, stack costs twice as much as cat and view, and
    # logsumexp three times as much as logaddexp.
    out, lse = partials[0]
    outs = torch.cat([partial.out for partial in partials]).view(len(partials), *out.shape)
    lses = torch.cat([partial.lse for partial in partials]).view(len(partials), *lse.shape)
    if len(partials) <= LOGADDEXP_UP_TO:
        total = functools.reduce(torch.logaddexp, [partial.lse for partial in partials])
    else:
        total = torch.logsumexp(lses, dim=0)
    # The clamp keeps exp from -inf - -inf where no partial saw a key: all weights are 0 there, as is the result.
    weights = torch.exp(lses - total.clamp_min(torch.finfo(lse.dtype).min))
    return (outs * weights.unsqueeze(-1)).sum(0), total


def fold(whole: Partial, part: Partial) -> Partial:
    """Both in one; for partials that are too large to be kept side by side until they are merged.

    Args:
        whole: of earlier folds; its out is overwritten. Its lse is kept in fp64: what rounding to fp32 loses of a large
            one at each fold would add up.
        part: over other keys, of the same shape.
    """
    low = part.lse.to(torch.float64)
    total = torch.logaddexp(whole.lse.to(torch.float64), low)
    finite = total.clamp_min(torch.finfo(total.dtype).min)  # as in _merge
    keep, share = (torch.exp(lse - finite).to(part.out.dtype).unsqueeze(-1) for lse in (whole.lse, low))
    return Partial(whole.out.mul_(keep).add_(part.out * share), total)


def unfolded(partials: Sequence[Partial]) -> list[Partial]:
    """What was folded, with an LSE of out's dtype again."""
    return [Partial(out, lse.to(out.dtype)) for out, lse in partials]


def cat_rows(partials: Sequence[Partial]) -> Partial:
    """The partials of several rows as one partial over all these rows, in order."""
    if len(partials) == 1:
        return partials[0]
    return Partial(torch.cat([partial.out for partial in partials]), torch.cat([partial.lse for partial in partials]))
