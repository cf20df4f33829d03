"""A cache's share where several use one store: a limit of hot slots, and a bucket of copies ahead of need.

The bucket is filled by forwards and not by time, so that what is copied when depends on the history alone. What a
forward needs is never held back; only copies ahead of need wait.

Imports: errors, placement, blocks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from tieredkv.errors import BudgetError
from tieredkv.placement import Candidate, leaving_order, waiting_order
from tieredkv.store.blocks import BlockStore, Holder

BURST_FORWARDS = 4
"""A cache saves up the moves of at most so many forwards."""


def refill(store: BlockStore, holder: Holder) -> None:
    """A forward of the cache begins: it may have more blocks copied ahead of need."""
    rate = store.settings.moves_per_forward
    if rate is not None:
        holder.moves_left = min(holder.moves_left + rate, BURST_FORWARDS * rate)


def moves_ahead(store: BlockStore, missing: Sequence[Candidate]) -> list[Candidate]:
    """Which of the blocks that are not stored below are copied down now; `store.waiting` keeps which others wait.

    Blocks that several caches hold count for none of them.
    """
    limit, rate = store.settings.queue_blocks, store.settings.moves_per_forward
    if rate is None:
        store.waiting = {}
        return list(missing)
    holders = {holder.number: holder for holder in store.holders}
    now, later = list[Candidate](), list[Candidate]()
    for candidate in waiting_order(missing, store.waiting, store.forwards):
        owner = None if candidate.owner is None else holders[candidate.owner]
        if owner is not None and owner.moves_left <= 0:
            later.append(candidate)
            continue
        if owner is not None:
            owner.moves_left -= 1
        now.append(candidate)
    # Those beyond the limit are found again at a later forward; only how long they waited is not known then.
    since = store.waiting
    store.waiting = {c.block.id: since.get(c.block.id, store.forwards) for c in later[:limit]}
    return now


def hold(store: BlockStore) -> None:
    """Make caches that hold more than their quota give up hot slots: after others let go of what they shared."""
    for holder in sorted(store.holders, key=lambda each: each.number):
        surplus = 0 if holder.keeps or holder.quota_slots is None else holder.surplus(0)
        if surplus <= 0:
            continue
        own = [candidate for candidate in store.candidates(set()) if candidate.owner == holder.number]
        order = leaving_order(own, store.budget.window_tokens)
        with contextlib.suppress(BudgetError):  # nothing fits below: the blocks stay, and new ones are refused
            store.leave_hot([candidate.block for candidate in order[:surplus]], "quota")
