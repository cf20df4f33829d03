"""The store: owns the tiers and every block, apart from the caches that use them; alone coordinates moves.

Caches are its holders: each has a block table over blocks of the store, and several may share blocks (a deep copy
does). The store hands out blocks and slots, frees what nobody refers to, makes room in hot, and applies moves when
their copies are done. It never decides by how far a copy has come: only positions, counts and settings decide
(placement.py), so that lossy codecs stay deterministic.

Imports: errors, config, counters, block, codecs, device, tiers, plan, placement, inflight, transfer, prefetcher,
holders, opening.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Sequence

import torch

from tieredkv.block import Block, LayerGeometry
from tieredkv.codecs import get_codec
from tieredkv.config import CacheSettings
from tieredkv.counters import Counters
from tieredkv.device import LEDGER, Device
from tieredkv.errors import BudgetError, MismatchError
from tieredkv.inflight import Move
from tieredkv.placement import Candidate, leaving, leaving_order
from tieredkv.plan import Visibility
from tieredkv.prefetcher import Prefetcher
from tieredkv.store.holders import Holder, Holders
from tieredkv.store.opening import Budget, open_tiers, staging_ring
from tieredkv.tiers import Tier
from tieredkv.transfer import Mover

__all__ = ["BlockStore", "Holder"]

_UNUSED_TOKENS = 2**62
"""The distance from the end of a row of what is in no row: such blocks leave hot first."""


class BlockStore(Holders):
    """Blocks of one model in up to three tiers, device memory in two forms.

    Args:
        settings: sizes and choices.
        layers: geometry of each tiered layer.
        device: streams, events and memory of the computing device.
        rows: batch rows of the first forward, for sizes given in tokens.
        fingerprint: names the model in cold files.

    Raises:
        BudgetError: hot cannot hold one block for each row beside the staging buffers.
        ColdTierError: the cold folder cannot be used.
    """

    def __init__(
        self,
        settings: CacheSettings,
        layers: Sequence[LayerGeometry],
        device: Device,
        rows: int,
        fingerprint: str,
    ) -> None:
        super().__init__()
        self.settings, self.layers, self.device = settings, tuple(layers), device
        self.block_size = settings.block_size
        self.codec = get_codec(settings.codec)
        self.reads_in_place = settings.read_in_place and device.addresses_host and self.codec.lossless
        self.visibility: Visibility | None = None
        if settings.beyond == "drop" and settings.window is not None:
            self.visibility = Visibility(settings.sink_blocks, settings.window, settings.block_size)
        self.counters = Counters(settings.log_moves)
        self.lock = device.lock()
        self.forwards = 0
        self.budget = Budget.resolve(settings, self.layers, self.codec, device, rows)
        self.budget.promise_to(self, device)
        self.tiers: dict[str, Tier] = {}
        self.hot, self.packed, self.warm, self.cold = open_tiers(
            self.budget, settings, self.layers, self.codec, device, fingerprint
        )
        opened = (self.hot, self.packed, self.warm, self.cold)
        self.tiers = {tier.role: tier for tier in opened if tier is not None}
        self.mover = Mover(
            device,
            self.hot,
            self.tiers,
            self.codec,
            self.layers,
            self.block_size,
            settings.verify,
            self.counters,
        )
        ring = staging_ring(self.budget, settings, self.layers, self.mover, self.codec, device)
        self.prefetcher = Prefetcher(device, self.mover, ring, self.counters)
        self.give_up_kept: Callable[[int], int] | None = None
        self._used_hot: set[int] = set()
        self._flat: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._ids = itertools.count()

    # ---- blocks

    def new_block(self, *, hot: int | None = None) -> Block:
        """A new unsealed block, with one reference."""
        self.version += 1
        return Block(next(self._ids), hot=hot, checksums=[None] * len(self.layers))

    def flat_pools(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's hot K and V, [kv_heads, slots * block_size, dim]: neighbouring slots are neighbouring tokens."""
        pools = self._flat.get(layer)
        if pools is None:
            k_pool, v_pool = self.hot.planes[layer]
            pools = self._flat[layer] = (k_pool.flatten(1, 2), v_pool.flatten(1, 2))
        return pools

    def warm_run(self, layer: int, start: int, blocks: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V, [kv_heads, blocks, block_size, dim], of neighbouring warm slots in place: by default of all slots.

        Raises:
            MismatchError: the plan reads in place what cannot be, or the slots are no run of the tier.
        """
        warm = self.warm
        planes = None if warm is None else warm.run(layer, start, warm.slots.total if blocks is None else blocks)
        if planes is None:
            raise MismatchError(
                "Blocks were to be read in place, where nothing can be read.",
                wanted="a warm tier in memory that the computing device addresses",
                got=type(warm).__name__,
                change="report this: the plan and the tier do not agree",
            )
        return planes[0], planes[1]

    def take_hot(self, preferred: int | None) -> int:
        """A free hot slot, the preferred one if it is free. Room was made before.

        Raises:
            BudgetError: no slot is free.
        """
        slot = self.hot.slots.allocate(preferred)
        self.version += 1
        return slot

    def clean_hot(self, slot: int) -> None:
        """Zero a slot that held something before: kernels multiply masked values by 0, and 0 times NaN is NaN."""
        if slot in self._used_hot:

            def zero() -> None:
                for layer in range(len(self.layers)):
                    for pool in self.hot.planes[layer]:
                        pool[:, slot].zero_()

            self.device.run(zero, writes=[("hot", slot)], name="clean slot")
        self._used_hot.add(slot)

    def note_hot_use(self, slots: Sequence[int]) -> None:
        """Whole blocks are about to be written into these slots: they are cleaned before they hold less than that."""
        self._used_hot.update(slots)

    # ---- room in hot

    def candidates(self, protected: set[int]) -> list[Candidate]:
        """Hot sealed blocks that may leave; `protected` are ids that may not."""
        found: dict[int, Candidate] = {}
        for holder in self.holders:
            end = holder.plan.total if holder.plan is not None else holder.tokens
            sinks = 0 if holder.keeps else self.settings.sink_blocks
            for row in holder.table:
                for index, block in enumerate(row):
                    if block.hot is None or not block.sealed or block.id in protected:
                        continue
                    distance = _UNUSED_TOKENS if holder.keeps else end - (index + 1) * self.block_size
                    last_access = block.last_access if holder.keeps else holder.last_access
                    seen = Candidate(block, distance, last_access, holder.priority, holder.number, index < sinks)
                    old = found.get(block.id)
                    found[block.id] = seen if old is None else old.shared_with(seen)
        return list(found.values())

    def reclaim(self, blocks: int) -> int:
        """Free blocks that are kept for later caches and that none uses; returns how many went."""
        gone = 0 if self.give_up_kept is None else self.give_up_kept(blocks)
        if gone:
            self.poll()  # what was being copied has its slots until then
        return gone

    def leave_hot(self, blocks: Sequence[Block], reason: str) -> int:
        """Make blocks leave hot, and return how many did: those without a copy below are copied first.

        Waits for the copies. A block whose copy failed stays.

        Raises:
            BudgetError: copies that are needed do not fit below.
        """
        missing = [b for b in blocks if not b.is_stored_below and not self.is_moving(b)]
        self.start_move(missing, "hot", reason)
        self.wait_for(blocks)
        left = 0
        for block in blocks:
            if block.hot is None or block.is_stored_below:  # the first where its cache was collected meanwhile
                self.drop_copy(block, "hot")
                left += 1
        return left

    def make_room(self, holder: Holder, slots: int, protected: set[int], reason: str) -> None:
        """Free hot slots until `slots` are free for a holder and within its quota.

        Raises:
            BudgetError: not enough blocks can leave.
        """
        self.poll()
        while (deficit := slots - self.hot.slots.free) > 0 or (slots and holder.surplus(slots) > 0):
            order = leaving_order(self.candidates(protected), self.budget.window_tokens)
            chosen = leaving(order, holder.number, holder.surplus(slots), deficit)
            left = self.leave_hot([c.block for c in chosen], reason) if chosen else 0
            if not left:
                raise BudgetError(
                    "No room in hot for the blocks of this forward.",
                    wanted=f"{slots} free slots of {self.hot.slot_bytes} bytes",
                    got=f"{self.hot.slots.free} free of {self.hot.slots.total}",
                    change="enlarge hot=, use fewer batch rows, or a shorter prefill_chunk_size",
                    tier="hot",
                )

    def bring_up(self, blocks: Sequence[Block], reason: str) -> list[Move]:
        """Start copies of stored blocks into free hot slots, in the background; `land` waits for them.

        Raises:
            BudgetError: not as many slots are free.
        """
        slots = self.hot.slots.allocate_many(len(blocks))
        self.note_hot_use(slots)
        self.version += 1
        if not self.codec.lossless:
            self.decoded.update(block.id for block in blocks)
        return self._queue_all(blocks, "below", [("hot", slots)], reason)

    # ---- end

    def close(self) -> None:
        """Wait for copies, give all memory and files back. May be called again."""
        if os.getpid() != self._pid:
            return  # before the lock, which a fork may have left held
        with self.lock, contextlib.ExitStack() as steps:
            if self._closed:
                return
            self._closed = True
            # From the last to the first, and each of them whatever comes of those before: it may be Ctrl-C.
            for tier in self.tiers.values():
                steps.callback(tier.close)
            steps.callback(self._flat.clear)
            steps.callback(LEDGER.release, self)
            steps.callback(self.device.close)
            for move in self._moves:
                steps.callback(self._end, move)
            steps.callback(self.prefetcher.flush)

    @staticmethod
    def _end(move: Move) -> None:
        with contextlib.suppress(Exception):
            move.wait()
