"""The slots of one tier: which are free, which hold a block, which are still being copied.

A pool hands out slot numbers and never touches memory. It tries to give a growing sequence neighbouring slots,
because neighbours are one contiguous stretch per head: one copy, one attention run.

Imports: errors only.
"""

from __future__ import annotations

import heapq
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable

from tieredkv.errors import BudgetError, MismatchError


class SlotPool:
    """Slot numbers 0 … total-1, each free, live or in flight. Safe to use from several threads.

    A slot is *live* from `allocate` to `release`, and *in flight* while at least one copy reads or writes it. A slot
    that is released in flight becomes free when its last flight ends. After every call
    `free + live + in_flight == total`.

    Args:
        total: number of slots to begin with.
        tier: name of the tier in errors.
        spread: where to start when there is no preferred slot: True, in the middle of the largest gap, which leaves
            the sequences on both sides room to grow; False, in the lowest gap, which keeps memory or files that are
            taken piece by piece few.
        growth: called when the free slots do not suffice; returns how many slots to add (0: none) or raises.
    """

    def __init__(
        self, total: int, *, tier: str = "hot", spread: bool = True, growth: Callable[[], int] | None = None
    ) -> None:
        self._tier, self._spread, self._growth = tier, spread, growth
        self._lock = threading.RLock()
        self._total = self._free = self._peak = 0
        self._starts: list[int] = []  # sorted first slots of the gaps; a gap is a maximal stretch of free slots
        self._lengths: dict[int, int] = {}  # first slot of a gap -> its length
        self._largest: list[tuple[int, int]] = []  # heap of (-length, start); entries of gaps that changed are stale
        self._held: set[int] = set()  # allocated and not released
        self._flights: dict[int, int] = {}  # slot -> copies under way
        self._releasing: set[int] = set()  # released while in flight
        self.grow(total)

    @property
    def total(self) -> int:
        """Number of slots."""
        return self._total

    @property
    def free(self) -> int:
        """Slots that can be allocated now."""
        return self._free

    @property
    def live(self) -> int:
        """Slots that are held and that no copy touches."""
        with self._lock:
            return len(self._held) - (len(self._flights) - len(self._releasing))

    @property
    def in_flight(self) -> int:
        """Slots that at least one copy touches, held or already released."""
        return len(self._flights)

    @property
    def used(self) -> int:
        """Slots that are not free."""
        with self._lock:
            return self._total - self._free

    @property
    def peak_live(self) -> int:
        """The most slots that were ever not free at one time."""
        return self._peak

    def holds(self, slot: int) -> bool:
        """Whether the slot is allocated and not released."""
        return slot in self._held

    def allocate(self, preferred: int | None = None) -> int:
        """Take one slot: `preferred` if it is free, else one that keeps runs long.

        Raises:
            BudgetError: no slot is free and the pool cannot grow.
        """
        return self.allocate_many(1, preferred)[0]

    def allocate_many(self, count: int, preferred: int | None = None) -> list[int]:
        """Take `count` slots at once, all or none, in as few runs of neighbours as is cheap.

        Args:
            count: number of slots.
            preferred: the slot to begin at if it is free, for example the one after a sequence's last block.

        Raises:
            BudgetError: fewer slots are free and the pool cannot grow; nothing was taken.
        """
        with self._lock:
            self._make_room(count)
            taken: list[int] = []
            for left in range(count, 0, -1):
                gap = -1 if preferred is None else self._gap_with(preferred)
                if preferred is None or gap < 0:
                    preferred = self._place(left)
                    gap = self._gap_with(preferred)
                self._take(preferred, gap)
                taken.append(preferred)
                preferred += 1
            self._held.update(taken)
            self._peak = max(self._peak, self._total - self._free)
            return taken

    def release(self, slot: int) -> None:
        """Give a slot back; it is free at once, or when its last flight ends.

        Raises:
            MismatchError: the slot is unknown or not held (a double release).
        """
        with self._lock:
            self._require(slot in self._held, "A slot was released that is not held.", slot)
            self._held.remove(slot)
            if slot in self._flights:
                self._releasing.add(slot)
            else:
                self._give(slot, 1)

    def begin_flight(self, slot: int) -> None:
        """Note that a copy of this held slot starts; several may be under way at once.

        Raises:
            MismatchError: the slot is not held.
        """
        with self._lock:
            self._require(slot in self._held, "A copy was started on a slot that is not held.", slot)
            self._flights[slot] = self._flights.get(slot, 0) + 1

    def end_flight(self, slot: int) -> None:
        """Note that a copy is done; frees the slot if it was released meanwhile and this was the last copy.

        Raises:
            MismatchError: no copy of the slot is under way.
        """
        with self._lock:
            self._require(slot in self._flights, "A copy was ended on a slot that is not in flight.", slot)
            self._flights[slot] -= 1
            if self._flights[slot]:
                return
            del self._flights[slot]
            if slot in self._releasing:
                self._releasing.remove(slot)
                self._give(slot, 1)

    def grow(self, count: int) -> None:
        """Add `count` free slots at the end."""
        with self._lock:
            self._require(count >= 0, "A pool cannot shrink.", count)
            if count:
                start, self._total = self._total, self._total + count
                self._give(start, count)

    def _require(self, held: bool, what: str, got: int) -> None:
        if not held:
            raise MismatchError(
                what,
                wanted=f"a slot of the {self._tier} tier in the right state, of {self._total}",
                got=got,
                change="release each slot once, and end each flight once",
            )

    def _make_room(self, count: int) -> None:
        while self._free < count:
            added = self._growth() if self._growth is not None else 0
            if added <= 0:
                raise BudgetError(
                    f"The {self._tier} tier has not enough free slots.",
                    wanted=f"{count} free",
                    got=f"{self._free} free of {self._total} ({len(self._flights)} in flight)",
                    change=f"enlarge {self._tier}",
                    tier=self._tier,
                )
            self.grow(added)

    def _gap_with(self, slot: int) -> int:
        """Index of the gap that holds the slot, or -1 if it is not free."""
        at = bisect_right(self._starts, slot) - 1
        if at < 0 or slot >= self._starts[at] + self._lengths[self._starts[at]]:
            return -1
        return at

    def _place(self, count: int) -> int:
        """Where to begin `count` slots that follow no other; some slot is free."""
        if not self._spread:
            return self._starts[0]
        while True:
            length, start = self._largest[0]
            if self._lengths.get(start) == -length:
                break
            heapq.heappop(self._largest)
        # A gap at slot 0 has no sequence before it that could grow into it.
        return start + (max(0, -length - count) // 2 if start else 0)

    def _take(self, slot: int, gap: int) -> None:
        start = self._starts[gap]
        before, after = slot - start, start + self._lengths[start] - slot - 1
        if before:
            self._note(start, before)
            if after:
                self._starts.insert(gap + 1, slot + 1)
        else:
            del self._lengths[start]
            if after:
                self._starts[gap] = slot + 1
            else:
                del self._starts[gap]
        if after:
            self._note(slot + 1, after)
        self._free -= 1

    def _give(self, start: int, count: int) -> None:
        self._free += count
        at = bisect_left(self._starts, start)
        if at < len(self._starts) and self._starts[at] == start + count:
            count += self._lengths.pop(self._starts[at])
            del self._starts[at]
        if at and self._starts[at - 1] + self._lengths[self._starts[at - 1]] == start:
            start = self._starts[at - 1]
            count += self._lengths[start]
        else:
            self._starts.insert(at, start)
        self._note(start, count)

    def _note(self, start: int, length: int) -> None:
        """Set a gap's length."""
        self._lengths[start] = length
        if not self._spread:
            return
        heapq.heappush(self._largest, (-length, start))
        if len(self._largest) > 64 + 4 * len(self._starts):  # drop what is stale, so that the heap stays small
            self._largest = [(-size, first) for first, size in self._lengths.items()]
            heapq.heapify(self._largest)
