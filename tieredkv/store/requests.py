"""What a caller asks of a cache apart from forwards: reserve, demote, promote; and what is done ahead of them.

Imports: errors, block, placement, inflight, blocks, planner, rooms.
"""

from __future__ import annotations

from collections.abc import Sequence

from tieredkv.block import LOWER, Block
from tieredkv.errors import BudgetError, ConfigError
from tieredkv.inflight import Move, read_from
from tieredkv.placement import promotion_slots
from tieredkv.store.blocks import BlockStore, Holder
from tieredkv.store.planner import settle
from tieredkv.store.rooms import tail_copies


def reserve(store: BlockStore, holder: Holder | None, tokens: int) -> None:
    """Check that `tokens` tokens of each row fit in all tiers together; of one row while there is none.

    Args:
        store: of the blocks.
        holder: the cache, or None for one that has no place in the store yet; then a store that is closed, and with it
            what the tokens could be compared with, refuses nothing.
        tokens: of each row, those that are there included.

    Raises:
        BudgetError: they do not; says by how much.
    """
    with store.lock:
        store.let_dropped_go()
        if holder is None and store.is_closed:
            return
        store.wait_all()
        holder = holder or store.holder()  # gone at the end of this call
        rows, size = max(len(holder.table), 1), store.block_size
        dropped = 0 if store.visibility is None else len(store.visibility.droppable(tokens))
        have = sum(not block.gone for row in holder.table for block in row[: -(-holder.tokens // size)])
        needed = max((-(-tokens // size) - dropped) * rows - have, 0)
        needed += tail_copies(holder) if needed > 0 and holder.tokens % size else 0
        room = _room(store, holder)
        if needed > room and store.reclaim(needed - room):
            room = _room(store, holder)
        if needed > room:
            block_bytes = store.hot.slot_bytes
            tier = _setting_of((store.lower_tiers() or ["hot"])[-1])
            raise BudgetError(
                f"{tokens} tokens of {rows} rows do not fit in all tiers together.",
                wanted=f"{needed * block_bytes} more bytes ({needed} blocks)",
                got=f"room for {room} blocks, {(needed - room) * block_bytes} bytes short",
                change=f"enlarge {tier}=, or fewer tokens or rows",
                tier=tier,
            )


def _room(store: BlockStore, holder: Holder) -> int:
    """Blocks that a cache could have beside those it has."""
    duplicates = sum(1 for c in store.candidates(set()) if c.block.is_stored_below)
    free = store.hot.slots.free
    if holder.quota_slots is not None:
        free = min(free, max(holder.quota_slots - holder.own_hot_slots(), 0))
    return free + store.lower_free() + duplicates


def _setting_of(tier: str) -> str:
    """The setting that gives a tier its room: what is packed lies in the room of hot."""
    return "hot" if tier == "packed" else tier


def demote(store: BlockStore, holder: Holder, tier: str) -> int:
    """Move every sealed block that is not there yet, nor further down, to a lower tier.

    Raises:
        ConfigError: no such tier.
        BudgetError: they do not fit there.
    """
    if tier not in LOWER or tier not in store.tiers:
        raise ConfigError(
            "No such tier to demote to.",
            wanted=" or ".join(r for r in LOWER if r in store.tiers) or "a cache with a lower tier",
            got=repr(tier),
            change="give warm=, cold= or hot_codec= when the cache is made",
        )
    with store.lock:
        settle(store, holder)
        store.wait_all()
        sealed = [block for block in holder.table.blocks() if block.sealed]
        moving = [block for block in sealed if block.hot is not None and getattr(block, tier) is None]
        fresh = [block for block in moving if not block.is_stored_below]
        above = LOWER[: LOWER.index(tier)]
        fresh += [block for block in sealed if _source(block, above) != "hot" and getattr(block, tier) is None]
        room = store.tiers[tier].free_blocks()
        if len(fresh) > room:
            raise BudgetError(
                f"The blocks do not fit in {tier}.",
                wanted=f"{len(fresh)} free slots of {store.tiers[tier].slot_bytes} bytes",
                got=f"{room} free",
                change=f"enlarge {_setting_of(tier)}=",
                tier=_setting_of(tier),
            )
        for source in ("hot", *above):
            some = [block for block in fresh if _source(block, above) == source]
            store.start_move(some, source, "request", targets=(tier,))
        store.wait_all()
        left = [block for block in sealed if block.hot is not None and block.is_stored_below]
        for block in left:
            store.drop_copy(block, "hot")
        # A copy that failed leaves its block where it was.
        return len({block.id for block in (*left, *fresh) if block.hot is None and _source(block, above) == "hot"})


def _source(block: Block, above: Sequence[str]) -> str:
    """The tier a block comes from: the first of `above` that stores it, or else hot."""
    return next((role for role in above if getattr(block, role) is not None), "hot")


def promote(store: BlockStore, holder: Holder, *, wait: bool = True) -> int:
    """Bring blocks back to hot, most recent first, to just below the watermark. Their lower copies stay.

    What has no room there comes from disk to memory. Where placement goes by the window alone, blocks outside of it
    stay below.

    Args:
        wait: until they are there; otherwise the cache's next forward does.

    Returns:
        how many blocks come to hot.

    Raises:
        ChecksumError, ColdTierError: with `wait`, a block cannot be had.
    """
    with store.lock:
        settle(store, holder)
        if wait:
            store.wait_all()
        wanted = _below(store, holder)
        moves = _bring_up(store, wanted, _room_above(store, holder))
        if wait:
            store.wait_all()
            for move in moves:
                if move.failure is not None:
                    raise move.failure
        return sum(len(move.blocks) for move in moves if move.target == "hot")


def expect(store: BlockStore, holder: Holder, coming_tokens: int) -> None:
    """A sequence is about to go on: start to bring up what each of its steps would copy, beside room for its tokens.

    Args:
        coming_tokens: new ones of each row.
    """
    with store.lock:
        store.let_dropped_go()
        coming = -(-coming_tokens // store.block_size) * len(holder.table)
        _bring_up(store, _copied(store, holder), _room_above(store, holder) - coming)


def promotable(store: BlockStore, holder: Holder) -> int:
    """How many of the blocks that each step copies find room in hot."""
    with store.lock:
        return max(min(len(_copied(store, holder)), _room_above(store, holder)), 0)


def _copied(store: BlockStore, holder: Holder) -> list[Block]:
    """Of the blocks below hot those that are not attended where they lie."""
    return [block for block in _below(store, holder) if block.warm is None or not store.reads_in_place]


def _below(store: BlockStore, holder: Holder) -> list[Block]:
    """The blocks that could come up, most recent first."""
    first_token = holder.tokens - store.budget.window_tokens if store.settings.placement == "window" else 0
    found: dict[Block, None] = {}
    for row in holder.table:
        for block in reversed(row[max(first_token, 0) // store.block_size :]):
            if block.hot is None and not block.gone and not store.is_moving(block):
                found[block] = None
    return list(found)


def _room_above(store: BlockStore, holder: Holder) -> int:
    """How many blocks may come up."""
    slots = store.hot.slots
    room = promotion_slots(slots.total, store.settings.watermark) - slots.used
    return room if holder.quota_slots is None else min(room, holder.quota_slots - holder.own_hot_slots())


def _bring_up(store: BlockStore, wanted: Sequence[Block], room: int) -> list[Move]:
    """Start copies of the first blocks to hot, and of others from disk to memory."""
    count = max(room, 0)
    moves = store.bring_up(wanted[:count], "request") if wanted[:count] else []
    if store.warm is not None:
        far = [block for block in wanted[count:] if read_from(block) == "cold"]
        moves += store.start_move(far[: store.warm.free_blocks()], "cold", "request", targets=("warm",))
    return moves
