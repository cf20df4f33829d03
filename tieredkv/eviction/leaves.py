"""A queue of keys, of which only leaves come out.

Imports: nothing of the package.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class LeafQueue(Generic[Key]):
    """Keys in the order in which they were put; `oldest` is the first leaf among them.

    A heap of leaves only, since a key with children may stand before its whole path: looking for a leaf behind it
    would cost the length of the path for each victim. Entries of keys that moved are left behind, and dropped when
    they come up.
    """

    def __init__(self) -> None:
        self._clock = itertools.count()
        self._places: dict[Key, int] = {}
        self._leaves: list[tuple[int, Key]] = []

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def put(self, key: Key, leaf: bool) -> None:
        """Add a key at the end, or move it there."""
        self._places[key] = next(self._clock)
        if leaf:
            self.bare(key)

    def bare(self, key: Key) -> None:
        """A key of the queue has become a leaf; it keeps its place."""
        heapq.heappush(self._leaves, (self._places[key], key))
        if len(self._leaves) > 2 * len(self._places) + 64:
            self._leaves = sorted({entry for entry in self._leaves if self._places.get(entry[1]) == entry[0]})

    def discard(self, key: Key) -> None:
        """Take a key out, if it is there."""
        self._places.pop(key, None)

    def oldest(self, covered: Callable[[Key], bool], in_use: Callable[[Key], bool]) -> Key | None:
        """The first key that is neither covered (it has children) nor in use; it stays where it is."""
        kept: list[tuple[int, Key]] = []
        found: Key | None = None
        while self._leaves and found is None:
            place, key = self._leaves[0]
            if self._places.get(key) != place or covered(key):
                heapq.heappop(self._leaves)  # a covered one is pushed again when it is bared
            elif in_use(key):
                kept.append(heapq.heappop(self._leaves))
            else:
                found = key
        for entry in kept:
            heapq.heappush(self._leaves, entry)
        return found
