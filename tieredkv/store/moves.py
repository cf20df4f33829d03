"""Slots below hot, and the moves between tiers: queued, applied when their copies are done, given up when they fail.

The part of a store that the rest of it builds on.

Imports: errors, config, counters, block, device, tiers, inflight, transfer, prefetcher.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Sequence

from tieredkv.block import LOWER, TIERS, Block, LayerGeometry
from tieredkv.config import CacheSettings
from tieredkv.counters import Counters
from tieredkv.device import Device
from tieredkv.errors import BudgetError, ChecksumError, ColdTierError, TieredKVError
from tieredkv.inflight import Move, is_up
from tieredkv.prefetcher import Prefetcher
from tieredkv.tiers import Tier
from tieredkv.transfer import Mover

logger = logging.getLogger("tieredkv")


class MoveQueue:
    """Moves of one store. The store sets what is declared here before it uses the rest."""

    settings: CacheSettings
    layers: tuple[LayerGeometry, ...]
    device: Device
    counters: Counters
    tiers: dict[str, Tier]
    mover: Mover
    prefetcher: Prefetcher

    def __init__(self) -> None:
        self.version = 0
        self.cold_failure: str | None = None
        self._moves: list[Move] = []
        self._moving: dict[int, Move] = {}
        self.waiting: dict[int, int] = {}  # block id -> the forward from which on its copy ahead of need waits

    # ---- slots

    def lower_free(self) -> int:
        """Blocks that still fit below hot."""
        return sum(self._free_in(role) for role in self.lower_tiers())

    def _free_in(self, role: str) -> int:
        """Blocks that still fit in a lower tier; none in a cold tier whose disk does not answer, which is given up."""
        try:
            return self.tiers[role].free_blocks()
        except ColdTierError as failure:
            self.give_up_cold(failure)
            return 0

    def lower_tiers(self) -> list[str]:
        """The tiers below hot that can take blocks, fastest first."""
        return [r for r in LOWER if r in self.tiers and not (r == "cold" and self.cold_failure)]

    def take_lower(self, count: int) -> list[tuple[str, list[int]]]:
        """Slots for `count` blocks below hot: warm while it has room, then cold. All of them or none.

        Raises:
            BudgetError: they do not fit; names the last tier.
            ColdTierError: the cold tier refused although it had room; it is given up from now on.
        """
        taken: list[tuple[str, list[int]]] = []
        try:
            for role in self.lower_tiers():
                some = min(count, self._free_in(role))
                if some:
                    try:
                        taken.append((role, self.tiers[role].slots.allocate_many(some)))
                    except (ColdTierError, BudgetError) as failure:
                        self.give_up_cold(failure)
                        continue
                    count -= some
            if count:
                raise self.no_room_below(count)
        except BaseException:  # an interrupt too
            self._give_back(taken)
            raise
        return taken

    def _give_back(self, taken: Iterable[tuple[str, Iterable[int]]]) -> None:
        for role, slots in taken:
            for slot in slots:
                self.tiers[role].slots.release(slot)

    def no_room_below(self, blocks: int) -> BudgetError:
        """The error for `blocks` blocks that fit nowhere below hot."""
        lower = self.lower_tiers()
        tier = lower[-1] if lower and lower[-1] != "packed" else "warm"
        block_bytes = sum(self.mover.row_bytes)
        reason = f" (the cold tier was given up: {self.cold_failure})" if self.cold_failure else ""
        return BudgetError(
            f"The tokens do not fit in all tiers together{reason}.",
            wanted=f"{blocks * block_bytes} more bytes ({blocks} blocks) in {tier}",
            got="no room left below hot",
            change=f"enlarge {tier}=, give cold= a folder, or a shorter context; see docs/guides/troubleshooting.md",
            tier=tier,
        )

    def _free_slots(self, block: Block) -> None:
        for role in TIERS:
            self.drop_copy(block, role)
        self.mover.forget(block)

    def drop_copy(self, block: Block, role: str) -> None:
        """Free a block's slot in one tier, if it has one there."""
        slot = getattr(block, role)
        if slot is None:
            return
        if role != "hot" and self.prefetcher.holds(block):
            self.prefetcher.flush()  # it may be reading the slot, ahead of a forward that will never come
        setattr(block, role, None)
        self.version += 1
        tier = self.tiers[role]
        if self.device.follows_accesses and role != "cold":
            planes = [p for layer in range(len(self.layers)) for p in tier.run(layer, slot, 1) or ()]
            self.device.poison(planes, (role, slot), by_compute=True)
        tier.slots.release(slot)

    # ---- moves

    def start_move(
        self, blocks: Sequence[Block], source: str, reason: str, targets: Sequence[str] = LOWER
    ) -> list[Move]:
        """Queue copies of sealed blocks to lower tiers, in pieces: never more than `queue_blocks` on their way down.

        Waits for older ones where there would be, but not for copies up, which `targets` may name as well. What was
        meant for a tier that is given up meanwhile is not copied.

        Raises:
            BudgetError: they do not fit.
        """
        blocks = [block for block in blocks if getattr(block, source) is not None]  # or freed with its cache meanwhile
        if not blocks:
            return []
        if not is_up(source, targets[0]):
            self._wait_for_space(len(blocks))  # what comes of older moves decides what is free
        if tuple(targets) == LOWER:
            places = self.take_lower(len(blocks))
        else:
            places = [(targets[0], self.tiers[targets[0]].slots.allocate_many(len(blocks)))]
        return self._queue_all(blocks, source, places, reason)

    def _queue_all(
        self, blocks: Sequence[Block], source: str, places: Sequence[tuple[str, list[int]]], reason: str
    ) -> list[Move]:
        """Moves of blocks into slots that were taken for them; slots that no move comes to have are free again."""
        left, given_up, moves = list(blocks), self.cold_failure, list[Move]()
        try:
            for role, slots in places:
                while slots:
                    count = min(len(slots), self.settings.queue_blocks)
                    if not is_up(source, role):
                        self._wait_for_space(count)
                    if role == "cold" and self.cold_failure != given_up:
                        return moves
                    moves.append(self._queue(left[:count], source, role, slots, reason))
                    del left[:count]
        finally:
            self._give_back(places)
        return moves

    def _wait_for_space(self, blocks: int) -> None:
        """Apply the oldest moves down until so many blocks more may be on their way, or as many as ever may."""
        most = self.settings.queue_blocks
        down = [move for move in self._moves if not move.goes_up]
        while down and sum(len(move.blocks) for move in down) + min(blocks, most) > most:
            self._apply(down.pop(0))

    def _queue(self, blocks: Sequence[Block], source: str, role: str, slots: list[int], reason: str) -> Move:
        """One move, into the first of `slots`, which are taken off once they are the move's."""
        pool, own, begun, move = self.tiers[role].slots, slots[: len(blocks)], list[int](), None
        stream, priority = self.mover.lane(source, role, reason)
        try:
            for slot in own:
                pool.begin_flight(slot)
                begun.append(slot)
            if role == "hot":
                move = self.mover.promote(blocks, own, reason, priority)
            else:
                move = self.mover.demote(blocks, source, role, own, reason)
            self._moving |= {block.id: move for block in blocks}
            del slots[: len(blocks)]
            self._moves.append(move)
            return move
        except BaseException:  # an interrupt, or no thread to be had
            if move is None or move not in self._moves:
                try:
                    with contextlib.suppress(Exception):
                        # The interrupt may have come when the copy was queued already: nobody else gets its slots
                        # before what the stream has to do so far is over.
                        stream.submit(_nothing, finish=_nothing, priority=priority, name="undo").wait()
                finally:
                    for slot in begun:
                        pool.end_flight(slot)
                    for block in blocks:
                        self._moving.pop(block.id, None)
            raise

    def poll(self) -> None:
        """Apply the moves whose copies are done, and wait for those of blocks that nobody refers to any more.

        What is free decides where new blocks go, and must not depend on how far a copy has come.
        """
        for move in list(self._moves):
            # What came up takes room, or gives some: it counts from a forward of its own cache on (`land`).
            if (move.done() and not move.goes_up) or not all(block.refs for block in move.blocks):
                self._apply(move)

    def land(self, blocks: Iterable[Block] | None = None) -> bool:
        """Wait for the copies up, those that carry any of these blocks or all, and apply them; whether there were."""
        coming = {block.id: block for move in self._moves if move.goes_up for block in move.blocks}
        if coming and blocks is not None:
            coming = {block.id: block for block in blocks if block.id in coming}
        self.wait_for(coming.values())
        return bool(coming)

    def wait_for(self, blocks: Iterable[Block]) -> None:
        """Wait for the moves that carry these blocks, and apply them."""
        for move in dict.fromkeys(self._moving[b.id] for b in blocks if b.id in self._moving):
            self._apply(move)

    def wait_all(self) -> None:
        """Wait for every move and apply it; no forward waits here."""
        for move in list(self._moves):
            self._apply(move, counts=False)

    def is_moving(self, block: Block) -> bool:
        """Whether a copy of the block is on its way to another tier."""
        return block.id in self._moving

    def _apply(self, move: Move, *, counts: bool = True) -> None:
        if move not in self._moves:
            return
        failure: Exception | None = None
        try:
            with self.counters.waiting(counts and not move.done()):
                move.wait()
        except Exception as error:  # whatever it is: what a move holds is given back once, and the cache goes on
            move.failure = failure = error
        self._moves.remove(move)
        slots = self.tiers[move.target].slots
        for block, slot in zip(move.blocks, move.slots, strict=True):
            del self._moving[block.id]
            slots.end_flight(slot)
            if failure is not None:
                slots.release(slot)
            else:
                setattr(block, move.target, slot)
                if move.source in LOWER:
                    self.drop_copy(block, move.source)
            if block.refs == 0:
                self._free_slots(block)
        self.version += 1
        # Whoever needs a block that did not come up reads it where it lies, and is told what is wrong there.
        if failure is not None and not move.goes_up:
            self._lower_failed(move.target, failure)

    def _lower_failed(self, role: str, failure: Exception) -> None:
        at_fault = failure.tier if isinstance(failure, ChecksumError) else role
        # What is no failure of the disk, such as memory that was not to be had, passes.
        if role == "cold" and at_fault == "cold" and isinstance(failure, TieredKVError | OSError):
            self.give_up_cold(failure)
            return
        self.counters.failed(tier=1)
        logger.warning("tieredkv: a copy to %s failed and its blocks stay where they are: %s", role, failure)

    def give_up_cold(self, failure: Exception) -> None:
        """Stop writing to the cold tier; what it holds is still read."""
        if self.cold_failure is None:
            self.cold_failure = str(failure)
            self.counters.failed(tier=1)
            logger.warning("tieredkv: going on without the cold tier: %s", failure)


def _nothing(*_: object) -> None:
    """Work, and what follows it, that are there to be waited for."""
