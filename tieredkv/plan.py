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
        tier: "warm" or "cold".
        slots: the tier's slot for each block.
    """

    row: int
    source: int
    blocks: tuple[Block, ...]
    tier: str
    slots: tuple[int, ...]


@dataclasses.dataclass
class ForwardPlan:
    """One forward. Everything but `updated` is fixed when it is made (see `steady` for the exception).

    Args:
        number: the forward's number in its store, for `last_access`.
        past: tokens of each row before the forward.
        new: tokens of each row that the forward adds.
        rows: batch rows.
        hot_runs: past tokens that lie in the hot pool.
        warm_runs: past tokens that are attended in the warm pool, in place.
        chunks: past tokens that are streamed through staging.
        hot_writes: where new tokens go in the hot pool.
        through_writes: new blocks that go straight to a lower tier.
        write_index: for one new token in each of several rows: token index in the hot pool, int64 [rows].
        row_slots: for one new token in each row: per row the hot slots of all its tokens, the new one included,
            when all of them are hot; else None.
        version: the store's version when the reads were worked out.
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
    row_slots: tuple[tuple[int, ...], ...] | None = None
    version: int = 0
    updated: set[int] = dataclasses.field(default_factory=set)

    @property
    def total(self) -> int:
        """Tokens of each row after the forward."""
        return self.past + self.new
