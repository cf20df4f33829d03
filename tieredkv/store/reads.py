"""Where a forward reads the tokens it attends to: runs in hot, runs in warm (in place), chunks through staging.

Blocks that several rows share are read once for all of them. For a single row that goes on token by token, this is
worked out only when the table or the placement changed.

Imports: block, device, inflight, plan, blocks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Iterator, Sequence

from tieredkv.block import Block
from tieredkv.device import sent
from tieredkv.inflight import read_from
from tieredkv.plan import Chunk, ForwardPlan, Run
from tieredkv.store.blocks import BlockStore, Holder

_Places = tuple[tuple[Run, ...], tuple[Run, ...], tuple[Chunk, ...]]


def plan_reads(store: BlockStore, holder: Holder, plan: ForwardPlan) -> ForwardPlan:
    """Complete a plan with what it reads.

    A single new token in each row is attended where it was written, with the tokens before it; of several new tokens,
    only the past is listed, and the new ones are attended where the model made them.
    """
    visible = plan.total if plan.new == 1 else plan.past
    hidden, visibility = range(0), store.visibility
    if visibility is not None:
        hidden = visibility.hidden(plan.past)
        if visibility.hidden(plan.total - 1) == hidden:
            visibility = None  # every query sees the same: what is read
    padding = holder.padding if plan.new == 1 and holder.padding and len(holder.padding) == plan.rows else None
    plan = dataclasses.replace(plan, padding=padding)
    before = _as_before(store, holder, plan, hidden)
    hot_runs, warm_runs, chunks = before or split_reads(store, holder, visible, hidden, padding)
    if not store.codec.lossless and (chunks or any(b.id in store.decoded for run in hot_runs for b in run.blocks)):
        # What is computed from here on depends on what the codec lost.
        exact = plan.past // store.block_size * store.block_size
        holder.exact_tokens = exact if holder.exact_tokens is None else min(holder.exact_tokens, exact)
    write_index = None
    if plan.new == 1:
        if plan.rows > 1:
            index = [write.start for write in plan.hot_writes]
            write_index = sent(index, store.device.torch_device)
        holder.reads = (_reads_key(store, plan), hot_runs, warm_runs, chunks) if not hidden else None
    store.counters.hits["hot"] += sum(len(r.blocks) for r in hot_runs) * len(store.layers)
    store.counters.hits["warm"] += sum(len(r.blocks) for r in warm_runs) * len(store.layers)
    for chunk in chunks:
        for block in chunk.blocks:
            store.counters.hits[read_from(block)] += len(store.layers)
    return dataclasses.replace(
        plan,
        hot_runs=hot_runs,
        warm_runs=warm_runs,
        chunks=chunks,
        write_index=write_index,
        visibility=visibility,
        version=store.version,
    )


def _reads_key(store: BlockStore, plan: ForwardPlan) -> tuple[object, ...]:
    """Changes with the table and with the place of any block; of one row nothing else says where it is read."""
    return store.version, plan.rows, -(-plan.total // store.block_size), plan.padding


def _as_before(store: BlockStore, holder: Holder, plan: ForwardPlan, hidden: range) -> _Places | None:
    """Where the last token of a single row read, with the new one added to the last run; None if things moved."""
    reads = holder.reads
    if reads is None or hidden or plan.new != 1 or plan.rows != 1 or reads[0] != _reads_key(store, plan):
        return None
    *before, last = reads[1]
    longer = Run(last.rows, last.start, plan.total - last.position, last.position, last.blocks)
    return (*before, longer), reads[2], reads[3]


def steady(
    store: BlockStore, holder: Holder, plan: ForwardPlan, padding: Sequence[int] | None = None
) -> contextlib.AbstractContextManager[ForwardPlan]:
    """The plan with its blocks where they lie now, and none of them moves inside the `with`.

    Other caches of the store, in other threads, may have moved some since the forward began; and what it streams may
    leave out what was padding so far, and is none in this attention.

    Args:
        padding: for each row how many tokens on the left this attention does not see; None where it may see any.
    """
    if plan.padding is None and holder.padding is None and not store.is_shared and not (padding and any(padding)):
        return contextlib.nullcontext(plan)  # asked for by every layer of every step: five times as fast
    return _steady(store, holder, plan, padding)


@contextlib.contextmanager
def _steady(
    store: BlockStore, holder: Holder, plan: ForwardPlan, padding: Sequence[int] | None
) -> Iterator[ForwardPlan]:
    if plan.padding is not None or padding is not None:
        plan = _covering(store, holder, plan, padding)
    if not store.is_shared:
        yield plan
        return
    with store.lock:
        plan = _current(holder, plan)
        if plan is holder.plan and plan.version != store.version:
            plan = holder.plan = plan_reads(store, holder, plan)
        yield plan


def _current(holder: Holder, plan: ForwardPlan) -> ForwardPlan:
    """The plan, or the one that took its place while its forward was under way."""
    own = holder.plan
    return own if own is not None and own.number == plan.number else plan


def _covering(store: BlockStore, holder: Holder, plan: ForwardPlan, padding: Sequence[int] | None) -> ForwardPlan:
    """The plan, or the one that took its place; made again if it leaves out what this attention sees."""
    with store.lock:
        known = tuple(padding) if padding is not None and any(padding) else None
        plan = _current(holder, plan)
        if plan.padding is None or (known is not None and all(map(operator.le, plan.padding, known))):
            holder.padding = known
            return plan
        holder.padding = None
        whole = plan_reads(store, holder, plan)
        if holder.plan is plan:
            holder.plan = whole
        return whole


def split_reads(
    store: BlockStore,
    holder: Holder,
    visible: int,
    hidden: range = range(0),
    padding: Sequence[int] | None = None,
) -> _Places:
    """Where the first `visible` tokens of each row are read: runs in hot, runs in warm, chunks through staging.

    Args:
        hidden: numbers of blocks in the row that are left out.
        padding: for each row the tokens on its left that need not be streamed; None to stream all.
    """
    return _split(store, _groups(holder, visible, store.block_size, hidden), padding)


@dataclasses.dataclass
class _Group:
    rows: tuple[int, ...]
    position: int
    tokens: int
    block: Block


def _groups(holder: Holder, visible: int, size: int, hidden: range) -> list[_Group]:
    """Each block that holds visible tokens, with the rows that see it, in row order."""
    numbers = [number for number in range(-(-visible // size)) if number not in hidden]
    if len(holder.table) == 1:
        row = holder.table.rows[0]
        return [_Group((0,), i * size, min(size, visible - i * size), row[i]) for i in numbers]
    found: dict[int, _Group] = {}
    for row_index, row in enumerate(holder.table):
        for i in numbers:
            block = row[i]
            group = found.get(block.id)
            if group is None:
                found[block.id] = _Group((row_index,), i * size, min(size, visible - i * size), block)
            elif group.rows[-1] != row_index:
                group.rows += (row_index,)
    return list(found.values())


def _split(store: BlockStore, groups: list[_Group], padding: Sequence[int] | None) -> _Places:
    hot: list[Run] = []
    warm: list[Run] = []
    streamed: list[_Group] = []
    in_place, size = store.reads_in_place, store.block_size
    for group in groups:
        block = group.block
        if block.hot is not None:
            _extend(hot, group, block.hot, size)
        elif in_place and block.warm is not None:
            _extend(warm, group, block.warm, size)
        elif padding is None:
            streamed.append(group)
        elif rows := tuple(row for row in group.rows if padding[row] < group.position + size):
            streamed.append(dataclasses.replace(group, rows=rows))
    return tuple(hot), tuple(warm), _chunks(streamed, store.prefetcher.chunk_blocks, size)


def _extend(runs: list[Run], group: _Group, slot: int, size: int) -> None:
    """Append a block to the last run if it follows it in the pool and in its rows, else start a run."""
    start = slot * size
    if runs:
        last = runs[-1]
        follows = last.start + last.tokens == start and last.position + last.tokens == group.position
        if follows and last.rows == group.rows:
            runs[-1] = Run(
                last.rows, last.start, last.tokens + group.tokens, last.position, (*last.blocks, group.block)
            )
            return
    runs.append(Run(group.rows, start, group.tokens, group.position, (group.block,)))


def _chunks(groups: list[_Group], chunk_blocks: int, size: int) -> tuple[Chunk, ...]:
    """Blocks that follow one another in their rows, in chunks of about one size.

    A small one at the end of a layer would cost the host as much as a large one, and hide nothing of what follows.
    """
    stretches: list[list[_Group]] = []
    for group in groups:
        if stretches:
            last = stretches[-1][-1]
            if last.rows == group.rows and last.position + size == group.position:
                stretches[-1].append(group)
                continue
        stretches.append([group])
    chunks = []
    for stretch in stretches:
        count = -(-len(stretch) // chunk_blocks)
        for number in range(count):
            part = stretch[len(stretch) * number // count : len(stretch) * (number + 1) // count]
            blocks = tuple(group.block for group in part)
            chunks.append(Chunk(part[0].rows, part[0].position, blocks, len(part) * size))
    return tuple(chunks)
