"""The most hits that any eviction could have: Belady's optimum, which knows the future.

Belady: A study of replacement algorithms for a virtual-storage computer, IBM Systems Journal 5(2), 1966.

Imports: eviction.traces.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from tieredkv.eviction.traces import Request


def optimal_hits(requests: Sequence[Request], capacity: int) -> int:
    """Hits of the best possible choice of what to keep, blocks counted one by one.

    The block goes whose next use is farthest, and a block is not taken in when its own is farthest or there is none.
    That keeps whole prefixes by itself: who uses a block uses all blocks before it first, so of a path the last goes
    first, and no policy that keeps prefixes, or does not, has more hits.

    Args:
        requests: a trace whose ids stand for prefixes (`parents_of` accepts it).
        capacity: blocks that fit.
    """
    uses = [block for request in requests for block in request.blocks]
    never = len(uses)
    nexts, coming = [never] * len(uses), dict[int, int]()
    for at in reversed(range(len(uses))):
        nexts[at] = coming.get(uses[at], never)
        coming[uses[at]] = at
    hits, present = 0, dict[int, int]()  # block -> its next use
    farthest: list[tuple[int, int]] = []  # (- next use, block); entries of earlier uses stay behind
    for block, following in zip(uses, nexts, strict=True):
        hits += present.pop(block, None) is not None
        if following == never:
            continue
        while farthest and present.get(farthest[0][1]) != -farthest[0][0]:
            heapq.heappop(farthest)
        if len(present) >= capacity:
            if not farthest or following >= -farthest[0][0]:
                continue
            del present[heapq.heappop(farthest)[1]]
        present[block] = following
        heapq.heappush(farthest, (-following, block))
    return hits
