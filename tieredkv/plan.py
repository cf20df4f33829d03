"""What one forward does, decided once before its first write: where new tokens go, and where old ones are read.

Imports: block.
"""

from __future__ import annotations

import dataclasses

import torch

from tieredkv.block import Block


@dataclasses.dataclass(frozen=True)
class Run:
    """Neighbouring slots of one pool that hold consecutive tokens for some rows.

    Args:
        rows: batch rows that attend to it (several when they share the blocks).
        start: first token of the run in the pool, `slot * block_size`.
        tokens: how many tokens, all of them written.
        position: the first token's position in its rows.
        blocks: the blocks, in order.
    """

    rows: tuple[int, ...]
    start: int
    tokens: int
    position: int
    blocks: tuple[Block, ...]


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Full blocks that are copied into one staging buffer, layer by layer, to be attended there.

    Args:
        rows: batch rows that attend to it.
        position: the first token's position in its rows.
        blocks: the blocks, in order; the buffer holds them side by side.
        tokens: `len(blocks) * block_size`.
    """

    rows: tuple[int, ...]
    position: int
    blocks: tuple[Block, ...]
    tokens: int


@dataclasses.dataclass(frozen=True)
class HotWrite:
    """New tokens of one row that go into neighbouring hot slots.

    Args:
        row: batch row.
        source: first of the row's new tokens (0 is the forward's first).
        start: token index in the hot pool where they go.
        tokens: how many.
    """

    row: int
    source: int
    start: int
    tokens: int


@dataclasses.dataclass(frozen=True)
class ThroughWrite:
    """New full blocks of one row that are written straight to a lower tier, layer by layer.

    Args:
        row: batch row.
        source: first of the row's new tokens (0 is the forward's first).
        blocks: the blocks, in order, each `block_size` tokens.
        tier: the lower tier.
        slots: the tier's slot for each block.
    """

    row: int
    source: int
    blocks: tuple[Block, ...]
    tier: str
    slots: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Visibility:
    """Which tokens attention sees where what leaves the window is dropped. Positions and settings alone decide.

    A query at position p sees the tokens up to p that lie in the row's first `sink_blocks` blocks, or in a block that
    holds one of the `window` tokens up to p. Positions count from the row's first stored token, padding included.
    """

    sink_blocks: int
    window: int
    block_size: int

    def first_block(self, position: int) -> int:
        """The first block behind the sinks that the query at a position sees."""
        return max((position + 1 - self.window) // self.block_size, 0)

    def hidden(self, position: int) -> range:
        """The blocks that the query at a position, and every later one, does not see."""
        return range(self.sink_blocks, max(self.first_block(position), self.sink_blocks))

    def droppable(self, tokens: int) -> range:
        """The blocks that are not kept for the query that follows `tokens` tokens.

        One block less than is hidden, so that a crop by up to a block finds what its next query sees.
        """
        return range(self.sink_blocks, max(self.first_block(tokens) - 1, self.sink_blocks))

    def seen(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Bool [queries, keys] for int64 positions; what is causal is another's business."""
        first = (queries + 1 - self.window).div(self.block_size, rounding_mode="floor") * self.block_size
        return (keys < self.sink_blocks * self.block_size) | (keys >= first[:, None])


@dataclasses.dataclass
class ForwardPlan:
    """One forward. Everything but `updated` is fixed when it is made (see `steady` for the exception).

    Args:
        number: the forward's number in its store, for `last_access`.
        past: tokens of each row before the forward; where rows differ, of the longest.
        new: tokens of each row that the forward adds.
        rows: batch rows.
        hot_runs: past tokens that lie in the hot pool.
        warm_runs: past tokens that are attended in the warm pool, in place.
        chunks: past tokens that are streamed through staging.
        hot_writes: where new tokens go in the hot pool.
        through_writes: new blocks that go straight to a lower tier.
        write_index: for one new token in each of several rows: token index in the hot pool, int64 [rows].
        visibility: where some past or new tokens are hidden from some of several new ones; else None.
        ring: chunks of all plans that one forward reads in turn, where there are several; None: `chunks`.
        ring_first: where this plan's chunks begin in `ring`.
        version: the store's version when the reads were worked out.
        padding: of each row, tokens on its left that `chunks` leaves out; None where it leaves nothing out.
        updated: tiered layers that have been written.
    """

    number: int
    past: int
    new: int
    rows: int
    hot_runs: tuple[Run, ...] = ()
    warm_runs: tuple[Run, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    hot_writes: tuple[HotWrite, ...] = ()
    through_writes: tuple[ThroughWrite, ...] = ()
    write_index: torch.Tensor | None = None
    ring: tuple[Chunk, ...] | None = None
    ring_first: int = 0
    visibility: Visibility | None = None
    version: int = 0
    padding: tuple[int, ...] | None = None
    updated: set[int] = dataclasses.field(default_factory=set)

    @property
    def total(self) -> int:
        """Tokens of each row after the forward."""
        return self.past + self.new
