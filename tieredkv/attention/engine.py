"""One layer's attention over a forward's plan: resident runs, streamed chunks and the new tokens, merged by LSE.

A single new token in each row is attended where it was written, inside the runs; several new tokens are attended where
the model made them, and the runs hold the past alone.

Imports: errors, device, plan, store, call, flex, lse, over_pools, partials, windowed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch

from tieredkv.attention.call import LayerCall
from tieredkv.attention.flex import FlexKernels, FlexTiles, TileRow, rows_bucket
from tieredkv.attention.lse import Partial, fold, merge, nothing_seen, unfolded
from tieredkv.attention.over_pools import Placed, PoolAttention
from tieredkv.attention.partials import dense, over_run
from tieredkv.attention.windowed import Pieces, WindowedMask, windowed
from tieredkv.device import Region
from tieredkv.errors import MismatchError
from tieredkv.plan import ForwardPlan, Run
from tieredkv.store import BlockStore

FLEX_LEAST_TOKENS = 4096
"""Below so many keys over all rows, a compiled kernel saves less than it costs to have."""
FLEX_LEAST_RUNS = 5
"""Up to so many runs, the flash op over each run is faster on a CPU than one flex call over all."""


class Engine:
    """Attends the layers of one cache, or of a step of several.

    Args:
        store: where blocks are.
        kernels: compiled kernels, with a bound on their number.

    Attributes:
        store: as given.
    """

    def __init__(self, store: BlockStore, kernels: FlexKernels) -> None:
        self.store, self._kernels = store, kernels
        self._tiles: dict[tuple[int, torch.device], FlexTiles] = {}
        self._tiles_of: tuple[int, int] | None = None
        self._native = PoolAttention(store)
        self._follows = store.device.follows_accesses

    @property
    def native_reason(self) -> str | None:
        """Why the native kernel does not serve on this machine, or None."""
        return self._native.reason

    def attend(self, plan: ForwardPlan, call: LayerCall) -> torch.Tensor:
        """Attention output [rows, heads, new, v_dim], in the query's dtype.

        Raises:
            ChecksumError, ColdTierError: a streamed block cannot be had.
        """
        self._native.keep_for(plan)
        return self._attend(plan, call)

    def _attend(self, plan: ForwardPlan, call: LayerCall) -> torch.Tensor:
        if plan.visibility is not None and not isinstance(call.mask, WindowedMask):
            call = dataclasses.replace(call, mask=WindowedMask(call.mask, plan.visibility, plan.past, plan.new))
        starts = call.starts(plan.rows)
        if starts is not None and self._native.serves(call, plan.new):
            partials = self._native.partials(plan, call, starts)
            return merge(partials, sinks=call.sinks, dtype=call.query.dtype)
        if starts is not None and self._wants_flex(plan, call, starts):
            return self._flex(plan, call, starts)
        by_row: list[list[Partial]] = [[] for _ in range(plan.rows)]
        if plan.hot_runs:
            k_flat, v_flat = self.store.flat_pools(call.layer)
            self._over_runs(plan, call, starts, plan.hot_runs, k_flat, v_flat, "hot", by_row)
        if plan.warm_runs:
            self._over_warm(plan, call, starts, by_row)
        if plan.chunks:
            self._over_chunks(plan, call, starts, by_row)
        if plan.new > 1:
            return self._with_new(plan, call, starts, by_row)
        return self._merged(call, by_row)

    def attend_parts(self, forward: ForwardPlan, parts: Sequence[Placed], call: LayerCall) -> torch.Tensor:
        """Attention output [1, heads, tokens, v_dim] of several plans' new tokens, which are causal in each.

        Args:
            forward: the plan of the whole forward, of one row.
            parts: its plans, in the order of their tokens.
            call: the layer's, of one row; its mask is not looked at.

        Raises:
            ChecksumError, ColdTierError: a streamed block cannot be had.
        """
        self._native.keep_for(forward)
        in_place = not forward.chunks and all(plan.visibility is None for plan, _ in parts)
        if in_place and self._native.serves(call, max(plan.new for plan, _ in parts)):
            partial = self._native.in_place(forward, parts, call, [0] * sum(plan.rows for plan, _ in parts))
            return merge([partial], sinks=call.sinks, dtype=call.query.dtype)
        outputs = []
        for part in parts:
            q, k, v = (part.rows_of(tensor) for tensor in (call.query, call.key, call.value))
            out = self._attend(part.plan, dataclasses.replace(call, query=q, key=k, value=v, mask=None))
            outputs.append(out.transpose(0, 2) if part.plan.rows > 1 else out)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)

    @staticmethod
    def _merged(call: LayerCall, parts: list[list[Partial]]) -> torch.Tensor:
        for index, row in enumerate(parts):
            if not row:  # nothing but padding
                row.append(nothing_seen(call.query[index : index + 1], call.value.shape[3]))
        rows = [merge(row, sinks=call.sinks, dtype=call.query.dtype) for row in parts]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    # ---- one compiled call over the pool

    def _wants_flex(self, plan: ForwardPlan, call: LayerCall, starts: Sequence[int]) -> bool:
        """Whether one flex call serves what is hot: shapes and settings decide, never the state of a compiler."""
        kernel, device = self.store.settings.kernel, call.query.device
        if plan.new != 1 or not plan.hot_runs or plan.warm_runs or kernel == "flash":
            return False
        if call.softcap is not None or any(start >= plan.total for start in starts):  # a row of nothing but padding
            return False
        if kernel != "flex" and device.type == "cpu":
            hot_tokens = sum(run.tokens * len(run.rows) for run in plan.hot_runs)
            if hot_tokens < FLEX_LEAST_TOKENS or len(plan.hot_runs) < FLEX_LEAST_RUNS:
                return False
        return not _is_merged(plan, call) or self._kernels.returns_lse(device)

    def _flex(self, plan: ForwardPlan, call: LayerCall, starts: Sequence[int]) -> torch.Tensor:
        k_pool, v_pool = self.store.hot.planes[call.layer]
        tiles, merged = self._tiles_for(plan, call, starts), _is_merged(plan, call)

        def work() -> tuple[torch.Tensor, torch.Tensor | None]:
            return tiles.attend(call.query, k_pool, v_pool, scale=call.scale, lse=merged)

        slots = {block.hot for run in plan.hot_runs for block in run.blocks} if self._follows else ()
        out, lse = self.store.device.run(work, reads=[("hot", slot) for slot in slots], name="flex")
        if not merged:
            return out
        if lse is None:
            raise MismatchError(
                "The kernel gave no LSE, with which what is hot is merged with the rest.",
                wanted="an LSE",
                got=f"none on {call.query.device}",
                change='CacheSettings(kernel="flash"), and report this',
            )
        hot = Partial(out.to(lse.dtype), lse)
        if not plan.chunks:
            return merge([hot], sinks=call.sinks, dtype=call.query.dtype)
        by_row = [[Partial(hot.out[row : row + 1], lse[row : row + 1])] for row in range(plan.rows)]
        self._over_chunks(plan, call, starts, by_row)
        return self._merged(call, by_row)

    def _tiles_for(self, plan: ForwardPlan, call: LayerCall, starts: Sequence[int]) -> FlexTiles:
        """The block lists for this layer's KV heads, made once per forward and used by every layer like it."""
        if self._tiles_of != (plan.number, id(plan)):
            self._tiles_of = (plan.number, id(plan))
            for tiles in self._tiles.values():
                tiles.stale = True
        kv_heads, device = call.key.shape[1], call.query.device
        found = self._tiles.get((kv_heads, device))
        if found is None or found.rows != rows_bucket(plan.rows):
            found = FlexTiles(
                self._kernels,
                kv_heads=kv_heads,
                pool_slots=self.store.hot.slots.total,
                rows=plan.rows,
                block_size=self.store.block_size,
                device=device,
            )
            self._tiles[(kv_heads, device)] = found
        if found.stale:
            found.update(_tile_rows(plan, starts, self.store.block_size))
            found.stale = False
        return found

    # ---- partials

    def _over_runs(
        self,
        plan: ForwardPlan,
        call: LayerCall,
        starts: Sequence[int] | None,
        runs: Sequence[Run],
        k_flat: torch.Tensor,
        v_flat: torch.Tensor,
        role: str,
        parts: list[list[Partial]],
    ) -> None:
        """Neighbouring slots of a pool [kv_heads, slots * block_size, dim]."""
        for run in runs:
            work = functools.partial(_add_slice, plan, call, starts, run, k_flat, v_flat, parts)
            if self._follows:
                slots = [getattr(block, role) for block in run.blocks]
                self.store.device.run(work, reads=[(role, slot) for slot in slots], name=f"attend {role}")
            else:
                work()

    def _over_warm(
        self, plan: ForwardPlan, call: LayerCall, starts: Sequence[int] | None, parts: list[list[Partial]]
    ) -> None:
        """Warm blocks where they are: the computing device addresses host memory."""
        for run in plan.warm_runs:
            views = self.store.warm_run(call.layer, run.start // self.store.block_size, len(run.blocks))
            k_flat, v_flat = (view.flatten(1, 2) for view in views)
            here = dataclasses.replace(run, start=0)
            self._over_runs(plan, call, starts, [here], k_flat, v_flat, "warm", parts)

    def _over_chunks(
        self, plan: ForwardPlan, call: LayerCall, starts: Sequence[int] | None, parts: list[list[Partial]]
    ) -> None:
        """Blocks that come through staging, a chunk at a time."""
        ring, layers, announced = self.store.prefetcher, range(len(self.store.layers)), plan.ring or plan.chunks
        for index, chunk in enumerate(plan.chunks):
            with ring.chunk(layers, announced, call.layer, plan.ring_first + index) as (k, v, buffer):
                region: list[Region] = [("stage", buffer)]

                work = functools.partial(_add_run, plan, call, starts, chunk.rows, chunk.position, k, v, parts)
                self.store.device.run(work, reads=region, name="attend chunk")
            if plan.new > 1:
                _fold_rows([parts[row] for row in chunk.rows])
        if plan.new > 1:
            for partials in parts:
                partials[:] = unfolded(partials)

    def _with_new(
        self, plan: ForwardPlan, call: LayerCall, starts: Sequence[int] | None, parts: list[list[Partial]]
    ) -> torch.Tensor:
        """Add the new tokens among themselves, where the model made them, and merge."""
        q, k, v = call.query, call.key, call.value
        if isinstance(call.mask, WindowedMask):
            pieces = Pieces(q, k, v, call.scale, call.softcap)
            for row, part in enumerate(parts):
                part.append(windowed(plan, call.mask, row, pieces))
            return self._merged(call, parts)
        firsts = [0] * plan.rows if starts is None else [max(start - plan.past, 0) for start in starts]
        bias = None
        if starts is None and call.mask is not None:
            positions = torch.arange(plan.past, plan.total, device=q.device)
            bias = call.mask.bias(positions)  # [rows or 1, 1 or heads, new, new]
        if not any(firsts):
            new = dense(q, k, v, scale=call.scale, causal=bias is None, bias=bias, softcap=call.softcap)
            if not any(parts):
                return merge([new], sinks=call.sinks, dtype=q.dtype)
            news = [Partial(new.out[r : r + 1], new.lse[r : r + 1]) for r in range(plan.rows)]
        else:
            news = [
                _dense_from(q[r : r + 1], k[r : r + 1], v[r : r + 1], first, call) for r, first in enumerate(firsts)
            ]
        rows = [merge([*row, new], sinks=call.sinks, dtype=q.dtype) for row, new in zip(parts, news, strict=True)]
        return rows[0] if len(rows) == 1 else torch.cat(rows)


def _is_merged(plan: ForwardPlan, call: LayerCall) -> bool:
    """Whether what is hot is not all that is attended."""
    return call.sinks is not None or bool(plan.chunks)


def _tile_rows(plan: ForwardPlan, starts: Sequence[int], block_size: int) -> list[TileRow]:
    """Each row's hot blocks as if nothing lay between them, which makes no difference to a token that sees them all."""
    slots: list[list[int]] = [[] for _ in starts]
    tokens, hidden = [0] * len(starts), [0] * len(starts)
    for run in sorted(plan.hot_runs, key=lambda run: run.position):
        first = run.start // block_size
        for row in run.rows:
            slots[row] += range(first, first + len(run.blocks))
            tokens[row] += run.tokens
            hidden[row] += min(max(starts[row] - run.position, 0), run.tokens)
    return [TileRow(*row) for row in zip(slots, tokens, hidden, strict=True)]


def _fold_rows(rows: Sequence[list[Partial]]) -> None:
    """One partial for each row, not one for each chunk: those of many tokens are large."""
    for row in rows:
        while len(row) > 1:
            row[0] = fold(row[0], row.pop())


def _add_slice(
    plan: ForwardPlan,
    call: LayerCall,
    starts: Sequence[int] | None,
    run: Run,
    k_flat: torch.Tensor,
    v_flat: torch.Tensor,
    parts: list[list[Partial]],
) -> None:
    k, v = k_flat.narrow(1, run.start, run.tokens), v_flat.narrow(1, run.start, run.tokens)
    _add_run(plan, call, starts, run.rows, run.position, k, v, parts)


def _add_run(
    plan: ForwardPlan,
    call: LayerCall,
    starts: Sequence[int] | None,
    rows: Sequence[int],
    position: int,
    k: torch.Tensor,
    v: torch.Tensor,
    parts: list[list[Partial]],
) -> None:
    """Attend k and v, [kv_heads, tokens, dim], for each of the rows, and add the partials to theirs."""
    tokens = k.shape[1]
    if starts is None:
        mask = call.mask
        if mask is None:
            return
        bias = mask.bias(torch.arange(position, position + tokens, device=call.query.device))
        for row in rows:
            some = bias[row : row + 1] if bias.shape[0] > 1 else bias
            q = call.query[row : row + 1]
            parts[row].append(over_run(q, k, v, scale=call.scale, bias=some, softcap=call.softcap))
        return
    skips = [min(max(starts[row] - position, 0), tokens) for row in rows]
    if len(rows) > 1 and not any(skips):
        _add_shared(call, rows, k, v, parts)
        return
    for row, skip in zip(rows, skips, strict=True):
        if skip < tokens:
            q = call.query[row : row + 1]
            partial = over_run(q, k[:, skip:], v[:, skip:], scale=call.scale, softcap=call.softcap)
        else:
            continue
        parts[row].append(partial)


def _add_shared(
    call: LayerCall, rows: Sequence[int], k: torch.Tensor, v: torch.Tensor, parts: list[list[Partial]]
) -> None:
    """Rows that see the same keys become queries of one call: the keys are read once."""
    # Not by a list, which would be a tensor that the host sends to the device, and waits.
    q = call.query  # [shared, heads, new, k_dim]
    if list(rows) != list(range(q.shape[0])):
        q = torch.cat([q[row : row + 1] for row in rows])
    shared, heads, new, dim = q.shape
    packed = q.transpose(0, 1).reshape(1, heads, shared * new, dim)
    out, lse = over_run(packed, k, v, scale=call.scale, softcap=call.softcap)
    outs = out.view(heads, shared, new, -1).transpose(0, 1)  # [shared, heads, new, v_dim]
    lses = lse.view(heads, shared, new).transpose(0, 1)
    for index, row in enumerate(rows):
        parts[row].append(Partial(outs[index : index + 1], lses[index : index + 1]))


def _dense_from(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int, call: LayerCall) -> Partial:
    """One row's new tokens from `first` on; those before it are padding and see nothing."""
    new = q.shape[2]
    seen = dense(q[:, :, first:], k[:, :, first:], v[:, :, first:], scale=call.scale, causal=True, softcap=call.softcap)
    if not first:
        return seen
    out = seen.out.new_zeros((*seen.out.shape[:2], new, seen.out.shape[3]))
    lse = seen.lse.new_full((*seen.lse.shape[:2], new), -torch.inf)
    out[:, :, first:], lse[:, :, first:] = seen.out, seen.lse
    return Partial(out, lse)
