"""The holders of a store's blocks: caches, as the store sees them, which come, share blocks, and leave.

A cache that is dropped and not closed leaves as well, wherever the garbage collector finds it: inside any allocation
of any thread, in the middle of whatever this store, or another one, is doing there. Then nothing is waited for.

Imports: errors, config, block, device, tiers, block_table, plan, moves, opening.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections import Counter, deque

from tieredkv.block import Block
from tieredkv.block_table import BlockTable
from tieredkv.config import Size
from tieredkv.device import Event, Lock, holds
from tieredkv.errors import ClosedError
from tieredkv.plan import Chunk, ForwardPlan, Run
from tieredkv.store.moves import MoveQueue
from tieredkv.store.opening import Budget
from tieredkv.tiers import HotTier

logger = logging.getLogger("tieredkv")


@dataclasses.dataclass(eq=False)
class Holder:
    """One cache as its store sees it.

    Args:
        table: its blocks.
        tokens: tokens of each row that are committed.
        priority: blocks of low priority leave hot first.
        last_access: number of its last forward.
        plan: the forward that is under way, or None.
        merged: leading blocks of the rows that were compared with each other.
        exact_tokens: with a lossy codec, leading tokens that were computed from exact K and V alone; None for all.
        keeps: not a cache, but what keeps blocks for later ones.
        number: of the holder in its store.
        quota_slots: hot slots for the blocks that it alone holds, or None for no limit.
        moves_left: blocks that may be copied down ahead of need; grows with each of its forwards.
        reads: where its last forward read, and what that was worked out from.
        padding: tokens on the left of each row that the last attention did not see, which the next step need not
            stream; None where there are none. `steady` sees to it that no attention misses what it does see.
    """

    table: BlockTable
    tokens: int = 0
    priority: int = 0
    last_access: int = 0
    plan: ForwardPlan | None = None
    merged: int = 0
    exact_tokens: int | None = None
    keeps: bool = False
    number: int = 0
    quota_slots: int | None = None
    moves_left: int = 0
    reads: tuple[tuple[object, ...], tuple[Run, ...], tuple[Run, ...], tuple[Chunk, ...]] | None = None
    padding: tuple[int, ...] | None = None

    def own_hot_slots(self) -> int:
        """Hot slots of blocks that nobody else holds."""
        entries = Counter(block.id for row in self.table for block in row if block.hot is not None)
        return sum(entries[block.id] == block.refs for block in self.table.blocks())

    def surplus(self, more: int) -> int:
        """How many of its own blocks have to leave hot so that `more` come within its quota; negative with room."""
        return -more if self.quota_slots is None else self.own_hot_slots() + more - self.quota_slots


class Holders(MoveQueue, ABC):
    """Who holds blocks of one store. The store sets what is declared here before it uses the rest."""

    block_size: int
    budget: Budget
    hot: HotTier
    lock: Lock

    def __init__(self) -> None:
        super().__init__()
        self._holders: weakref.WeakValueDictionary[int, Holder] = weakref.WeakValueDictionary()
        self._dropped: deque[Holder] = deque()
        self._numbers = itertools.count()
        self.through: dict[int, list[Event]] = {}
        self.decoded: set[int] = set()
        self._pid = os.getpid()
        self._closed = False

    @property
    def holders(self) -> list[Holder]:
        """All that have not left, oldest first: a list of its own, as another may come or leave at any moment."""
        return [holder for reference in self._holders.valuerefs() if (holder := reference()) is not None]

    @property
    def is_shared(self) -> bool:
        """Whether there are several holders; asked in each layer, so without a list of them."""
        return len(self._holders) > 1

    def holder(self) -> Holder:
        """A new holder without rows.

        Raises:
            ClosedError: as `check_usable`.
        """
        holder = Holder(BlockTable(self.block_size, self.release), number=next(self._numbers))
        quota = self.settings.hot_quota
        if quota is not None:
            token_bytes = self.hot.slot_bytes // self.block_size
            holder.quota_slots = Size.parse(quota).resolve(token_bytes, self.budget.rows) // self.hot.slot_bytes
        with self.lock:
            self.check_usable()  # nobody would close a store again that closed as this one came
            self._holders[holder.number] = holder
        return holder

    def fork(self, holder: Holder) -> Holder:
        """A second holder of the same blocks; whoever writes into a shared block first copies it."""
        with self.lock:
            twin = dataclasses.replace(holder, table=holder.table.fork(), plan=None, number=next(self._numbers))
            self._holders[twin.number] = twin
            return twin

    def release(self, block: Block) -> None:
        """The last reference to a block went away: free its slots, now or when the copies that use them are done."""
        with self.lock:
            self.version += 1
            self.decoded.discard(block.id)
            try:
                for event in self.through.pop(block.id, [])[-1:]:  # one stream: the last comes after the others
                    with contextlib.suppress(Exception):  # it was told to the forward that wrote it
                        event.wait()
            finally:
                if block.id not in self._moving:
                    self._free_slots(block)

    # ---- leaving

    def leave(self, holder: Holder) -> None:
        """A cache is done: free its blocks, and close with the last holder. May be called again."""
        if not self._closed:
            self.check_usable()  # before the lock, which a fork may have left held
        with self.lock:
            try:
                self._let_go(holder)
            finally:
                self.let_dropped_go()

    def leave_when_free(self, holder: Holder) -> None:
        """`leave` for the garbage collector, which does not wait for the lock.

        Two stores would wait for each other where two threads, each in one of them, come to the end of a cache of the
        other; and in the thread that has the lock, blocks would go while it goes through them. So where the lock is
        not free, a thread of its own waits for it.
        """
        with contextlib.suppress(ClosedError):
            self.check_usable()
            self._dropped.append(holder)
            # Who leaves may wait for copies: not on a worker, which may have to do them, nor where this thread counts,
            # as they are counted before they end.
            is_worker = threading.current_thread().name.startswith("tieredkv")
            is_inside = holds(self.lock) or holds(self.counters.lock)
            if is_worker or is_inside or not self.lock.acquire(blocking=False):
                # Without a thread, as at the end of the interpreter, the next forward or the next to leave does it.
                with contextlib.suppress(RuntimeError):
                    threading.Thread(target=self._await_lock, daemon=True, name="cleanup").start()
                return
            try:
                self.let_dropped_go()
            finally:
                self.lock.release()

    def _await_lock(self) -> None:
        with self.lock:
            self.let_dropped_go()

    def let_dropped_go(self) -> None:
        """Let caches go that were dropped while the lock was not free. Call under the lock, between two operations.

        What is free decides where new blocks go, and must not depend on when a thread comes to it.
        """
        while self._dropped:
            try:
                self._let_go(self._dropped.popleft())
            except Exception as failure:  # it is not of the one who calls
                logger.warning("tieredkv: a cache that was dropped did not leave its store as it should: %s", failure)

    def _let_go(self, holder: Holder) -> None:
        if self._closed:
            return
        self._holders.pop(holder.number, None)
        holder.plan = None
        try:
            holder.table.clear()
        finally:
            if not self.holders:
                self.close()

    # ---- end

    def check_usable(self) -> None:
        """Refuse a store that was closed, or that belongs to the parent of this process.

        Raises:
            ClosedError: either.
        """
        if self._closed or os.getpid() != self._pid:
            raise ClosedError(
                "The cache cannot be used.",
                wanted="an open cache in the process that made it",
                got="a closed one" if self._closed else "a fork of it",
                change="make a new cache; to move one to another process use pickle",
            )

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @abstractmethod
    def close(self) -> None:
        """Wait for copies, give all memory and files back. May be called again."""
