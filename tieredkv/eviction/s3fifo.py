"""S3-FIFO: a small queue for what came once, a main queue for what was used again, and a memory of what went.

Yang, Zhang, Qiu, Yue, Rashmi: FIFO Queues are All You Need for Cache Eviction, SOSP 2023.

Imports: this package.
"""

from __future__ import annotations

from collections.abc import Callable

from tieredkv.eviction.base import EvictionPolicy, Key, nothing_in_use
from tieredkv.eviction.leaves import LeafQueue

# As in the paper: a tenth of the places is for newcomers, as many keys are remembered as are present, and uses count up
# to three.
_SMALL_SHARE = 0.1
_MOST_USES = 3


class S3FifoPolicy(EvictionPolicy[Key]):
    """Leaves of the small queue go first while it has more than a tenth of all keys, unless they were used again.

    Those move to the main queue, where a leaf goes round once for each use. What went out of the small queue and comes
    back while it is remembered goes to the main queue at once.
    """

    name = "s3fifo"

    def __init__(self) -> None:
        super().__init__()
        self._small: LeafQueue[Key] = LeafQueue()
        self._main: LeafQueue[Key] = LeafQueue()
        self._gone: dict[Key, None] = {}
        self._uses: dict[Key, int] = {}

    def victim(self, in_use: Callable[[Key], bool] = nothing_in_use) -> Key | None:
        while True:
            small_first = len(self._small) > _SMALL_SHARE * len(self)
            first, second = (self._small, self._main) if small_first else (self._main, self._small)
            queue, key = first, first.oldest(self.has_children, in_use)
            if key is None:
                queue, key = second, second.oldest(self.has_children, in_use)
            if key is None or not self._uses[key]:
                return key
            if queue is self._small:
                self._small.discard(key)
                self._uses[key] = 0
            else:
                self._uses[key] -= 1
            self._main.put(key, leaf=True)

    def _on_insert(self, key: Key) -> None:
        self._uses[key] = 0
        queue = self._small
        if key in self._gone:
            del self._gone[key]
            queue = self._main
        queue.put(key, leaf=not self.has_children(key))

    def _on_touch(self, key: Key) -> None:
        self._uses[key] = min(_MOST_USES, self._uses[key] + 1)

    def _on_remove(self, key: Key) -> None:
        del self._uses[key]
        if key in self._small:
            self._small.discard(key)
            self._gone[key] = None
            while len(self._gone) > len(self):
                del self._gone[next(iter(self._gone))]
        else:
            self._main.discard(key)

    def _on_bared(self, key: Key) -> None:
        (self._small if key in self._small else self._main).bare(key)
