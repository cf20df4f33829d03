"""One layer's attention over a forward's plan: resident runs, streamed chunks and the new tokens, merged by LSE.

A single new token in each row is attended where it was written, inside the runs; several new tokens are attended where
the model made them, and the runs hold the past alone.

Imports: this package, device, plan, prefetcher, store.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch

from tieredkv.attention.flex import FlexKernels, FlexTiles, TileRow, rows_bucket
from tieredkv.attention.lse import Partial, merge, nothing_seen
from tieredkv.attention.masks import MaskSpec, TensorMask
from tieredkv.attention.native import DecodePlan, NativeKernels
from tieredkv.attention.partials import dense, over_run
from tieredkv.attention.windowed import Pieces, WindowedMask, windowed
from tieredkv.device import Region
from tieredkv.plan import Chunk, ForwardPlan, Run
from tieredkv.store import BlockStore

FLEX_LEAST_TOKENS = 4096
"""Below so many keys over all rows, a compiled kernel saves less than it costs to have."""
FLEX_LEAST_RUNS = 5
"""Up to so many runs, the flash op over each run is faster on a CPU than one flex call over all."""


@dataclasses.dataclass(slots=True)  # not frozen: made once a layer, and that takes three times as long
class LayerCall:
    """What the attention function was given for one layer.

    Args:
        layer: tiered layer.
        query: [rows, heads, new, k_dim].
        key: the new keys, [rows, kv_heads, new, k_dim].
        value: the new values, [rows, kv_heads, new, v_dim].
        scale: factor on the scores.
        softcap: scores become `softcap * tanh(scores / softcap)`, or None.
        sinks: one more logit for each head, [heads], or None.
        mask: None for causal, else what the mask function made; the engine adds what a plan hides.
    """

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    softcap: float | None
    sinks: torch.Tensor | None
    mask: MaskSpec | TensorMask | WindowedMask | None


class Engine:
    """Attends the layers of one cache.

    Args:
        store: where blocks are.
        kernels: compiled kernels, with a bound on their number.
    """

    def __init__(self, store: BlockStore, kernels: FlexKernels) -> None:
        self._store, self._kernels = store, kernels
        self._tiles: dict[tuple[int, torch.device], FlexTiles] = {}
        self._tiles_of: tuple[int, int] | None = None
        self._native = NativeKernels()
        self._plans_of: ForwardPlan | None = None
        self._plans: dict[tuple[int, str | int], DecodePlan] = {}
        self._simulated = store.device.kind == "simulated"

    @property
    def native_reason(self) -> str | None:
        """Why the native kernel does not serve on this machine, or None."""
        return self._native.reason

    def attend(self, plan: ForwardPlan, call: LayerCall) -> torch.Tensor:
        """Attention output [rows, heads, new, v_dim], in the query's dtype.

        Raises:
            ChecksumError, ColdTierError: a streamed block cannot be had.
        """
        if plan.visibility is not None and not isinstance(call.mask, WindowedMask):
            call = dataclasses.replace(call, mask=WindowedMask(call.mask, plan.visibility, plan.past, plan.new))
        starts = _starts(call.mask, plan.rows)
        if starts is not None and self._wants_native(plan, call):
            return merge(self._natively(plan, call, starts), sinks=call.sinks, dtype=call.query.dtype)
        if starts is not None and self._wants_flex(plan, call):
            return self._flex(plan, call, starts)
        by_row: list[list[Partial]] = [[] for _ in range(plan.rows)]
        if plan.hot_runs:
            k_flat, v_flat = self._store.flat_pools(call.layer)
            self._over_runs(plan, call, starts, plan.hot_runs, k_flat, v_flat, "hot", by_row)
        if plan.warm_runs:
            self._over_warm(plan, call, starts, by_row)
        if plan.chunks:
            self._over_chunks(plan, call, starts, by_row)
        if plan.new > 1:
            return self._with_new(plan, call, starts, by_row)
        return self._merged(call, by_row)

    @staticmethod
    def _merged(call: LayerCall, parts: list[list[Partial]]) -> torch.Tensor:
        for index, row in enumerate(parts):
            if not row:  # nothing but padding
                row.append(nothing_seen(call.query[index : index + 1], call.value.shape[3]))
        rows = [merge(row, sinks=call.sinks, dtype=call.query.dtype) for row in parts]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    # ---- one native call over the pools

    def _wants_native(self, plan: ForwardPlan, call: LayerCall) -> bool:
        """Whether the native kernel serves the step: settings, shapes and the machine decide."""
        if plan.new != 1 or call.softcap is not None or self._store.settings.kernel not in ("auto", "native"):
            return False
        return self._native.serves(call.query, call.key.shape[1], call.key.shape[3], call.value.shape[3])

    def _natively(self, plan: ForwardPlan, call: LayerCall, starts: Sequence[int]) -> list[Partial]:
        """Partials of all rows: one over what is hot or is attended in warm, and one over each chunk."""
        store = self._store
        if not plan.warm_runs and not plan.chunks and not self._simulated and plan.hot_runs:
            keys = self._planned(plan, call, "pools") or self._native_plan(
                plan, call, "pools", [(0, run) for run in plan.hot_runs], starts
            )
            return [self._native.attend(call.query, [store.flat_pools(call.layer)], keys, scale=call.scale)]
        runs: list[tuple[int, Run | Chunk]] = [(0, run) for run in plan.hot_runs]
        pools = [store.flat_pools(call.layer)]
        if plan.warm_runs and store.warm is not None:
            warm = store.warm.run(call.layer, 0, store.warm.slots.total)
            if warm is not None:
                pools.append((warm[0], warm[1]))
                runs += [(1, run) for run in plan.warm_runs]
        partials = []
        if runs:
            keys = self._native_plan(plan, call, "pools", runs, starts)
            work = functools.partial(self._native.attend, call.query, pools, keys, scale=call.scale)
            if self._simulated:
                roles: list[tuple[str, Run]] = [("hot", r) for r in plan.hot_runs] + [
                    ("warm", r) for r in plan.warm_runs
                ]
                reads: list[Region] = [(role, getattr(b, role)) for role, run in roles for b in run.blocks]
                partials.append(store.device.run(work, reads=reads, name="attend pools"))
            else:
                partials.append(work())
        ring, layers, announced = store.prefetcher, range(len(store.layers)), plan.ring or plan.chunks
        for index, chunk in enumerate(plan.chunks):
            with ring.chunk(layers, announced, call.layer, plan.ring_first + index) as (k, v, buffer):
                keys = self._native_plan(plan, call, index, [(0, chunk)], starts)
                work = functools.partial(self._native.attend, call.query, [(k, v)], keys, scale=call.scale)
                partials.append(store.device.run(work, reads=[("stage", buffer)], name="attend chunk"))
        return partials

    def _planned(self, plan: ForwardPlan, call: LayerCall, place: str | int) -> DecodePlan | None:
        """The stretches that an earlier layer with as many KV heads has made."""
        if self._plans_of is not plan:
            self._plans_of, self._plans = plan, {}
        return self._plans.get((call.key.shape[1], place))

    def _native_plan(
        self,
        plan: ForwardPlan,
        call: LayerCall,
        place: str | int,
        pieces: Sequence[tuple[int, Run | Chunk]],
        starts: Sequence[int],
    ) -> DecodePlan:
        """Each row's stretches, made once per forward, for every layer with as many KV heads."""
        kv_heads = call.key.shape[1]
        found = self._planned(plan, call, place)
        if found is None:
            rows: list[list[tuple[int, int, int]]] = [[] for _ in range(plan.rows)]
            for pool, piece in pieces:
                start = piece.start if isinstance(piece, Run) else 0
                for row in piece.rows:
                    skip = max(starts[row] - piece.position, 0)
                    if skip < piece.tokens:
                        rows[row].append((pool, start + skip, piece.tokens - skip))
            # While blocks are on their way a core is theirs: two threads on one core wait for each other.
            threads = max(torch.get_num_threads() - bool(plan.chunks), 1)
            found = DecodePlan(rows, kv_heads=kv_heads, threads=threads, fresh=0)
            self._plans[(kv_heads, place)] = found
        return found

    # ---- one compiled call over the pool

    def _wants_flex(self, plan: ForwardPlan, call: LayerCall) -> bool:
        """Whether one flex call serves the step: shapes and settings decide, never the state of a compiler."""
        kernel = self._store.settings.kernel
        if plan.row_slots is None or call.softcap is not None or kernel in ("flash", "plain"):
            return False
        if call.sinks is not None and not self._kernels.returns_lse(call.query.device):
            return False
        if kernel == "flex" or call.query.device.type != "cpu":
            return True
        if plan.rows * plan.total < FLEX_LEAST_TOKENS:
            return False
        return len(plan.hot_runs) >= FLEX_LEAST_RUNS

    def _flex(self, plan: ForwardPlan, call: LayerCall, starts: Sequence[int]) -> torch.Tensor:
        k_pool, v_pool = self._store.hot.planes[call.layer]
        tiles = self._tiles_for(plan, call, starts)

        def work() -> tuple[torch.Tensor, torch.Tensor | None]:
            return tiles.attend(call.query, k_pool, v_pool, scale=call.scale, lse=call.sinks is not None)

        slots = {slot for row in plan.row_slots or () for slot in row} if self._simulated else ()
        out, lse = self._store.device.run(work, reads=[("hot", slot) for slot in slots], name="flex")
        if call.sinks is None or lse is None:
            return out
        return merge([Partial(out.to(lse.dtype), lse)], sinks=call.sinks, dtype=call.query.dtype)

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
                pool_slots=self._store.hot.slots.total,
                rows=plan.rows,
                block_size=self._store.block_size,
                device=device,
            )
            self._tiles[(kv_heads, device)] = found
        if found.stale:
            totals = plan.row_tokens or (plan.total,) * plan.rows
            rows = zip(plan.row_slots or (), totals, starts, strict=True)
            found.update([TileRow(*row) for row in rows])
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
            if self._simulated:
                slots = [getattr(block, role) for block in run.blocks]
                self._store.device.run(work, reads=[(role, slot) for slot in slots], name=f"attend {role}")
            else:
                work()

    def _over_warm(
        self, plan: ForwardPlan, call: LayerCall, starts: Sequence[int] | None, parts: list[list[Partial]]
    ) -> None:
        """Warm blocks where they are: the computing device addresses host memory."""
        warm, size = self._store.warm, self._store.block_size
        if warm is None:
            return
        for run in plan.warm_runs:
            views = warm.run(call.layer, run.start // size, len(run.blocks))
            if views is None:
                continue
            k_flat, v_flat = (view.flatten(1, 2) for view in views)
            here = dataclasses.replace(run, start=0)
            self._over_runs(plan, call, starts, [here], k_flat, v_flat, "warm", parts)

    def _over_chunks(
        self, plan: ForwardPlan, call: LayerCall, starts: Sequence[int] | None, parts: list[list[Partial]]
    ) -> None:
        """Blocks that come through staging, one chunk attended while the next are on their way."""
        ring, layers, announced = self._store.prefetcher, range(len(self._store.layers)), plan.ring or plan.chunks
        for index, chunk in enumerate(plan.chunks):
            with ring.chunk(layers, announced, call.layer, plan.ring_first + index) as (k, v, buffer):
                region: list[Region] = [("stage", buffer)]

                work = functools.partial(_add_run, plan, call, starts, chunk.rows, chunk.position, k, v, parts)
                self._store.device.run(work, reads=region, name="attend chunk")

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


def _starts(mask: MaskSpec | TensorMask | WindowedMask | None, rows: int) -> list[int] | None:
    """For each row the first token that is seen, where the mask is causal and padding is on the left; else None."""
    if mask is None:
        return [0] * rows
    if not isinstance(mask, MaskSpec) or not mask.is_causal:
        return None
    return mask.row_starts()


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
    q = call.query[list(rows)]  # [shared, heads, new, k_dim]
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
