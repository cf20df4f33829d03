"""Who stays hot and who leaves: the position window first, the watermark as the net, priority as the tie-break.

A cache above its quota gives up its own blocks before others give up theirs. Copies ahead of need that have to wait
go in the order of leaving, and the longer they wait the earlier.

Pure decisions over positions and counts, so that two runs with the same history decide the same, however long copies
took. Nothing here moves a byte.

Imports: config, block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from tieredkv.block import Block
from tieredkv.config import DEFAULT_WINDOW_TOKENS

AGEING_FORWARDS = 8
"""A copy that has waited for so many forwards counts as one priority lower, and so goes earlier."""
HYSTERESIS_SHARE = 16
"""One part in so many of the hot slots, and at least one, stays free below the watermark when blocks are promoted."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A hot block that may leave.

    Args:
        block: the block.
        distance: tokens from the end of its row to the end of the block; of several rows, the smallest.
        last_access: number of the forward that last used its cache; of several caches, the latest.
        priority: its cache's priority, low leaves first; of several caches, the highest.
        owner: number of the cache that alone holds it, or None where several do.
        sink: holds first tokens of a row that are to stay.
    """

    block: Block
    distance: int
    last_access: int
    priority: int
    owner: int | None = None
    sink: bool = False

    def shared_with(self, other: Candidate) -> Candidate:
        """The same block, seen from another place of a table too."""
        return Candidate(
            self.block,
            min(self.distance, other.distance),
            max(self.last_access, other.last_access),
            max(self.priority, other.priority),
            self.owner if self.owner == other.owner else None,
            self.sink or other.sink,
        )


def window_blocks(window_tokens: int, block_size: int) -> int:
    """The most blocks that the last `window_tokens` tokens of a row can touch."""
    return (window_tokens + block_size - 2) // block_size + 1


def fitting_window(hot_slots: int, rows: int, block_size: int, sink_blocks: int = 0) -> int:
    """The default window in tokens: 2,048, or what leaves each row its sinks and a slot to write into if less."""
    spare_blocks = max(hot_slots // max(rows, 1) - 1 - sink_blocks, 0)
    return max(min(DEFAULT_WINDOW_TOKENS, spare_blocks * block_size), 1)


def leaving_order(candidates: Iterable[Candidate], window_tokens: int) -> list[Candidate]:
    """Candidates in the order in which they leave hot.

    Blocks outside the window go before blocks inside it, and sinks last; then low priority, then longest idle, then
    farthest from the end of the row. The block id breaks ties, so that the order never depends on timing.
    """
    return sorted(
        candidates,
        key=lambda c: (c.sink, c.distance < window_tokens, c.priority, c.last_access, -c.distance, c.block.id),
    )


def leaving(order: Sequence[Candidate], owner: int, surplus: int, deficit: int) -> list[Candidate]:
    """Which candidates leave so that a cache keeps its quota and slots become free.

    Args:
        order: of leaving.
        owner: number of the cache that needs room.
        surplus: blocks of its own that have to leave, whatever is free.
        deficit: how many have to leave in all.
    """
    if surplus <= 0:
        return list(order[: max(deficit, 0)])
    own = [candidate for candidate in order if candidate.owner == owner][:surplus]
    chosen = {candidate.block.id for candidate in own}
    others = [candidate for candidate in order if candidate.block.id not in chosen]
    return own + others[: max(deficit - len(own), 0)]


def waiting_order(order: Sequence[Candidate], since: Mapping[int, int], forward: int) -> list[Candidate]:
    """Candidates in the order in which they are copied down ahead of need.

    Args:
        order: of leaving.
        since: for the ids of blocks that wait, the forward from which on they do.
        forward: number of this one.
    """

    def urgency(place: int) -> tuple[int, int]:
        candidate = order[place]
        waited = forward - since.get(candidate.block.id, forward)
        return candidate.priority - waited // AGEING_FORWARDS, place

    return [order[place] for place in sorted(range(len(order)), key=urgency)]


def promotion_slots(total: int, watermark: float) -> int:
    """Hot slots that promotion fills: less than the watermark, so that the next block does not push one out again."""
    return int(watermark * total) - max(total // HYSTERESIS_SHARE, 1)


def split_new_blocks(new_blocks: int, window_needed: int, room: int) -> tuple[int, int]:
    """How many of a row's new blocks go straight to a lower tier, and how many are written hot.

    Args:
        new_blocks: blocks the forward adds to the row.
        window_needed: of these, how many lie in the window or are not full: they are written hot.
        room: slots that are free for the rest.

    Returns:
        (through, hot), in row order: the first `through` blocks go down.
    """
    hot = min(new_blocks, window_needed + max(room, 0))
    return new_blocks - hot, hot
