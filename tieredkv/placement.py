"""Who stays hot and who leaves: the position window first, the watermark as the net, priority as the tie-break.

Pure decisions over positions and counts, so that two runs with the same history decide the same, however long copies
took. Nothing here moves a byte.

Imports: block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from tieredkv.block import Block

DEFAULT_WINDOW_TOKENS = 2048


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A hot block that may leave.

    Args:
        block: the block.
        distance: tokens from the end of its row to the end of the block; of several rows, the smallest.
        last_access: number of the forward that last used its cache.
        priority: its cache's priority; low leaves first.
    """

    block: Block
    distance: int
    last_access: int
    priority: int


def window_blocks(window_tokens: int, block_size: int) -> int:
    """The most blocks that the last `window_tokens` tokens of a row can touch."""
    return (window_tokens + block_size - 2) // block_size + 1


def fitting_window(hot_slots: int, rows: int, block_size: int) -> int:
    """The default window in tokens: 2,048, or what leaves each row a slot to write into if that is less."""
    spare_blocks = max(hot_slots // max(rows, 1) - 1, 0)
    return max(min(DEFAULT_WINDOW_TOKENS, spare_blocks * block_size), 1)


def leaving_order(candidates: Iterable[Candidate], window_tokens: int) -> list[Candidate]:
    """Candidates in the order in which they leave hot.

    Blocks outside the window go before blocks inside it; then low priority, then longest idle, then farthest from the
    end of the row. The block id breaks ties, so that the order never depends on timing.
    """
    return sorted(
        candidates,
        key=lambda c: (c.distance < window_tokens, c.priority, c.last_access, -c.distance, c.block.id),
    )


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
