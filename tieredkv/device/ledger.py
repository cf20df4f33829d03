"""What every open store of this process has been promised of each memory, so that together they never exceed it.

The one state of the package that belongs to the process and not to an object: memory does too. Promises are not
allocations: on a CPU a pool takes memory only as it is written, so what is free says nothing of what was promised.

Imports: errors.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

from tieredkv.errors import BudgetError


class Ledger:
    """Promised bytes by owner and memory. Thread-safe; an owner that is gone has no promises."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # re-entrant: an owner may be collected inside any allocation
        self._promises: weakref.WeakKeyDictionary[Any, dict[str, int]] = weakref.WeakKeyDictionary()

    def promise(self, owner: object, memory: str, nbytes: int, total_bytes: int, tier: str) -> None:
        """Promise an owner `nbytes` more of a memory ("cpu", "cuda:0") of `total_bytes`.

        Raises:
            BudgetError: all promises together would exceed it.
        """
        with self._lock:
            others = self.promised_bytes(memory)
            if others + nbytes > total_bytes:
                raise BudgetError(
                    f"All caches together would take more than {memory} has.",
                    wanted=f"at most {total_bytes - others} bytes of {total_bytes}, {others} of which are promised",
                    got=f"{tier}={nbytes} bytes",
                    change=f"a smaller {tier}=, or close other caches first",
                    tier=tier,
                )
            mine = self._promises.setdefault(owner, {})
            mine[memory] = mine.get(memory, 0) + nbytes

    def promised_bytes(self, memory: str) -> int:
        """What all owners together were promised of a memory."""
        with self._lock:
            owners = [reference() for reference in self._promises.keyrefs()]  # a copy: one may be collected meanwhile
            return sum(self._promises.get(owner, {}).get(memory, 0) for owner in owners if owner is not None)

    def release(self, owner: object) -> None:
        """An owner gives up everything it was promised."""
        with self._lock:
            self._promises.pop(owner, None)


LEDGER = Ledger()
"""The process's ledger."""
