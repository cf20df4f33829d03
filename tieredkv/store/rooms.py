"""Where the blocks of a forward go: hot, straight to a lower tier, or nowhere. Worked out before anything is written.

Imports: errors, placement, blocks.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Literal

from tieredkv.errors import BudgetError
from tieredkv.placement import Candidate, leaving, leaving_order, split_new_blocks
from tieredkv.store.blocks import BlockStore, Holder


@dataclasses.dataclass(frozen=True)
class Room:
    """Where the new blocks of each row go.

    Args:
        numbers: places of the new blocks in the row.
        gone: of these, the ones that are not stored.
        sinks: of the others, how many of the first are written hot.
        through: how many after them go straight down.
        hot: how many are written hot, sinks included.
        copies: tails that first get a block of their own, over all rows.
    """

    numbers: range
    gone: range
    sinks: int
    through: int
    hot: int
    copies: int

    def places(self) -> Iterator[Literal["hot", "through", "gone"]]:
        """The place of each new block of a row, in order."""
        kept = 0
        for number in self.numbers:
            if number in self.gone:
                yield "gone"
                continue
            yield "through" if self.sinks <= kept < self.sinks + self.through else "hot"
            kept += 1


def protected_ids(store: BlockStore, holder: Holder) -> set[int]:
    """Ids of the blocks the next forward writes into: the last of each row, where it is not full."""
    if not holder.tokens % store.block_size:
        return set()
    return {row[-1].id for row in holder.table}


def tail_copies(holder: Holder) -> int:
    """How many slots the rows need so that each has a last block of its own; the last to leave a block keeps it."""
    tails = [row[-1] for row in holder.table]
    sharing = {block.id: tails.count(block) for block in tails}
    kept = sum(block.hot is not None and block.refs == sharing[block.id] for block in dict.fromkeys(tails))
    return len(tails) - kept


def find_room(store: BlockStore, holder: Holder, new: int) -> Room:
    """Where the blocks of `new` tokens in each row go; blocks that are kept for caches to come make way.

    Raises:
        BudgetError: no division fits.
    """
    blocks = 1
    while True:
        try:
            return _room(store, holder, new)
        except BudgetError:
            if store.land():  # what is coming up may leave again, once it is there
                continue
            if not store.reclaim(blocks):
                raise
            blocks *= 2


def _room(store: BlockStore, holder: Holder, new: int) -> Room:
    """How many blocks of each row go where.

    Raises:
        BudgetError: no division fits.
    """
    size, past, rows = store.block_size, holder.tokens, len(holder.table)
    first_new, end = -(-past // size), -(-(past + new) // size)
    gone = _gone(store, past + new, first_new)
    blocks = end - first_new - len(gone)
    copies = tail_copies(holder) if past % size else 0
    if not blocks and not copies:
        return Room(range(first_new, end), gone, 0, 0, 0, 0)
    window = store.budget.window_tokens
    first_seen = max(first_new, (past + new - window) // size)
    sinks = max(min(store.settings.sink_blocks, first_seen, end) - first_new, 0)
    needed = max(min(sinks + end - first_seen, blocks), min(blocks, 1))
    order = leaving_order(store.candidates(protected_ids(store, holder)), window)
    slots = store.hot.slots
    room_total = slots.free + len(order)
    if holder.quota_slots is not None:
        own = sum(candidate.owner == holder.number for candidate in order)
        room_total = min(room_total, own - holder.surplus(0))
    if rows * needed + copies > room_total and store.land():
        return _room(store, holder, new)  # what comes up for another cache gives way before this one's window does
    if blocks:
        needed = min(needed, max((room_total - copies) // rows, 1))
    if rows * min(needed, blocks) + copies > room_total:
        raise BudgetError(
            "The hot tier cannot hold the blocks this forward writes.",
            wanted=f"{rows * min(needed, blocks) + copies} hot slots ({rows} rows)",
            got=f"{room_total} that are free or can be freed, of {slots.total}",
            change="enlarge hot= (or hot_quota=), use fewer batch rows, or close other caches of the store",
            tier="hot",
        )
    spare = min(slots.free, int(store.settings.watermark * slots.total) - slots.used)
    if holder.quota_slots is not None:
        spare = min(spare, -holder.surplus(0))
    if store.settings.placement == "window":
        spare = 0
    _, hot = split_new_blocks(blocks, needed, (spare - rows * needed - copies) // rows)
    free_below, missing = store.lower_free(), _Missing(store, holder, order)
    shortfall = 0
    for hot_blocks in range(hot, blocks + 1):
        slots_needed = rows * hot_blocks + copies
        if slots_needed > room_total:
            break
        shortfall = rows * (blocks - hot_blocks) + missing.of(slots_needed) - free_below
        if shortfall <= 0:
            sinks = min(sinks, max(hot_blocks - 1, 0))
            return Room(range(first_new, end), gone, sinks, blocks - hot_blocks, hot_blocks, copies)
    if not store.lower_tiers() and store.cold_failure is None:
        raise BudgetError(
            "The context does not fit in hot, and there is no lower tier.",
            wanted=f"{rows * blocks + copies} hot slots",
            got=f"{room_total} that are free or can be freed, of {slots.total}",
            change="enlarge hot=, or give warm= or cold=",
            tier="hot",
        )
    raise store.no_room_below(max(shortfall, 1))


def _gone(store: BlockStore, total: int, first_new: int) -> range:
    """Of the new blocks those that no later forward sees: they are not stored at all."""
    if store.visibility is None:
        return range(0)
    hidden = store.visibility.droppable(total)
    return range(max(hidden.start, first_new), max(hidden.stop, hidden.start, first_new))


class _Missing:
    """How many blocks have to be copied down before so many slots are free for a holder."""

    def __init__(self, store: BlockStore, holder: Holder, order: Sequence[Candidate]) -> None:
        self._holder, self._order, self._free = holder, order, store.hot.slots.free
        self._surplus = holder.surplus(0)
        self._is_missing = [not c.block.is_stored_below and not store.is_moving(c.block) for c in order]
        self._counts = [0, *itertools.accumulate(self._is_missing)]

    def of(self, slots: int) -> int:
        """Copies for `slots` slots."""
        deficit, surplus = max(slots - self._free, 0), self._surplus + slots
        if self._holder.quota_slots is None or surplus <= 0:
            return self._counts[min(deficit, len(self._order))]
        places = {candidate.block.id: place for place, candidate in enumerate(self._order)}
        chosen = leaving(self._order, self._holder.number, surplus, deficit)
        return sum(self._is_missing[places[candidate.block.id]] for candidate in chosen)
