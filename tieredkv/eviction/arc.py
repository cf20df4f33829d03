"""ARC: what was used once and what was used again, in a proportion that follows where misses would have been hits.

Megiddo, Modha: ARC: A Self-Tuning, Low Overhead Replacement Cache, FAST 2003.

Imports: this package.
"""

from __future__ import annotations

from collections.abc import Callable

from tieredkv.eviction.base import EvictionPolicy, Key, nothing_in_use
from tieredkv.eviction.leaves import LeafQueue


class ArcPolicy(EvictionPolicy[Key]):
    """Two queues in order of last use, each with a memory of the keys that went out of it.

    A key that comes back shows that its queue was too short: `_once_target`, the length at which keys that were used
    once are not the first to go, moves towards it. The paper's capacity is the number of keys present.
    """

    name = "arc"

    def __init__(self) -> None:
        super().__init__()
        self._once: LeafQueue[Key] = LeafQueue()
        self._again: LeafQueue[Key] = LeafQueue()
        self._once_gone: dict[Key, None] = {}
        self._again_gone: dict[Key, None] = {}
        self._once_target = 0.0

    def victim(self, in_use: Callable[[Key], bool] = nothing_in_use) -> Key | None:
        once_first = len(self._once) > self._once_target
        first, second = (self._once, self._again) if once_first else (self._again, self._once)
        key = first.oldest(self.has_children, in_use)
        return second.oldest(self.has_children, in_use) if key is None else key

    def _on_insert(self, key: Key) -> None:
        queue = self._again
        once, again = len(self._once_gone), len(self._again_gone)
        if key in self._once_gone:
            self._once_target = min(float(len(self)), self._once_target + max(1.0, again / once))
            del self._once_gone[key]
        elif key in self._again_gone:
            self._once_target = max(0.0, self._once_target - max(1.0, once / again))
            del self._again_gone[key]
        else:
            queue = self._once
        queue.put(key, leaf=not self.has_children(key))

    def _on_touch(self, key: Key) -> None:
        self._once.discard(key)
        self._again.put(key, leaf=not self.has_children(key))

    def _on_remove(self, key: Key) -> None:
        if key in self._once:
            self._once.discard(key)
            self._once_gone[key] = None
        else:
            self._again.discard(key)
            self._again_gone[key] = None
        present = len(self)
        while self._once_gone and len(self._once) + len(self._once_gone) > present:
            del self._once_gone[next(iter(self._once_gone))]
        while self._again_gone and len(self._once_gone) + len(self._again_gone) > present:
            del self._again_gone[next(iter(self._again_gone))]

    def _on_bared(self, key: Key) -> None:
        (self._once if key in self._once else self._again).bare(key)
