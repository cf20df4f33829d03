"""Least hit density: the leaf goes first whose place is expected to bring the fewest hits.

Imports: this package.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tieredkv.eviction.base import EvictionPolicy, Key, nothing_in_use
from tieredkv.eviction.densities import HitDensities
from tieredkv.eviction.leaves import LeafQueue

# Blocks used once, twice, .., five times and more. In chats a block that came once returns with a chance of 1 in 4, one
# that came five times with 2 in 3: this tells more than recency.
_KINDS = 5

# Keys of blocks that went, remembered for as many blocks as are present times this, but at least and at most so many:
# a conversation goes on after several turnovers of a small store, and a key costs some 300 bytes.
_REMEMBERED_SHARE, _LEAST_REMEMBERED, _MOST_REMEMBERED = 8, 4096, 1 << 18


class _Seen(NamedTuple):
    kind: int
    at: int  # of the policy's clock, which counts uses


class LhdPolicy(EvictionPolicy[Key]):
    """Blocks are told apart by how often they were used; each such kind is a queue in order of last use.

    Of the queues' oldest leaves the one goes whose hit density, learned for its kind and age (`HitDensities`), is the
    least. What is remembered of blocks that went shows how long a wait would have paid, and a block that returns is of
    the kind it would have been of.
    """

    name = "lhd"

    def __init__(self) -> None:
        super().__init__()
        self._densities = HitDensities(_KINDS)
        self._queues: list[LeafQueue[Key]] = [LeafQueue() for _ in range(_KINDS)]
        self._seen: dict[Key, _Seen] = {}
        self._gone: dict[Key, _Seen] = {}
        self._clock = 0

    def victim(self, in_use: Callable[[Key], bool] = nothing_in_use) -> Key | None:
        found, least = None, 0.0
        for kind, queue in enumerate(self._queues):
            key = queue.oldest(self.has_children, in_use)
            if key is not None:
                density = self._densities.density(kind, self._clock - self._seen[key].at)
                if found is None or density < least:
                    found, least = key, density
        return found

    def _on_insert(self, key: Key) -> None:
        self._use(key, self._gone.pop(key, None))

    def _on_touch(self, key: Key) -> None:
        seen = self._seen[key]
        self._queues[seen.kind].discard(key)
        self._use(key, seen)

    def _on_remove(self, key: Key) -> None:
        seen = self._seen.pop(key)
        self._queues[seen.kind].discard(key)
        self._gone[key] = seen
        most = min(_MOST_REMEMBERED, max(_LEAST_REMEMBERED, _REMEMBERED_SHARE * len(self)))
        while len(self._gone) > most:
            forgotten = self._gone.pop(next(iter(self._gone)))
            self._densities.lost(forgotten.kind, self._clock - forgotten.at)

    def _on_bared(self, key: Key) -> None:
        self._queues[self._seen[key].kind].bare(key)

    def _use(self, key: Key, before: _Seen | None) -> None:
        self._clock += 1
        self._densities.tick()
        kind = 0
        if before is not None:
            self._densities.hit(before.kind, self._clock - before.at)
            kind = min(before.kind + 1, _KINDS - 1)
        self._seen[key] = _Seen(kind, self._clock)
        self._queues[kind].put(key, leaf=not self.has_children(key))
