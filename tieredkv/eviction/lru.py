"""Least recently used, leaves first.

Imports: this package.
"""

from __future__ import annotations

from collections.abc import Callable

from tieredkv.eviction.base import EvictionPolicy, Key, nothing_in_use
from tieredkv.eviction.leaves import LeafQueue


class LruPolicy(EvictionPolicy[Key]):
    """The leaf that was used longest ago goes first."""

    name = "lru"

    def __init__(self) -> None:
        super().__init__()
        self._queue: LeafQueue[Key] = LeafQueue()

    def victim(self, in_use: Callable[[Key], bool] = nothing_in_use) -> Key | None:
        return self._queue.oldest(self.has_children, in_use)

    def _on_insert(self, key: Key) -> None:
        self._queue.put(key, leaf=not self.has_children(key))

    def _on_touch(self, key: Key) -> None:
        self._queue.put(key, leaf=not self.has_children(key))

    def _on_remove(self, key: Key) -> None:
        self._queue.discard(key)

    def _on_bared(self, key: Key) -> None:
        self._queue.bare(key)
