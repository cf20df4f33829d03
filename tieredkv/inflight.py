"""What is on its way between tiers: moves of whole blocks, and one layer of blocks that comes up to be attended.

Records only: `transfer` makes and ends them, the store applies the moves.

Imports: block, device, verified.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import torch

from tieredkv.block import LOWER, TIERS, Block, Planes
from tieredkv.device import Event, Region
from tieredkv.verified import Check


@dataclasses.dataclass(eq=False)
class Move:
    """Whole blocks on their way to another tier: they stay readable at their source until the store applies it.

    Args:
        blocks: what moves.
        source: where it was; "below" for copies up to hot, each of which is read from the fastest tier that has it.
        target: where it goes.
        slots: the target's slot for each block.
        events: all done when every layer has arrived and was verified.
        reason: for the log.
        failure: what `apply` met, or None.
    """

    blocks: tuple[Block, ...]
    source: str
    target: str
    slots: tuple[int, ...]
    events: tuple[Event, ...]
    reason: str
    failure: Exception | None = None

    @property
    def goes_up(self) -> bool:
        """Whether it brings blocks nearer, which nothing needs yet."""
        return is_up(self.source, self.target)

    def done(self) -> bool:
        """Whether every copy has ended, well or badly. Never blocks."""
        return all(event.done() for event in self.events)

    def wait(self) -> None:
        """Block until every copy has ended; then raise what the first that failed raised, if one did."""
        first: Exception | None = None
        for event in self.events:
            try:
                event.wait()
            except Exception as failure:
                first = first or failure
        if first is not None:
            raise first


def is_up(source: str, target: str) -> bool:
    """Whether a move between these tiers brings blocks nearer; `source` as in `Move`."""
    return source == "below" or TIERS.index(target) < TIERS.index(source)


@dataclasses.dataclass(frozen=True)
class Part:
    """Some blocks of one tier on their way up.

    Args:
        blocks: the blocks.
        where: their places among the blocks of the fetch.
        tier: where they are read.
        planes: where they arrive, as stored.
        check: compares them once they are there.
        asking_seconds: what asking for them took the host: all of the reading, but where copies are asynchronous.
    """

    blocks: Sequence[Block]
    where: slice
    tier: str
    planes: Planes
    check: Check
    asking_seconds: float


@dataclasses.dataclass(frozen=True)
class Arrival:
    """One layer of blocks on their way up.

    Args:
        layer: tiered layer.
        parts: neighbouring blocks that come from one tier.
        k_out, v_out: where they are wanted.
        decodes: whether they come encoded.
        reason: why they come, for the log.
    """

    layer: int
    parts: tuple[Part, ...]
    k_out: torch.Tensor
    v_out: torch.Tensor
    decodes: bool
    reason: str

    def split(self, seconds: float) -> list[float]:
        """Each part's share of the time: what it took the host, and by blocks what the host did not wait for."""
        late_seconds = max(seconds - sum(part.asking_seconds for part in self.parts), 0.0)
        late = [len(part.blocks) * (part.tier != "cold") for part in self.parts]  # a file is read while it is asked for
        whole = sum(late) or 1
        return [part.asking_seconds + late_seconds * its / whole for part, its in zip(self.parts, late, strict=True)]


def read_regions(blocks: Sequence[Block]) -> list[Region]:
    """The regions that reading these blocks from below hot may touch."""
    return [(tier, slot) for block in blocks for tier in LOWER if (slot := getattr(block, tier)) is not None]


def read_from(block: Block) -> str:
    """The tier from which a block that is not hot is read: the fastest that stores it."""
    for tier in LOWER:
        if getattr(block, tier) is not None:
            return tier
    return LOWER[-1]


def by_tier(blocks: Sequence[Block]) -> list[tuple[int, int, str]]:
    """Neighbouring blocks that are read from the same tier, as (first, count, tier)."""
    groups, first = list[tuple[int, int, str]](), 0
    for tier, some in itertools.groupby(map(read_from, blocks)):
        count = len(list(some))
        groups.append((first, count, tier))
        first += count
    return groups
