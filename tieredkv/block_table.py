"""The block table of one cache: for each batch row, the blocks that hold its tokens, in order.

All rows have the same number of tokens, as transformers counts them (padding included). One table serves all tiered
layers (docs/decisions/0002-one-block-table.md). The table counts references; what happens to a block whose count
reaches zero is its owner's business.

Imports: block.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from tieredkv.block import Block


@dataclasses.dataclass(frozen=True)
class TableEntry:
    """One line of `cache.block_table()`: one block in one layer.

    Args:
        row: batch row.
        block_id: id of the block within its store.
        layer_id: index of the layer in the model.
        token_range: first token and one past the last, counted from the row's first stored token.
        location: the fastest tier that holds the block: one of `block.TIERS`; "nowhere" once it was dropped.
        offset: bytes from the start of that tier's memory for this layer (K plane, first head) to the block.
        last_access: number of the cache's last forward, counted over all caches of its store.
        ref_count: rows of all caches that point to the block, and one more while the store keeps it for later ones.
    """

    row: int
    block_id: int
    layer_id: int
    token_range: tuple[int, int]
    location: str
    offset: int
    last_access: int
    ref_count: int


class BlockTable:
    """Rows of blocks with reference counts.

    Args:
        block_size: tokens of a full block.
        release: called with each block whose last reference went away.
    """

    def __init__(self, block_size: int, release: Callable[[Block], None]) -> None:
        self.block_size = block_size
        self.rows: list[list[Block]] = []
        self.dropped = 0  # every row's blocks before this one are sinks or gone
        self._release = release

    def __iter__(self) -> Iterator[list[Block]]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def blocks(self) -> Iterator[Block]:
        """Each distinct block once, row by row."""
        seen: set[int] = set()
        for row in self.rows:
            for block in row:
                if block.id not in seen:
                    seen.add(block.id)
                    yield block

    def append(self, row: int, block: Block) -> None:
        """Add a block, with the reference it was made with, at the end of a row."""
        self.rows[row].append(block)

    def replace(self, row: int, index: int, block: Block) -> None:
        """Put `block`, with the reference it was made with, in the place of another."""
        old = self.rows[row][index]
        self.rows[row][index] = block
        self._drop(old)

    def truncate(self, tokens: int) -> None:
        """Keep the blocks that hold the first `tokens` tokens of each row; fills are the owner's business."""
        keep = -(-tokens // self.block_size)
        self.dropped = min(self.dropped, keep)
        cut: list[Block] = []
        for row in self.rows:
            cut += row[keep:]
            del row[keep:]
        self._drop_all(cut)

    def select(self, indices: Sequence[int]) -> None:
        """Make row i what row `indices[i]` was; rows may be repeated, dropped and shared."""
        for index in indices:
            for block in self.rows[index]:
                block.refs += 1
        old, self.rows = self.rows, [list(self.rows[index]) for index in indices]
        for row in old:
            for block in row:
                self._drop(block)

    def fork(self) -> BlockTable:
        """A second table over the same blocks."""
        twin = BlockTable(self.block_size, self._release)
        twin.rows, twin.dropped = [list(row) for row in self.rows], self.dropped
        for row in twin.rows:
            for block in row:
                block.refs += 1
        return twin

    def clear(self) -> None:
        """Let go of every block and every row."""
        rows, self.rows, self.dropped = self.rows, [], 0
        self._drop_all(itertools.chain.from_iterable(rows))

    def _drop_all(self, blocks: Iterable[Block]) -> None:
        """Let go of blocks that are in no row any more; of each, also where Ctrl-C comes while one is released."""
        left = iter(blocks)
        try:
            for block in left:
                self._drop(block)
        except BaseException:
            self._drop_all(left)
            raise

    def _drop(self, block: Block) -> None:
        block.refs -= 1
        if block.refs == 0:
            self._release(block)
