"""`StepCache`: one forward for several caches that share a store: the next tokens of each, one after the other.

The caches stay what they are; only this forward's tokens come in together, as one row `[1, tokens]` with positions of
their own. Attention reads each cache's own blocks, so nothing is padded and nothing is copied. What lies in memory is
attended in one call where the kernel takes unlike rows; else caches that add one token are attended together. Blocks
that several of them share are streamed once.

Imports: everything to its left; transformers' DynamicCache.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from tieredkv.attention.call import LayerCall
from tieredkv.attention.engine import Engine
from tieredkv.attention.masks import MaskSpec, TensorMask
from tieredkv.attention.over_pools import Placed
from tieredkv.device import sent
from tieredkv.errors import HandleError, MismatchError, StepError, TieredKVError, UnsupportedModelError
from tieredkv.hf import seam
from tieredkv.hf.forwarding import Forwarding
from tieredkv.hf.layers import Handle
from tieredkv.hf.tenancy import Tenancy
from tieredkv.plan import Chunk, ForwardPlan, HotWrite, Run
from tieredkv.store import BlockStore, check_tensors, planner, write
from tieredkv.store.reads import plan_reads


@dataclasses.dataclass(frozen=True)
class Member:
    """One cache's part of a step.

    Args:
        cache: of one row, from the same KVStore as the others.
        ids: its next token ids, int64 `[new]`.
    """

    cache: Forwarding
    ids: torch.Tensor


@dataclasses.dataclass(frozen=True)
class StepInput:
    """What the model is called with.

    Args:
        ids: `[1, tokens]`, the members' ids one after the other.
        positions: `[1, tokens]`.
        last: `[members]`, where each member's last token lies: whose logits continue it.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    last: torch.Tensor


class StepCache(DynamicCache):
    """What a model is given for a step; used again for the next one.

    Args:
        config: the model's config; its attention implementation is "tieredkv".
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self._config = config
        self._members: Sequence[Member] = ()
        self._parts: list[Placed] = []
        self._frame: ForwardPlan | None = None
        self._store: BlockStore | None = None
        self._engine: Engine | None = None
        self._pending: Handle | None = None
        self._self = weakref.ref(self)

    def begin(self, members: Sequence[Member]) -> StepInput:
        """Plan the tokens of every member, those with one token last.

        Raises:
            StepError: the tokens of one member do not fit, or it cannot take part. No cache is changed.
        """
        self.abandon()
        self._members = members
        places = [member.cache.joins_step() for member in members]
        store = next((place.store for place in places if place.store is not None), None)
        if store is None and places and places[0].shared is not None:
            store = places[0].shared.store
        for index, member in enumerate(members):
            try:
                place = _check(member, places[index], store)
                member.cache.check_max_tokens()
                planner.begin(place.need_store(), place.need_holder(), len(member.ids), settled=index > 0)
            except TieredKVError as error:
                self.abandon()
                raise StepError(index, error) from error
        self._store = store
        self._place()
        positions, last, first = list[int](), list[int](), 0
        for member in members:
            plan = _plan_of(member)
            positions += range(plan.past, plan.total)
            first += plan.new
            last.append(first - 1)
            if member.cache.watch is not None:
                member.cache.watch.saw(plan.past, member.ids.unsqueeze(0), None, None)
        frame = self._need_frame()
        if store is not None:
            planner.announce(store, frame)
        ids = torch.cat([member.ids for member in members])
        return StepInput(ids.unsqueeze(0), sent([positions], ids.device), sent(last, ids.device))

    def _place(self) -> None:
        """Where everything is read now; what one member needed may have moved blocks of another."""
        store = self._store
        if store is None:
            return
        with store.lock:
            plans = []
            for member in self._members:
                plan, holder = _plan_of(member), member.cache.place.need_holder()
                if plan.version != store.version:
                    plan = holder.plan = plan_reads(store, holder, plan)
                plans.append(plan)
            self._parts, self._frame = _arrange(plans, store)

    @seam.outside_graphs
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store each member's tokens in its own cache.

        Args:
            key_states: [1, kv_heads, tokens, k_dim].
            value_states: [1, kv_heads, tokens, v_dim].
            layer_idx: layer of the model.

        Returns:
            both as they are, with a handle to the caches' blocks.

        Raises:
            MismatchError: another number of rows or tokens than was begun with.
            HandleError: attention did not use the last layer's handle.
        """
        frame, store = self._need_frame(), self._store
        if store is None or (key_states.shape[0], key_states.shape[2]) != (1, frame.new):
            raise MismatchError(
                "Another step than was begun.",
                wanted=f"1 row of {frame.new} tokens",
                got=f"{key_states.shape[0]} rows of {key_states.shape[2]}",
                change="call the model with what begin() returned",
            )
        self._check_claimed()
        check_tensors(store, layer_idx, key_states, value_states)
        with store.lock:
            for part in self._parts:
                write(store, part.plan, layer_idx, part.rows_of(key_states), part.rows_of(value_states))
        frame.updated.add(layer_idx)
        handle = Handle(self._self, layer_idx, frame, full=False)
        handle.attach(key_states, value_states)
        self._pending = handle
        return key_states, value_states

    def attend(self, frame: ForwardPlan, call: LayerCall) -> torch.Tensor:
        """One layer's attention, [1, heads, tokens, v_dim], for the attention function."""
        store = self._store
        if (
            store is None
            or (isinstance(call.mask, MaskSpec) and not call.mask.is_causal)
            or isinstance(call.mask, TensorMask)
        ):
            raise HandleError(
                "The step's attention is not what the caches hold.",
                wanted="causal attention over each cache's tokens, within a step",
                got=f"a mask of type {type(call.mask).__name__}",
                change="call the model with what begin() returned, and no mask",
            )
        with store.lock:
            if frame.version != store.version:
                self._place()
            forward = self._need_frame()
            return self._need_engine(store).attend_parts(forward, self._parts, call)

    def end(self) -> None:
        """The forward is over: the tokens count in every cache.

        Raises:
            HandleError: the last layer's attention did not use its handle.
        """
        self._check_claimed()
        for member in self._members:
            member.cache.ended()
        self._forget()

    def abandon(self) -> None:
        """The forward failed, or was not begun: no cache is changed."""
        for member in self._members:
            place = member.cache.place
            if place.store is not None and place.holder is not None:
                planner.rollback(place.store, place.holder)
        self._forget()

    def _forget(self) -> None:
        self._members, self._parts, self._frame, self._pending = (), [], None, None

    def _check_claimed(self) -> None:
        if self._pending is not None and not self._pending.claimed:
            raise HandleError(
                "A layer's new keys were not attended over blocks; the step is not valid.",
                wanted='the attention implementation "tieredkv", which gets K and V untouched',
                got="another attention",
                change="this model cannot take steps of several caches: use a cache for each generate",
            )

    def _need_frame(self) -> ForwardPlan:
        if self._frame is None:
            raise MismatchError("No step was begun.", wanted="begin(members)", got="a forward", change="begin first")
        return self._frame

    @property
    def native_attention(self) -> str | None:
        """Why attention is not served by C++ on this machine, or None."""
        return None if self._engine is None else self._engine.native_reason

    def _need_engine(self, store: BlockStore) -> Engine:
        """What attends the layers: the step's own, since a member's would end with it, and keep memory until then."""
        if self._engine is None or self._engine.store is not store:
            self._engine = Engine(store, self._members[0].cache.place.kernels)
        return self._engine

    # ---- what attention and the mask builders ask

    @property
    def model_config(self) -> Any:
        """The config of the model's decoder."""
        return self._config

    def handle_arrived(self, handle: Handle, reason: str | None, mask: torch.Tensor | None) -> None:
        """Nothing to learn: caches take part only when blocks are known to serve every layer."""

    def get_seq_length(self, layer_idx: int | None = None) -> int:
        """0: the frame begins at its first token, whatever lies before each member's."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(tokens of the step, 0)."""
        return query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """0; positions are passed with the ids."""
        return 0

    @property
    def is_compileable(self) -> bool:
        """False: a step plans on the host."""
        return False


def _plan_of(member: Member) -> ForwardPlan:
    plan = member.cache.place.need_holder().plan
    if plan is None:
        raise MismatchError("A step's plan is gone.", wanted="a plan", got="none", change="use a cache in one thread")
    return plan


def _check(member: Member, place: Tenancy, store: BlockStore | None) -> Tenancy:
    """The cache's place, if it can take part in a step over this store.

    Raises:
        MismatchError: another store, or several rows.
        UnsupportedModelError: a layer that is not tiered, or that is not attended over blocks.
    """
    cache = member.cache
    if not cache.is_all_blocks:
        raise UnsupportedModelError(
            "Requests of this model cannot take steps together.",
            wanted="attention over blocks in every layer, known from a forward of one cache before",
            got=cache.ways.reason or "layers that keep their own K and V or states",
            change="generate with a cache for each request",
        )
    if place.store is None and place.shared is not None and store is not None and place.shared.store is store:
        place.begin_with(place.shared, store, [[]], 0)
    if place.store is store and place.holder is not None and not place.holder.table.rows:
        with place.need_store().lock:
            place.holder.table.rows = [[]]  # its first step was abandoned, and rolled back to nothing
    rows = 0 if place.holder is None else len(place.holder.table)
    if place.store is None or place.store is not store or rows != 1 or not len(member.ids):
        raise MismatchError(
            "This cache cannot take part in a step.",
            wanted="a cache of one row, of the same KVStore as the others, and at least one new token",
            got=f"{rows} rows, {len(member.ids)} new tokens, {'the same' if place.store is store else 'another'} store",
            change="make each request's cache with store.cache(...)",
        )
    return place


def _arrange(plans: Sequence[ForwardPlan], store: BlockStore) -> tuple[list[Placed], ForwardPlan]:
    """Parts of a step in the order of its tokens, and the plan of the whole: its chunks in the order of reading."""
    parts: list[Placed] = []
    first = index = 0
    while index < len(plans):
        stop = index
        while stop < len(plans) and plans[stop].new == 1:
            stop += 1
        if stop - index > 1:
            parts.append(Placed(_together(plans[index:stop], store), first))
            first, index = first + stop - index, stop
        else:
            parts.append(Placed(plans[index], first))
            first, index = first + plans[index].new, index + 1
    chunks = tuple(chunk for part in parts for chunk in part.plan.chunks)
    before, placed = 0, []
    for part in parts:
        plan = dataclasses.replace(part.plan, ring=chunks, ring_first=before) if chunks else part.plan
        before += len(part.plan.chunks)
        placed.append(Placed(plan, part.first))
    updated = plans[0].updated
    for plan in plans:
        plan.updated = updated
    frame = ForwardPlan(
        number=max(plan.number for plan in plans),
        past=0,
        new=first,
        rows=1,
        chunks=chunks,
        version=store.version,
        updated=updated,
    )
    return placed, frame


def _together(plans: Sequence[ForwardPlan], store: BlockStore) -> ForwardPlan:
    """One plan of several rows, from plans of one row and one token each."""
    hot: list[Run] = []
    warm: list[Run] = []
    chunks: dict[tuple[int, ...], Chunk] = {}
    for row, plan in enumerate(plans):
        hot += [Run((row,), run.start, run.tokens, run.position, run.blocks) for run in plan.hot_runs]
        warm += [Run((row,), run.start, run.tokens, run.position, run.blocks) for run in plan.warm_runs]
        for chunk in plan.chunks:
            key = (chunk.position, *(block.id for block in chunk.blocks))
            rows = (*chunks[key].rows, row) if key in chunks else (row,)
            chunks[key] = dataclasses.replace(chunk, rows=rows)
    writes = [
        HotWrite(row, 0, write.start, write.tokens) for row, plan in enumerate(plans) for write in plan.hot_writes
    ]
    index = sent([write.start for write in writes], store.device.torch_device)
    return ForwardPlan(
        number=max(plan.number for plan in plans),
        past=max(plan.past for plan in plans),
        new=1,
        rows=len(plans),
        hot_runs=tuple(hot),
        warm_runs=tuple(warm),
        chunks=tuple(chunks.values()),
        hot_writes=tuple(writes),
        write_index=index,
        version=store.version,
    )
