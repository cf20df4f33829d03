"""Blocks that a store keeps for caches to come, found by the hash of their prefix.

They are held by reference, like those of a cache, and count in the same budgets. When a running cache needs room,
those that no cache uses are let go, leaves before roots.

Imports: errors, block, eviction, blocks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from tieredkv.block import Block
from tieredkv.errors import ClosedError
from tieredkv.eviction import EvictionPolicy, policy
from tieredkv.store.blocks import BlockStore, Holder

LAST_PRIORITY = -(2**62)
"""The priority of blocks that only wait: whatever a cache uses stays in hot longer."""


class KeptBlocks:
    """Sealed blocks by hash. Call under the store's lock.

    Args:
        store: the store of the blocks.
        policy_name: which go first, see tieredkv.eviction.
    """

    def __init__(self, store: BlockStore, policy_name: str) -> None:
        self._store = store
        self.holder: Holder = store.holder()
        self.holder.keeps, self.holder.priority = True, LAST_PRIORITY
        # One row, in no order: nothing is ever read through this table.
        self.holder.table.rows = [[]]
        self._blocks: dict[str, Block] = {}
        self._places: dict[str, int] = {}
        self._hashes: list[str] = []
        self._policy: EvictionPolicy[str] = policy(policy_name)
        self.evicted = 0
        self._closed = False
        store.give_up_kept = self.reclaim

    def __len__(self) -> int:
        return len(self._blocks)

    def find(self, hashes: Sequence[str]) -> list[Block]:
        """The blocks of the longest known start of a chain; they count as used."""
        found: list[Block] = []
        for name in hashes:
            block = self._blocks.get(name)
            if block is None:
                break
            found.append(block)
        for name in reversed(hashes[: len(found)]):
            self._policy.touch(name)
            self._blocks[name].last_access = self._store.forwards
        return found

    def add(self, hashes: Sequence[str], blocks: Sequence[Block]) -> int:
        """Keep sealed blocks of one chain, from its first block on; returns how many are new. None once closed."""
        new, parent = 0, None
        if self._closed:
            return new
        for name, block in zip(hashes, blocks, strict=True):
            if name not in self._blocks:
                block.refs += 1
                block.last_access = self._store.forwards
                self._blocks[name] = block
                self._places[name] = len(self._hashes)
                self._hashes.append(name)
                self.holder.table.rows[0].append(block)
                self._policy.insert(name, parent)
                new += 1
            parent = name
        return new

    def forget(self, name: str) -> None:
        """Let go of one block; a cache that uses it keeps it."""
        block, place = self._blocks.pop(name), self._places.pop(name)
        self._policy.remove(name)
        row, last = self.holder.table.rows[0], self._hashes.pop()
        moved = row.pop()
        if last != name:
            row[place], self._hashes[place], self._places[last] = moved, last, place
        self.let_go(block)

    def let_go(self, block: Block) -> None:
        """Give up one reference to a block, and the block itself when nobody refers to it any more."""
        block.refs -= 1
        if not block.refs:
            self._store.release(block)

    def reclaim(self, blocks: int) -> int:
        """Let go of blocks that no cache uses, leaves first; returns how many slots' worth went."""
        gone = 0
        while gone < blocks:
            name = self._policy.victim(lambda key: self._blocks[key].refs > 1)
            if name is None:
                break
            self.forget(name)
            gone += 1
        self.evicted += gone
        return gone

    def close(self) -> None:
        """Let go of all blocks, and have no more to give to caches that go on. May be called again."""
        with contextlib.suppress(ClosedError):
            self._store.check_usable()  # before the lock, which a fork may have left held
            with self._store.lock:
                self._closed, self._store.give_up_kept = True, None
                self._blocks.clear()
                self._store.leave(self.holder)
