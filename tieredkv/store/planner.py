"""Plans a forward of one cache before its first write, and takes it back or makes it count afterwards.

`begin` decides where new tokens go (hot, or straight to a lower tier) and reserves every slot at once, or refuses and
leaves the cache as it was. `commit` makes the new tokens count, `rollback` drops them. Sealing and write-down wait for
the next `begin`, after any crop, so that rejected candidates of speculation are never sealed.

Imports: errors, block, plan, placement, transfer, blocks, dropping, quota, reads, rooms, sharing.
"""

from __future__ import annotations

import contextlib
import itertools

from tieredkv.block import LOWER, Block
from tieredkv.errors import BudgetError, ColdTierError
from tieredkv.placement import leaving_order
from tieredkv.plan import ForwardPlan, HotWrite, ThroughWrite
from tieredkv.store import quota
from tieredkv.store.blocks import BlockStore, Holder
from tieredkv.store.dropping import check_seen, drop_hidden, gone_block
from tieredkv.store.reads import plan_reads
from tieredkv.store.rooms import Room, find_room, protected_ids
from tieredkv.store.sharing import merge_rows
from tieredkv.transfer import AT_ONCE


def begin(store: BlockStore, holder: Holder, new: int, *, settled: bool = False) -> ForwardPlan:
    """Plan a forward of `new` tokens in each row.

    Args:
        new: at least 0.
        settled: forwards of several caches are planned in a row, and this is not the first of them: the store, which
            looks at all its caches, was settled there.

    Raises:
        BudgetError: it does not fit; nothing was written and the cache is as it was.
    """
    with store.lock:
        store.land(holder.table.blocks())
        quota.refill(store, holder)
        if not settled:
            settle(store, holder)
        drop_hidden(store, holder)
        store.forwards += 1
        rows, past, size = len(holder.table), holder.tokens, store.block_size
        holder.last_access = store.forwards
        if new == 0 or rows == 0:
            holder.plan = ForwardPlan(number=store.forwards, past=past, new=new, rows=rows)
            return holder.plan
        needed = find_room(store, holder, new)
        protected = protected_ids(store, holder)
        below: list[tuple[str, int]] = []
        try:
            store.make_room(holder, needed.hot * rows + needed.copies, protected, "room")
            _own_tails(store, holder)
            places = store.take_lower(needed.through * rows) if needed.through else []
            below += [(role, slot) for role, slots in places for slot in slots]
            _append_blocks(store, holder, needed, below)
            plan = ForwardPlan(
                number=store.forwards,
                past=past,
                new=new,
                rows=rows,
                hot_writes=_hot_writes(holder, past, new, size),
                through_writes=_through_writes(holder, past, size, needed.numbers),
            )
            holder.plan = plan_reads(store, holder, plan)
        except BaseException as failure:
            # An interrupt too may come after slots were taken.
            for role, slot in below:
                store.tiers[role].slots.release(slot)
            holder.table.truncate(past)
            if isinstance(failure, ColdTierError):
                store.give_up_cold(failure)
                raise store.no_room_below(needed.through * rows) from failure
            raise
        return holder.plan


def announce(store: BlockStore, plan: ForwardPlan) -> None:
    """A planned forward begins: it is counted, and what it streams is read ahead."""
    with store.lock:  # a cache that is dropped meanwhile leaves afterwards, and what was read ahead for it stays
        store.counters.begin_forward(plan.new, plan.rows)
        if plan.chunks:
            store.prefetcher.start(range(len(store.layers)), plan.chunks)


def commit(store: BlockStore, holder: Holder) -> None:
    """Make the forward's tokens count. Waits until what was written straight to lower tiers has arrived.

    Raises:
        ColdTierError, ChecksumError: a block could not be stored; the forward is rolled back.
    """
    plan, holder.plan = holder.plan, None
    if plan is None:
        return
    with store.lock:
        try:
            with store.counters.waiting(bool(plan.through_writes)):
                for block in (block for write in plan.through_writes for block in write.blocks):
                    for event in store.through.get(block.id, ()):
                        event.wait()
                    store.through.pop(block.id, None)
        except BaseException as failure:  # an interrupt while waiting too
            holder.plan = plan
            rollback(store, holder)
            if isinstance(failure, ColdTierError):
                store.give_up_cold(failure)
            raise
        holder.tokens = plan.total
        _fill(holder, plan.past, plan.total, store.block_size)


def rollback(store: BlockStore, holder: Holder) -> None:
    """Drop the tokens of a forward that did not reach every layer."""
    with store.lock:
        if holder.plan is not None:
            holder.plan = None
            holder.table.truncate(holder.tokens)
            if not holder.tokens:
                holder.table.clear()  # the next forward may have another number of rows


def crop(store: BlockStore, holder: Holder, tokens: int) -> None:
    """Keep the first `tokens` tokens of each row; a block that is cut is copied before it is written again.

    Raises:
        ConfigError: tokens that the next one sees were dropped.
    """
    with store.lock:
        if tokens >= holder.tokens:
            return
        check_seen(store, holder, max(tokens, 0))
        holder.tokens = max(tokens, 0)
        holder.merged = min(holder.merged, holder.tokens // store.block_size)
        holder.table.truncate(holder.tokens)


def settle(store: BlockStore, holder: Holder) -> None:
    """Seal full blocks, write down what is outside the window, and hold the watermark."""
    with store.lock:
        store.let_dropped_go()
        # Of other caches too: one that rests after its last forward must not keep the others out of hot.
        sealed = any([_seal(each, store.block_size) for each in store.holders])
        merge_rows(store, holder)
        store.poll()
        if (sealed or store.waiting) and store.lower_tiers():
            quota.hold(store)
            _write_down(store, protected_ids(store, holder))


def _write_down(store: BlockStore, protected: set[int]) -> None:
    """Copy blocks outside the window down ahead of need, and let some leave hot, as the settings say."""
    slots, window, settings = store.hot.slots, store.budget.window_tokens, store.settings
    at_once, reason = settings.placement == "window", "watermark" if settings.placement == "watermark" else "window"
    if not at_once and slots.used <= settings.write_down_at * slots.total:
        store.waiting.clear()
        return
    # One block more than the window: a crop that goes back less than a block meets none that was written down, or
    # tokens added and taken away again would be written at each turn.
    margin = window + store.block_size
    outside = [c for c in store.candidates(protected) if c.distance >= margin and not c.sink]
    outside = leaving_order(outside, window)
    missing = [c for c in outside if not c.block.is_stored_below and not store.is_moving(c.block)]
    ahead = [c.block for c in quota.moves_ahead(store, missing)]
    with contextlib.suppress(BudgetError):  # a disk that filled up meanwhile: these blocks stay hot for now
        store.start_move(ahead[: store.lower_free()], "hot", reason)
    over = len(outside) if at_once else slots.used - int(settings.watermark * slots.total)
    if over > 0:
        ready = [c.block for c in outside if c.block.is_stored_below or store.is_moving(c.block)]
        store.leave_hot(ready[:over], reason)


def _seal(holder: Holder, size: int) -> bool:
    """Seal the blocks that are full of committed tokens; whether there were any."""
    found = False
    for row in holder.table:
        for index in range(holder.tokens // size - 1, -1, -1):
            if row[index].sealed:
                break
            row[index].sealed = found = True
    return found


def _is_writable(block: Block) -> bool:
    # A block that was written straight down and then cut has a copy below before it is sealed.
    return not block.sealed and block.refs == 1 and block.hot is not None and not block.is_stored_below


def _own_tails(store: BlockStore, holder: Holder) -> None:
    """Give each row a last block that it may write into: unsealed, hot, and shared with nobody."""
    fill = holder.tokens % store.block_size
    if not fill:
        return
    for index, row in enumerate(holder.table):
        old = row[-1]
        if _is_writable(old):
            continue
        store.wait_for([old])
        if old.hot is not None and old.refs == 1:
            # Nobody else sees it: the block goes on in place, and its copies below, now out of date, are freed.
            fresh = store.new_block(hot=old.hot)
            old.hot = None
        else:
            fresh = store.new_block(hot=store.take_hot(None))
            try:
                _copy_into(store, old, fresh)
                if old.id in store.decoded:
                    store.decoded.add(fresh.id)
            except BaseException:
                fresh.refs = 0
                store.release(fresh)
                raise
        fresh.tokens = fill
        holder.table.replace(index, len(row) - 1, fresh)


def _copy_into(store: BlockStore, old: Block, fresh: Block) -> None:
    target = fresh.hot
    if target is None:
        return
    if old.hot is None:
        store.note_hot_use([target])
        store.mover.promote([old], [target], "request", AT_ONCE).wait()
        if not store.codec.lossless:
            store.decoded.add(fresh.id)
        return
    source = old.hot
    store.clean_hot(target)  # also notes that it is used, so that it is cleaned again before it holds another block

    def copy() -> None:
        for layer in range(len(store.layers)):
            for pool in store.hot.planes[layer]:
                pool[:, target].copy_(pool[:, source])

    store.device.run(copy, reads=[("hot", source)], writes=[("hot", target)], name="copy tail")


def _append_blocks(store: BlockStore, holder: Holder, needed: Room, below: list[tuple[str, int]]) -> None:
    """Add each row's new blocks; those that go straight down into slots taken off `below`."""
    for row_index, row in enumerate(holder.table):
        for place in needed.places():
            if place == "hot":
                last = row[-1].hot if row else None
                slot = store.take_hot(None if last is None else last + 1)
                store.clean_hot(slot)
                block = store.new_block(hot=slot)
            elif place == "through":
                role, slot = below.pop(0)
                block = store.new_block()
                setattr(block, role, slot)
                store.through[block.id] = []
            else:
                block = gone_block(store)
            holder.table.append(row_index, block)


def _hot_writes(holder: Holder, past: int, new: int, size: int) -> tuple[HotWrite, ...]:
    """Stretches of new tokens that go to hot, neighbouring slots joined."""
    writes: list[HotWrite] = []
    for index, row in enumerate(holder.table):
        for number in range(past // size, len(row)):
            slot = row[number].hot
            if slot is None:
                continue
            first = max(number * size, past)
            last = min((number + 1) * size, past + new)
            start, source = slot * size + first - number * size, first - past
            old = writes[-1] if writes else None
            follows = old is not None and (old.start + old.tokens, old.source + old.tokens) == (start, source)
            if old is not None and follows and old.row == index:
                writes.pop()
                writes.append(HotWrite(index, old.source, old.start, old.tokens + last - first))
            else:
                writes.append(HotWrite(index, source, start, last - first))
    return tuple(writes)


def _through_writes(holder: Holder, past: int, size: int, numbers: range) -> tuple[ThroughWrite, ...]:
    """The new blocks that go straight down, neighbours of one row and tier together."""
    writes: list[ThroughWrite] = []
    if not numbers:
        return ()
    for index, row in enumerate(holder.table):
        for role in LOWER:
            stored = [number for number in numbers if getattr(row[number], role) is not None]
            for _, group in itertools.groupby(enumerate(stored), lambda pair: pair[1] - pair[0]):
                some = [number for _, number in group]
                blocks = tuple(row[number] for number in some)
                slots = tuple(getattr(block, role) for block in blocks)
                writes.append(ThroughWrite(index, some[0] * size - past, blocks, role, slots))
    return tuple(writes)


def _fill(holder: Holder, past: int, total: int, size: int) -> None:
    for row in holder.table:
        for number in range(past // size, len(row)):
            row[number].tokens = min(total - number * size, size)
