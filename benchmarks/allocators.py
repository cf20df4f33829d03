"""Three ways to hold the K/V of many sequences in one budget: preallocated, grown by concatenation, in blocks.

They keep books and hold no tensors. The books of blocks are the cache's own: `SlotPool`, `BlockTable`, `Block`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort

from tieredkv.block import Block
from tieredkv.block_table import BlockTable
from tieredkv.tiers.slots import SlotPool

ALIGNMENT = 512
"""Bytes to which CUDA's caching allocator rounds a tensor up."""


class Allocator(ABC):
    """Memory for the K/V of sequences, by a key of the caller's.

    Args:
        budget_bytes: what there is.
        token_bytes: K and V of one token, over all layers.
    """

    name: str
    headroom = 0.02
    """Share of the budget that stays free at an admission, for those who run to grow into."""

    def __init__(self, budget_bytes: int, token_bytes: int) -> None:
        self.budget_bytes, self.token_bytes = budget_bytes, token_bytes
        self.tokens: dict[int, int] = {}

    @property
    @abstractmethod
    def held_bytes(self) -> int:
        """Bytes that no other sequence can have now."""

    @property
    def used_bytes(self) -> int:
        """Bytes that hold a token."""
        return sum(self.tokens.values()) * self.token_bytes

    def serves(self, tokens: int) -> bool:
        """Whether a sequence of this length could be held by an empty allocator."""
        return tokens * self.token_bytes <= self.budget_bytes

    @abstractmethod
    def admit(self, key: int, tokens: int) -> bool:
        """Take memory for a prompt, or nothing."""

    @abstractmethod
    def grow(self, key: int) -> bool:
        """Take memory for one more token; after False, give other memory back and call again."""

    def leave(self, key: int) -> None:
        """Give a sequence's memory back."""
        del self.tokens[key]


class Preallocated(Allocator):
    """The longest length for every sequence, as StaticCache does.

    Args:
        length: most tokens of a sequence.
    """

    def __init__(self, budget_bytes: int, token_bytes: int, length: int) -> None:
        super().__init__(budget_bytes, token_bytes)
        self.name, self.length, self.headroom = f"preallocated, {length:,} tokens each", length, 0.0

    @property
    def held_bytes(self) -> int:
        """Whole sequences."""
        return len(self.tokens) * self.length * self.token_bytes

    def serves(self, tokens: int) -> bool:
        """Whether it is no longer than what is preallocated."""
        return tokens <= self.length and self.length * self.token_bytes <= self.budget_bytes

    def admit(self, key: int, tokens: int) -> bool:
        """See `Allocator.admit`."""
        if self.held_bytes + self.length * self.token_bytes > self.budget_bytes:
            return False
        self.tokens[key] = tokens
        return True

    def grow(self, key: int) -> bool:
        """See `Allocator.grow`; never short."""
        self.tokens[key] += 1
        return True


class Arena:
    """A stretch of addresses; each request takes the smallest gap that holds it, and gaps that touch are one.

    Kinder than CUDA's caching allocator, which splits large pieces only where a megabyte is left over.
    """

    def __init__(self, nbytes: int) -> None:
        self.free_bytes = 0
        self._by_size: list[tuple[int, int]] = []  # (bytes, start)
        self._starts: dict[int, int] = {}  # start -> bytes
        self._ends: dict[int, int] = {}  # end -> bytes
        self._add(0, nbytes)

    def take(self, nbytes: int) -> int | None:
        """Start of a piece, or None when no gap is large enough."""
        at = bisect_left(self._by_size, (nbytes, 0))
        if at == len(self._by_size):
            return None
        size, start = self._by_size[at]
        self._remove(start, size)
        if size > nbytes:
            self._add(start + nbytes, size - nbytes)
        return start

    def give(self, start: int, nbytes: int) -> None:
        """Return a piece."""
        after = self._starts.get(start + nbytes)
        if after is not None:
            self._remove(start + nbytes, after)
            nbytes += after
        before = self._ends.get(start)
        if before is not None:
            start -= before
            self._remove(start, before)
            nbytes += before
        self._add(start, nbytes)

    def _add(self, start: int, nbytes: int) -> None:
        if nbytes:
            insort(self._by_size, (nbytes, start))
            self._starts[start] = self._ends[start + nbytes] = nbytes
            self.free_bytes += nbytes

    def _remove(self, start: int, nbytes: int) -> None:
        del self._by_size[bisect_left(self._by_size, (nbytes, start))], self._starts[start], self._ends[start + nbytes]
        self.free_bytes -= nbytes


class Concatenated(Allocator):
    """Each K and V of each layer is one tensor, made anew with every token, as DynamicCache does.

    Args:
        tensors: two for each layer.
    """

    name = "grown by concatenation"
    headroom = 0.15
    """The best of 1, 2, 5, 10, 15, 20 and 30 %: with less, gaps between tensors send many sequences back."""

    def __init__(self, budget_bytes: int, token_bytes: int, tensors: int) -> None:
        super().__init__(budget_bytes, token_bytes)
        self._arena, self._row_bytes, self._count = Arena(budget_bytes), token_bytes // tensors, tensors
        self._pieces: dict[int, list[tuple[int, int]]] = {}  # (start, tokens) of each tensor

    @property
    def held_bytes(self) -> int:
        """Everything that is in no gap."""
        return self.budget_bytes - self._arena.free_bytes

    def admit(self, key: int, tokens: int) -> bool:
        """See `Allocator.admit`."""
        pieces: list[tuple[int, int]] = []
        while len(pieces) < self._count:
            start = self._arena.take(self._size(tokens))
            if start is None:
                for taken, _ in pieces:
                    self._arena.give(taken, self._size(tokens))
                return False
            pieces.append((start, tokens))
        self._pieces[key], self.tokens[key] = pieces, tokens
        return True

    def grow(self, key: int) -> bool:
        """See `Allocator.grow`: a tensor's copy is made before the old one goes."""
        wanted = self.tokens[key] + 1
        pieces = self._pieces[key]
        for index, (old, tokens) in enumerate(pieces):
            if tokens == wanted:
                continue
            new = self._arena.take(self._size(wanted))
            if new is None:
                return False
            self._arena.give(old, self._size(tokens))
            pieces[index] = (new, wanted)
        self.tokens[key] = wanted
        return True

    def leave(self, key: int) -> None:
        """See `Allocator.leave`."""
        super().leave(key)
        for start, tokens in self._pieces.pop(key):
            self._arena.give(start, self._size(tokens))

    def _size(self, tokens: int) -> int:
        return -(-tokens * self._row_bytes // ALIGNMENT) * ALIGNMENT


class Blocks(Allocator):
    """Blocks of a pool, one block table for each sequence.

    Args:
        block_size: tokens of a block.
    """

    def __init__(self, budget_bytes: int, token_bytes: int, block_size: int) -> None:
        super().__init__(budget_bytes, token_bytes)
        self.name, self.block_size = f"blocks of {block_size}", block_size
        self.pool = SlotPool(budget_bytes // (token_bytes * block_size))
        self.tables: dict[int, BlockTable] = {}
        self._made = 0

    @property
    def held_bytes(self) -> int:
        """Whole blocks."""
        return self.pool.used * self.block_size * self.token_bytes

    def serves(self, tokens: int) -> bool:
        """Whether there are blocks enough."""
        return -(-tokens // self.block_size) <= self.pool.total

    def admit(self, key: int, tokens: int) -> bool:
        """See `Allocator.admit`."""
        count = -(-tokens // self.block_size)
        if count > self.pool.free:
            return False
        table = BlockTable(self.block_size, self._release)
        table.rows.append([])
        for index, slot in enumerate(self.pool.allocate_many(count)):
            self._append(table, slot, min(self.block_size, tokens - index * self.block_size))
        self.tables[key], self.tokens[key] = table, tokens
        return True

    def grow(self, key: int) -> bool:
        """See `Allocator.grow`."""
        table = self.tables[key]
        row = table.rows[0]
        if not row or row[-1].tokens == self.block_size:
            if not self.pool.free:
                return False
            self._append(table, self.pool.allocate((row[-1].hot or 0) + 1 if row else None), 0)
        row[-1].tokens += 1
        self.tokens[key] += 1
        return True

    def leave(self, key: int) -> None:
        """See `Allocator.leave`."""
        super().leave(key)
        self.tables.pop(key).clear()

    def runs(self, key: int) -> int:
        """Stretches of neighbouring slots in which a sequence lies."""
        slots = [block.hot or 0 for block in self.tables[key].rows[0]]
        return sum(slot != before + 1 for before, slot in zip([-2, *slots], slots, strict=False))

    def _append(self, table: BlockTable, slot: int, tokens: int) -> None:
        self._made += 1
        table.append(0, Block(self._made, tokens=tokens, hot=slot))

    def _release(self, block: Block) -> None:
        if block.hot is not None:
            self.pool.release(block.hot)
