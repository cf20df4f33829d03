"""Several new tokens of which each sees another window (`beyond="drop"`): the mask, and the new tokens piece by piece.

A mask over all of them would be as large as the square of a prompt; a piece of queries needs its own window only.

Imports: this package, plan.
"""

from __future__ import annotations

import dataclasses

import torch

from tieredkv.attention.lse import Partial, merge_partials
from tieredkv.attention.masks import MaskSpec, TensorMask
from tieredkv.attention.partials import over_run
from tieredkv.plan import ForwardPlan, Visibility

PIECE = 256
"""Queries that are attended together."""


@dataclasses.dataclass(frozen=True, eq=False)
class WindowedMask:
    """A forward's mask, with what `visibility` hides.

    Args:
        inner: the model's mask; None for causal.
        visibility: which tokens each query sees.
        past: position of the first query.
        new: queries.
    """

    inner: MaskSpec | TensorMask | None
    visibility: Visibility
    past: int
    new: int
    is_causal = False

    def bias(self, kv_positions: torch.Tensor) -> torch.Tensor:
        """What the queries see of these positions: bool, or additive with -inf for what is hidden.

        [rows or 1, 1 or heads, new, kv].
        """
        return self.part(0, self.new, kv_positions)

    def part(self, first: int, last: int, kv_positions: torch.Tensor) -> torch.Tensor:
        """The same for the queries from `first` to before `last`."""
        queries = torch.arange(self.past + first, self.past + last, device=kv_positions.device)
        seen = self.visibility.seen(queries, kv_positions)
        if self.inner is None:
            return (seen & (kv_positions <= queries[:, None]))[None, None]
        if isinstance(self.inner, MaskSpec):
            return self.inner.visible(queries, kv_positions) & seen
        columns = self.inner.bias(kv_positions)[:, :, first:last]
        return columns & seen if columns.dtype == torch.bool else columns.masked_fill(~seen, -torch.inf)


def windowed(plan: ForwardPlan, mask: WindowedMask, row: int, pieces: Pieces) -> Partial:
    """One row's new tokens among themselves.

    Args:
        plan: the forward.
        mask: of the forward.
        row: of the batch.
        pieces: what is attended.
    """
    parts = []
    for first in range(0, plan.new, PIECE):
        last = min(first + PIECE, plan.new)
        partials = [
            pieces.over(mask, row, first, last, keys) for keys in _stretches(plan, mask.visibility, first, last)
        ]
        parts.append(merge_partials(partials))
    return Partial(torch.cat([part.out for part in parts], 2), torch.cat([part.lse for part in parts], 2))


def _stretches(plan: ForwardPlan, visibility: Visibility, first: int, last: int) -> list[slice]:
    """The new tokens that some of these queries see: sinks, and from the first query's window on."""
    hidden = visibility.hidden(plan.past + first)
    size = visibility.block_size
    start, stop = (min(max(block * size - plan.past, 0), last) for block in (hidden.start, hidden.stop))
    return [slice(0, last)] if start == stop else [slice(0, start), slice(stop, last)][start == 0 :]


@dataclasses.dataclass(frozen=True, eq=False)
class Pieces:
    """Queries, keys and values of a forward's new tokens, and how scores are made.

    Args:
        query: [rows, heads, new, k_dim].
        key: [rows, kv_heads, new, k_dim].
        value: [rows, kv_heads, new, v_dim].
        scale, softcap: as for `over_run`.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    softcap: float | None

    def over(self, mask: WindowedMask, row: int, first: int, last: int, keys: slice) -> Partial:
        """One row's queries from `first` to before `last` over some of the new keys."""
        positions = torch.arange(mask.past + keys.start, mask.past + keys.stop, device=self.query.device)
        bias = mask.part(first, last, positions)
        return over_run(
            self.query[row : row + 1, :, first:last],
            self.key[row, :, keys],
            self.value[row, :, keys],
            scale=self.scale,
            bias=bias[row : row + 1] if bias.shape[0] > 1 else bias,
            softcap=self.softcap,
        )
