"""One layer's attention by the native kernel: one call over what is hot, warm or new, and one over each chunk.

A single new token in each row is read where it was written, in the hot pool; several new tokens are read where the
model made them, which is one more pool.

Imports: this package, device, plan, store.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tieredkv.attention import flash
from tieredkv.attention.call import LayerCall
from tieredkv.attention.lse import Partial, fold, unfolded
from tieredkv.attention.native import NativeKernels, NativePlan, NewTokens, Stretch
from tieredkv.device import Region
from tieredkv.plan import Chunk, ForwardPlan, Run
from tieredkv.store import BlockStore


class Placed(NamedTuple):
    """A plan's new tokens among the queries of a forward.

    Args:
        plan: of one or several rows.
        first: where its tokens begin among those of one row that holds several plans' tokens; rows of one token each
            follow one another there. None where the plan is the forward's own: its rows are the queries'.
    """

    plan: ForwardPlan
    first: int | None = None

    def rows_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The plan's own tokens, [rows, heads, new, dim], of [1, heads, tokens, dim] or of its own."""
        if self.first is None:
            return tensor
        mine = tensor.narrow(2, self.first, self.plan.rows * self.plan.new)
        return mine.transpose(0, 2) if self.plan.rows > 1 else mine


class _Kept(NamedTuple):
    """What serves every layer with the same heads, for as long as a forward lasts."""

    native: NativePlan
    reads_warm: bool
    reads_new: bool
    plan: ForwardPlan
    """Held, so that no other plan gets its id."""


class PoolAttention:
    """Attends the layers of one cache, or of a step of several, where their blocks lie.

    Args:
        store: where blocks are.
    """

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self._kernels = NativeKernels()
        self._forward: ForwardPlan | None = None
        self._plans: dict[tuple[int, int, int, str | int], _Kept] = {}
        self._follows = store.device.follows_accesses

    @property
    def reason(self) -> str | None:
        """Why the native kernel does not serve on this machine, or None."""
        return self._kernels.reason

    def serves(self, call: LayerCall, new: int) -> bool:
        """Whether the kernel takes the call, with at most `new` tokens of one plan and row: settings, shapes and the
        machine decide.
        """
        kernel, dims = self._store.settings.kernel, (call.key.shape[3], call.value.shape[3])
        if call.softcap is not None or kernel not in ("auto", "native"):
            return False
        if kernel == "auto" and flash.beats_native(call.query, *dims, new):
            return False
        if not call.query.dtype == call.key.dtype == call.value.dtype:  # it reads bytes
            return False
        return self._kernels.serves(call.query, *dims)

    def keep_for(self, forward: ForwardPlan) -> None:
        """A layer of this forward is attended: what was worked out for it serves, and for any other no more."""
        if self._forward is not forward:
            self._forward = forward
            self._plans.clear()

    def partials(self, plan: ForwardPlan, call: LayerCall, starts: Sequence[int]) -> list[Partial]:
        """Partials of all rows: one over what is attended where it lies, and one over each chunk."""
        partials = []
        if plan.hot_runs or plan.warm_runs or plan.new > 1:
            partials.append(self.in_place(plan, (Placed(plan),), call, starts))
        store = self._store
        ring, layers, announced = store.prefetcher, range(len(store.layers)), plan.ring or plan.chunks
        for index, chunk in enumerate(plan.chunks):
            # Rows that a chunk is not for cost one token nothing, and many tokens as much as the others.
            some = plan.new > 1 and len(chunk.rows) < plan.rows
            rows, query = (chunk.rows, call.query[list(chunk.rows)]) if some else (range(plan.rows), call.query)
            with ring.chunk(layers, announced, call.layer, plan.ring_first + index) as (k, v, buffer):
                kept = self._kept(plan, call, index) or self._keep_chunk(plan, call, index, rows, starts)
                work = functools.partial(self._kernels.attend, query, [(k, v)], kept.native, scale=call.scale)
                part = store.device.run(work, reads=[("stage", buffer)], name="attend chunk")
            if plan.new == 1:
                partials.append(part)
            else:  # one by one: partials of many tokens are large
                partials[0] = _folded(partials[0], part, rows)
        if plan.new > 1:
            return unfolded(partials)
        return partials

    def in_place(
        self, forward: ForwardPlan, parts: Sequence[Placed], call: LayerCall, starts: Sequence[int]
    ) -> Partial:
        """One call over everything of these plans but their chunks.

        Args:
            forward: the plan of the whole forward.
            parts: its plans, which cover every query.
            call: the layer's; its queries are those of all plans.
            starts: for each row of each plan, one plan after the other, the first token that is seen.
        """
        store = self._store
        kept = self._kept(forward, call, "pools") or self._keep_parts(forward, parts, call, starts)
        pools = [store.flat_pools(call.layer)]
        if kept.reads_warm:
            pools.append(store.warm_run(call.layer, 0))
        if kept.reads_new:
            pools += zip(call.key.contiguous(), call.value.contiguous(), strict=True)
        if not self._follows:
            return self._kernels.attend(call.query, pools, kept.native, scale=call.scale)
        work = functools.partial(self._kernels.attend, call.query, pools, kept.native, scale=call.scale)
        reads: list[Region] = []
        for plan, _ in parts:
            reads += [("hot", block.hot) for run in plan.hot_runs for block in run.blocks if block.hot is not None]
            reads += [("warm", block.warm) for run in plan.warm_runs for block in run.blocks if block.warm is not None]
        return store.device.run(work, reads=reads, name="attend pools")

    # ---- made once per forward, for every layer with the same heads

    def _kept(self, plan: ForwardPlan, call: LayerCall, place: str | int) -> _Kept | None:
        return self._plans.get((id(plan), call.key.shape[1], call.query.shape[1], place))

    def _keep(
        self,
        plan: ForwardPlan,
        call: LayerCall,
        place: str | int,
        rows: Sequence[NewTokens],
        *,
        warm: bool,
        new: bool,
    ) -> _Kept:
        kv_heads, heads = call.key.shape[1], call.query.shape[1]
        native = NativePlan(
            rows,
            new=call.query.shape[2],
            kv_heads=kv_heads,
            group=heads // kv_heads,
            threads=torch.get_num_threads(),
            causal=new,
        )
        kept = self._plans[(id(plan), kv_heads, heads, place)] = _Kept(native, warm, new, plan)
        return kept

    def _keep_parts(
        self, forward: ForwardPlan, parts: Sequence[Placed], call: LayerCall, starts: Sequence[int]
    ) -> _Kept:
        warm, new = any(plan.warm_runs for plan, _ in parts), any(plan.new > 1 for plan, _ in parts)
        rows, first = list[NewTokens](), 0
        for part in parts:
            rows += _rows(part, starts[first : first + part.plan.rows], 1 + warm)
            first += part.plan.rows
        return self._keep(forward, call, "pools", rows, warm=warm, new=new)

    def _keep_chunk(
        self, plan: ForwardPlan, call: LayerCall, index: int, rows: Sequence[int], starts: Sequence[int]
    ) -> _Kept:
        """For a chunk and queries of these rows."""
        stretches: list[list[Stretch]] = [[] for _ in range(plan.rows)]
        _add(stretches, 0, plan.chunks[index], 0, starts)
        tokens = [NewTokens(place, 0, plan.new, stretches[row]) for place, row in enumerate(rows)]
        return self._keep(plan, call, index, tokens, warm=False, new=False)


def _rows(part: Placed, starts: Sequence[int], fresh: int) -> list[NewTokens]:
    """A part's new tokens with the keys they see; new keys are read in the pools from `fresh` on."""
    plan, found = part.plan, []
    rows: list[list[Stretch]] = [[] for _ in range(plan.rows)]
    for pool, runs in ((0, plan.hot_runs), (1, plan.warm_runs)):
        for run in runs:
            _add(rows, pool, run, run.start, starts)
    for row, stretches in enumerate(rows):
        here, first = (row, 0) if part.first is None else (0, part.first + row * plan.new)
        if plan.new > 1:
            hidden = max(starts[row] - plan.past, 0)  # padding
            if hidden < plan.new:
                stretches.append((fresh + here, first + hidden, plan.new - hidden))
        found.append(NewTokens(here, first, plan.new, stretches))
    return found


def _folded(whole: Partial, part: Partial, rows: Sequence[int]) -> Partial:
    """Both in one, of which the second is of some rows."""
    if len(rows) == whole.out.shape[0]:
        return fold(whole, part)
    index, lse = list(rows), whole.lse.to(torch.float64)
    mine = fold(Partial(whole.out[index], lse[index]), part)
    whole.out[index], lse[index] = mine
    return Partial(whole.out, lse)


def _add(rows: list[list[Stretch]], pool: int, piece: Run | Chunk, start: int, starts: Sequence[int]) -> None:
    """A piece that lies from `start` on in a pool, for each of its rows without what the row does not see."""
    for row in piece.rows:
        skip = max(starts[row] - piece.position, 0)
        if skip < piece.tokens:
            rows[row].append((pool, start + skip, piece.tokens - skip))
