"""How many hits a block's place is worth: learned from how long blocks of its kind waited for their next use.

Beckmann, Chen, Cidon: LHD: Improving Cache Hit Rate by Maximizing Hit Density, NSDI 2018. The index is that of Gittins:
the best ratio, over all times to give up, of the hits until then and the time the place is taken until then.

Imports: nothing of the package.
"""

from __future__ import annotations

import bisect

# Ages are told apart by half-octaves from 64 uses on: fine enough to see when conversations usually go on, and coarse
# enough to fill within minutes. The last bucket begins at 64 * 2^17, eight million uses.
_FIRST_EDGE, _EDGES = 64, 36

# Until a kind has ended this often its densities are those assumed at the start.
_FEWEST_ENDS = 20

# How much of the past still counts after each refresh. With a refresh each 2,048 uses half is forgotten after 14,000.
_KEPT_SHARE = 0.9
_REFRESH_USES = 2048


class HitDensities:
    """Expected hits per use of the store, for blocks of each kind and age; ages are counted in uses of any block.

    Args:
        kinds: how many kinds of blocks there are; a higher kind is assumed to be worth more until it has been seen.
    """

    def __init__(self, kinds: int) -> None:
        self._edges = [int(_FIRST_EDGE * 2 ** (i / 2)) for i in range(_EDGES)]
        starts = [0, *self._edges]
        self._widths = [end - start for start, end in zip(starts, self._edges, strict=False)] + [self._edges[-1]]
        self._hits = [[0.0] * len(starts) for _ in range(kinds)]
        self._ends = [[0.0] * len(starts) for _ in range(kinds)]
        # Least recently used first, and what was used more often counts as younger.
        self._densities = [[(kind + 1) / (start + _FIRST_EDGE) for start in starts] for kind in range(kinds)]
        self._until_refresh = _REFRESH_USES

    def density(self, kind: int, age: int) -> float:
        """Hits per use of the store that a block is expected to bring, if it is kept for as long as that pays."""
        return self._densities[kind][bisect.bisect_right(self._edges, age)]

    def hit(self, kind: int, age: int) -> None:
        """A block of that kind was used again at that age, whether it was still there or not."""
        bucket = bisect.bisect_right(self._edges, age)
        self._hits[kind][bucket] += 1
        self._ends[kind][bucket] += 1

    def lost(self, kind: int, age: int) -> None:
        """A block of that kind was not used until that age, and nobody knows of it any longer."""
        self._ends[kind][bisect.bisect_right(self._edges, age)] += 1

    def tick(self) -> None:
        """A block was used; now and then the densities follow what was seen, and the past fades."""
        self._until_refresh -= 1
        if self._until_refresh:
            return
        self._until_refresh = _REFRESH_USES
        for hits, ends, densities in zip(self._hits, self._ends, self._densities, strict=True):
            if sum(ends) >= _FEWEST_ENDS:
                densities[:] = gittins(hits, ends, self._widths)
            hits[:] = [count * _KEPT_SHARE for count in hits]
            ends[:] = [count * _KEPT_SHARE for count in ends]


def gittins(hits: list[float], ends: list[float], widths: list[int]) -> list[float]:
    """The Gittins index at the start of each bucket of ages.

    Args:
        hits: blocks that were used again at an age in the bucket.
        ends: blocks whose wait ended in the bucket, by a hit or by being forgotten.
        widths: uses that pass from the start of each bucket to its end.

    Returns:
        for each bucket the largest, over all later buckets, of hits until there over uses waited until there.
    """
    waiting, taken = 0.0, [0.0] * len(ends)
    for bucket in reversed(range(len(ends))):
        waiting += ends[bucket]
        # One more block that never returns: a bucket that hardly any reached is no promise.
        taken[bucket] = (waiting + 1.0) * widths[bucket]
    indices = []
    for first in range(len(ends)):
        best = brought = cost = 0.0
        for bucket in range(first, len(ends)):
            brought += hits[bucket]
            cost += taken[bucket]
            best = max(best, brought / cost)
        indices.append(best)
    return indices
