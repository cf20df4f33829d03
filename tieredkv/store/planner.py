"""Plans a forward of one cache before its first write, and takes it back or makes it count afterwards.

`begin` decides where new tokens go (hot, or straight to a lower tier) and reserves every slot at once, or refuses and
leaves the cache as it was. `commit` makes the new tokens count, `rollback` drops them. Sealing and write-down wait for
the next `begin`, after any crop, so that rejected candidates of speculation are never sealed.

Imports: errors, block, block_table, placement, plan, store, reads.
"""

from __future__ import annotations

import contextlib
import dataclasses

from tieredkv.block import Block
from tieredkv.errors import BudgetError, ColdTierError
from tieredkv.placement import leaving_order, split_new_blocks
from tieredkv.plan import ForwardPlan, HotWrite, ThroughWrite
from tieredkv.store.blocks import BlockStore, Holder
from tieredkv.store.reads import plan_reads


@dataclasses.dataclass(frozen=True)
class _Room:
    """Where the blocks of a forward go, per row: `copies` tails first get a block of their own."""

    through: int
    hot: int
    copies: int


def begin(store: BlockStore, holder: Holder, new: int) -> ForwardPlan:
    """Plan a forward of `new` tokens in each row.

    Raises:
        BudgetError: it does not fit; nothing was written and the cache is as it was.
    """
    with store.lock:
        settle(store, holder)
        store.forwards += 1
        rows, past, size = len(holder.table), holder.tokens, store.block_size
        plan = ForwardPlan(number=store.forwards, past=past, new=new, rows=rows)
        holder.last_access = plan.number
        if new == 0 or rows == 0:
            holder.plan = plan
            return plan
        needed = _room(store, holder, new)
        window = store.budget.window_tokens
        protected = _protected(store, holder)
        below: list[tuple[str, int]] = []
        try:
            store.make_room(needed.hot * rows + needed.copies, protected, window, "room")
            _own_tails(store, holder)
            places = store.take_lower(needed.through * rows) if needed.through else []
            below += [(role, slot) for role, slots in places for slot in slots]
            _append_blocks(store, holder, needed, below)
            plan = dataclasses.replace(
                plan,
                hot_writes=_hot_writes(holder, past, new, size),
                through_writes=_through_writes(holder, past, size, -(-past // size), needed.through),
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
            for write in plan.through_writes:
                for block in write.blocks:
                    for event in store.through.pop(block.id, ()):
                        event.wait()
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
            holder.seen_version += 1
            holder.table.truncate(holder.tokens)
            if not holder.tokens:
                holder.table.clear()  # the next forward may have another number of rows


def crop(store: BlockStore, holder: Holder, tokens: int) -> None:
    """Keep the first `tokens` tokens of each row; a block that is cut is copied before it is written again."""
    with store.lock:
        if tokens >= holder.tokens:
            return
        holder.tokens = max(tokens, 0)
        holder.table.truncate(holder.tokens)
        holder.seen_version += 1


def settle(store: BlockStore, holder: Holder) -> None:
    """Seal full blocks, write down what is outside the window, and hold the watermark."""
    with store.lock:
        # Of other caches too: one that rests after its last forward must not keep the others out of hot.
        sealed = any([_seal(each, store.block_size) for each in store.holders])
        store.poll()
        if not sealed or not store.lower_tiers():
            return
        slots, window = store.hot.slots, store.budget.window_tokens
        if slots.used <= store.settings.write_down_at * slots.total:
            return
        protected = _protected(store, holder)
        outside = [c for c in store.candidates(protected) if c.distance >= window]
        outside = leaving_order(outside, window)
        missing = [c.block for c in outside if not c.block.is_stored_below and not store.is_moving(c.block)]
        with contextlib.suppress(BudgetError):  # a disk that filled up meanwhile: these blocks stay hot for now
            store.start_move(missing[: store.lower_free()], "hot", "window")
        over = slots.used - int(store.settings.watermark * slots.total)
        if over > 0:
            ready = [c.block for c in outside if c.block.is_stored_below or store.is_moving(c.block)]
            store.leave_hot(ready[:over], "watermark")


def _seal(holder: Holder, size: int) -> bool:
    """Seal the blocks that are full of committed tokens; whether there were any."""
    found = False
    for row in holder.table:
        for index in range(holder.tokens // size - 1, -1, -1):
            if row[index].sealed:
                break
            row[index].sealed = found = True
    return found


def _protected(store: BlockStore, holder: Holder) -> set[int]:
    """Ids of the blocks the next forward writes into: the last of each row, where it is not full."""
    if not holder.tokens % store.block_size:
        return set()
    return {row[-1].id for row in holder.table}


def _is_writable(block: Block) -> bool:
    # A block that was written straight down and then cut has a copy below before it is sealed.
    return not block.sealed and block.refs == 1 and block.hot is not None and not block.is_stored_below


def tail_copies(holder: Holder) -> int:
    """How many slots the rows need so that each has a last block of its own; the last to leave a block keeps it."""
    tails = [row[-1] for row in holder.table]
    sharing = {block.id: tails.count(block) for block in tails}
    kept = sum(block.hot is not None and block.refs == sharing[block.id] for block in dict.fromkeys(tails))
    return len(tails) - kept


def _room(store: BlockStore, holder: Holder, new: int) -> _Room:
    """How many blocks of each row go where.

    Raises:
        BudgetError: no division fits.
    """
    size, past, rows = store.block_size, holder.tokens, len(holder.table)
    first_new, end = -(-past // size), -(-(past + new) // size)
    blocks = end - first_new
    copies = tail_copies(holder) if past % size else 0
    if not blocks and not copies:
        return _Room(0, 0, 0)
    window = store.budget.window_tokens
    window_start = past + new - window
    in_window = sum((index + 1) * size > window_start for index in range(max(first_new, window_start // size), end))
    needed = max(min(in_window, blocks), min(blocks, 1))
    order = leaving_order(store.candidates(_protected(store, holder)), window)
    slots = store.hot.slots
    room_total = slots.free + len(order)
    if blocks:
        needed = min(needed, max((room_total - copies) // rows, 1))
    if rows * min(needed, blocks) + copies > room_total:
        raise BudgetError(
            "The hot tier cannot hold the blocks this forward writes.",
            wanted=f"{rows * min(needed, blocks) + copies} hot slots ({rows} rows)",
            got=f"{room_total} that are free or can be freed, of {slots.total}",
            change="enlarge hot=, use fewer batch rows, or close other caches of the store",
            tier="hot",
        )
    spare = min(slots.free, int(store.settings.watermark * slots.total) - slots.used) - rows * needed - copies
    _, hot = split_new_blocks(blocks, needed, spare // rows)
    free_below = store.lower_free()
    missing = [0]
    for candidate in order:
        block = candidate.block
        missing.append(missing[-1] + (not block.is_stored_below and not store.is_moving(block)))
    shortfall = 0
    for hot_blocks in range(hot, blocks + 1):
        leave = max(rows * hot_blocks + copies - slots.free, 0)
        if leave > len(order):
            break
        shortfall = rows * (blocks - hot_blocks) + missing[leave] - free_below
        if shortfall <= 0:
            return _Room(blocks - hot_blocks, hot_blocks, copies)
    if not store.lower_tiers() and store.cold_failure is None:
        raise BudgetError(
            "The context does not fit in hot, and there is no lower tier.",
            wanted=f"{rows * blocks + copies} hot slots",
            got=f"{room_total} that are free or can be freed, of {slots.total}",
            change="enlarge hot=, or give warm= or cold=",
            tier="hot",
        )
    raise store.no_room_below(max(shortfall, 1))


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
        store.load_hot(old, target)
        return
    source = old.hot
    store.clean_hot(target)  # also notes that it is used, so that it is cleaned again before it holds another block

    def copy() -> None:
        for layer in range(len(store.layers)):
            for pool in store.hot.planes[layer]:
                pool[:, target].copy_(pool[:, source])

    store.device.run(copy, reads=[("hot", source)], writes=[("hot", target)], name="copy tail")


def _append_blocks(store: BlockStore, holder: Holder, needed: _Room, below: list[tuple[str, int]]) -> None:
    """Add each row's new blocks: first those that go straight down, into slots taken off `below`, then the hot ones."""
    for row_index, row in enumerate(holder.table):
        for _ in range(needed.through):
            role, slot = below.pop(0)
            block = store.new_block()
            setattr(block, role, slot)
            store.through[block.id] = []
            holder.table.append(row_index, block)
        for _ in range(needed.hot):
            last = row[-1].hot if row else None
            slot = store.take_hot(None if last is None else last + 1)
            store.clean_hot(slot)
            holder.table.append(row_index, store.new_block(hot=slot))


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


def _through_writes(holder: Holder, past: int, size: int, first_new: int, through: int) -> tuple[ThroughWrite, ...]:
    writes: list[ThroughWrite] = []
    for index, row in enumerate(holder.table):
        for role in ("warm", "cold"):
            part = [
                (number, slot)
                for number in range(first_new, first_new + through)
                if (slot := getattr(row[number], role)) is not None
            ]
            if part:
                numbers, slots = zip(*part, strict=True)
                blocks = tuple(row[number] for number in numbers)
                writes.append(ThroughWrite(index, numbers[0] * size - past, blocks, role, slots))
    return tuple(writes)


def _fill(holder: Holder, past: int, total: int, size: int) -> None:
    for row in holder.table:
        for number in range(past // size, len(row)):
            row[number].tokens = min(total - number * size, size)
