"""Copies of blocks between tiers: encode, checksum, write; read, verify, decode. Each on a stream, ordered by events.

What runs where: demotions and the write-through of a long prefill run on the device's `down` stream; reads towards the
device run wherever `fetch` is called: on the device's `up` stream, and on a CPU on the thread that attends the chunk.
A copy holds its source tensors until its event is done. Nothing here decides what moves; the store does.

Imports: errors, config, counters, block, checksum, codecs, device, tiers, plan, verified, inflight.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tieredkv.block import Block, LayerGeometry, Planes
from tieredkv.checksum import Checksummer
from tieredkv.codecs import Codec
from tieredkv.config import Verify
from tieredkv.counters import Counters
from tieredkv.device import Device, Event, Stream, Took
from tieredkv.errors import ChecksumError
from tieredkv.inflight import Arrival, Move, Part, by_tier, read_regions
from tieredkv.plan import ThroughWrite
from tieredkv.tiers import HotTier, NativeMoves, Tier, row_bytes
from tieredkv.verified import VerifiedReads, slot_of

MAX_HELD_BYTES = 256 * 2**20
"""Most bytes of new K/V that copies on their way down may keep alive before the forward waits for the oldest."""

PROMOTED_BYTES = 8 * 2**20
"""Most bytes of one copy up to hot: what a forward waits for goes before the next of them."""
AT_ONCE, AHEAD_OF_NEED = 1, -1
"""Priorities on a stream, beside 0: copies for which a forward waits, and copies up for one that is still to come."""
NEEDED_NOW = ("room", "quota")
"""Reasons of moves down for which a forward waits."""


class Mover:
    """Copies blocks for one store.

    Args:
        device: streams and events.
        hot: the tier in which blocks are as attention reads them.
        tiers: "hot" and those of `LOWER` that exist.
        codec: encoding below hot.
        layers: geometry of each tiered layer.
        block_size: tokens of a block.
        verify: when checksums are taken and compared.
        counters: where copies are counted.
    """

    def __init__(
        self,
        device: Device,
        hot: HotTier,
        tiers: Mapping[str, Tier],
        codec: Codec,
        layers: Sequence[LayerGeometry],
        block_size: int,
        verify: Verify,
        counters: Counters,
    ) -> None:
        self._device, self._hot, self._tiers, self._codec = device, hot, tiers, codec
        self._layers, self._block_size, self._verify = layers, block_size, verify
        self._counters = counters
        self.checksummer = Checksummer()
        self._native_moves = NativeMoves(self.checksummer)
        self.planes = [codec.planes(layer, block_size) for layer in layers]
        self.row_bytes = [row_bytes(planes) for planes in self.planes]
        self._block_bytes = sum(self.row_bytes)
        self._reads = VerifiedReads(tiers, self.checksummer, self.row_bytes, verify, counters)
        self._held: deque[tuple[Event, int]] = deque()
        self._held_bytes = 0
        self.peak_held_bytes = 0

    @property
    def native_reasons(self) -> list[str]:
        """Why checksums, or copies down in memory, are not served by C++ on this machine."""
        return [reason for reason in (self.checksummer.native_reason, self._native_moves.native_reason) if reason]

    def lane(self, source: str, target: str, reason: str) -> tuple[Stream, int]:
        """The stream of such a move, and its priority there.

        What touches no device memory goes by the stream of files, so that a slow disk holds back nothing else.
        """
        if target == "hot":
            return self._device.up, AHEAD_OF_NEED
        if {source, target} == {"warm", "cold"}:
            return self._device.disk, 0
        return self._device.down, AT_ONCE if reason in NEEDED_NOW else 0

    # ---- down

    def demote(self, blocks: Sequence[Block], source: str, target: str, slots: Sequence[int], reason: str) -> Move:
        """Copy sealed blocks to a tier below hot, all layers, in the background; not when all are freed meanwhile.

        The blocks' slots at `source` may be read meanwhile, and must not be written or freed before the move is done.
        """
        blocks = tuple(blocks)
        source_slots = [slot_of(block, source) for block in blocks]
        stream, priority = self.lane(source, target, reason)

        def work() -> None:
            started = time.perf_counter()
            if not any(block.refs for block in blocks):
                return
            if not self._moved_at_once(blocks, source, source_slots, target, slots):
                for layer in range(len(self._layers)):
                    if not any(block.refs for block in blocks):
                        return
                    planes = self._source_planes(layer, source, source_slots, blocks)
                    self._store(layer, blocks, target, slots, planes, born=source == "hot")
            self._counters.moved(
                source,
                target,
                blocks,
                total_bytes=self._block_bytes * len(blocks),
                seconds=time.perf_counter() - started,
                started=started,
                reason=reason,
            )

        event = stream.submit(
            work,
            reads=[(source, slot) for slot in source_slots] if self._device.follows_accesses else (),
            writes=[(target, slot) for slot in slots] if self._device.follows_accesses else (),
            after=[self._device.record()],
            priority=priority,
            nbytes=self._block_bytes * len(blocks),
            name=f"demote {source}->{target}",
        )
        return Move(blocks, source, target, tuple(slots), (event,), reason)

    def write_through(self, write: ThroughWrite, layer: int, k: torch.Tensor, v: torch.Tensor) -> Event:
        """Write one layer of new blocks straight to a lower tier, in the background.

        Args:
            write: the blocks and their slots.
            layer: tiered layer.
            k: keys of the blocks' tokens, [kv_heads, tokens, k_dim]; kept alive until the event is done.
            v: values, [kv_heads, tokens, v_dim]; the same.
        """
        count, size = len(write.blocks), self._block_size

        def work() -> None:
            started = time.perf_counter()
            shape = (k.shape[0], count, size, -1)
            planes = self._codec.encode(k.reshape(shape), v.reshape(shape))
            self._store(layer, write.blocks, write.tier, write.slots, planes, born=True)
            self._counters.moved(
                "hot",
                write.tier,
                write.blocks,
                total_bytes=self.row_bytes[layer] * count,
                seconds=time.perf_counter() - started,
                started=started,
                reason="prefill",
                layer=layer,
                count=count / len(self._layers),
            )

        event = self._device.down.submit(
            work,
            reads=[("new", write.blocks[0].id, layer)],
            writes=[(write.tier, slot) for slot in write.slots],
            after=[self._device.record()],
            nbytes=self.row_bytes[layer] * count,
            name=f"write through layer {layer}",
        )
        self._hold(event, k.numel() * k.element_size() + v.numel() * v.element_size())
        return event

    @property
    def held_bytes(self) -> int:
        """Bytes of new K and V that copies on their way down keep alive now."""
        return sum(held_bytes for event, held_bytes in tuple(self._held) if not event.done())

    def _hold(self, event: Event, held_bytes: int) -> None:
        """Bound what copies keep alive: wait for the oldest while the sum is above the limit."""
        self._held.append((event, held_bytes))
        self._held_bytes += held_bytes
        self.peak_held_bytes = max(self.peak_held_bytes, self._held_bytes)
        while self._held and (self._held[0][0].done() or self._held_bytes > MAX_HELD_BYTES):
            oldest, freed_bytes = self._held.popleft()
            self._held_bytes -= freed_bytes
            with self._counters.waiting(not oldest.done()):
                oldest.join()  # a failure belongs to the forward that wrote, and is raised when that one is committed

    def _moved_at_once(
        self, blocks: Sequence[Block], source: str, source_slots: Sequence[int], target: str, slots: Sequence[int]
    ) -> bool:
        """Copy new blocks as they are from hot to other memory, all layers in one call, where a CPU addresses both."""
        if source != "hot" or not self._codec.lossless:
            return False
        tier, verifies = self._tiers[target], self._verify != "off"
        sums = self._native_moves.move(self._hot, source_slots, tier, slots, summed=verifies)
        if sums is None or not verifies:
            return sums is not None
        for index, block in enumerate(blocks):
            block.checksums[:] = sums.read[index :: len(blocks)]
        if sums.read == sums.lying:
            self._counters.verified(len(sums.lying))
            return True
        for layer in range(len(self._layers)):
            lying = sums.lying[layer * len(blocks) : (layer + 1) * len(blocks)]
            if self._reads.compare(layer, blocks, target, (), lying):
                self._write_again(layer, blocks, tier, slots, self._source_planes(layer, source, source_slots, blocks))
        return True

    def _source_planes(self, layer: int, source: str, slots: Sequence[int], blocks: Sequence[Block]) -> Planes:
        if source == "hot":
            k_pool, v_pool = self._hot.planes[layer]
            if len(parts := self._hot.runs(slots)) == 1:  # neighbours are read where they are
                _, start, count = parts[0]
                return self._codec.encode(k_pool[:, start : start + count], v_pool[:, start : start + count])
            index = torch.tensor(list(slots), device=k_pool.device)
            return self._codec.encode(k_pool.index_select(1, index), v_pool.index_select(1, index))
        tier = self._tiers[source]
        device = tier.planes[layer][0].device if isinstance(tier, HotTier) else "cpu"
        planes = tuple(plane.empty(len(slots), device) for plane in self.planes[layer])
        self._reads.read(layer, blocks, source, planes)()
        return planes

    def _store(
        self, layer: int, blocks: Sequence[Block], target: str, slots: Sequence[int], planes: Planes, *, born: bool
    ) -> None:
        """Take the checksum where the block is born, write, and compare on arrival where the medium is memory."""
        tier = self._tiers[target]
        if self._verify == "off":
            tier.write(layer, slots, planes)
            return
        if born:
            for block, value in zip(blocks, self.checksummer.checksum(planes).tolist(), strict=True):
                block.checksums[layer] = value
        tier.write(layer, slots, planes)
        if self._wrong_on_arrival(layer, blocks, tier, slots):
            self._write_again(layer, blocks, tier, slots, planes)

    def _write_again(
        self, layer: int, blocks: Sequence[Block], tier: Tier, slots: Sequence[int], planes: Planes
    ) -> None:
        """Write blocks again that came to lie in a tier as other bytes than were sent; raise if they do again."""
        self._counters.failed(retries=1)
        tier.write(layer, slots, planes)
        if wrong := self._wrong_on_arrival(layer, blocks, tier, slots):
            raise wrong[0]

    def _wrong_on_arrival(
        self, layer: int, blocks: Sequence[Block], tier: Tier, slots: Sequence[int]
    ) -> list[ChecksumError]:
        """The errors of blocks that lie in the tier's memory as other bytes than were sent, counted.

        A disk is compared when it is read: reading back now would be served from the system's own cache of the file
        and prove nothing.
        """
        wrong: list[ChecksumError] = []
        for index, start, count in tier.runs(slots):
            view = tier.run(layer, start, count)
            if view is None:
                return []
            wrong += [error for _, error in self._reads.compare(layer, blocks[index : index + count], tier.role, view)]
        return wrong

    # ---- up

    def promote(self, blocks: Sequence[Block], slots: Sequence[int], reason: str, priority: int) -> Move:
        """Copy stored blocks up into hot slots, all layers, in the background.

        The slots must not be read before the move is done, nor the blocks' copies below be freed.
        """
        pools = list(self._hot.planes)
        # Afterwards: of pools that are new, computing may have used the memory before.
        events, before = list[Event](), self._device.record()
        for layer, layer_bytes in enumerate(self.row_bytes):
            # What comes encoded passes through a scratch outside of every budget: a block of one layer, one at a time.
            most = max(PROMOTED_BYTES // layer_bytes, 1) if self._codec.lossless else 1
            for at, start, length in self._hot.runs(slots):
                for first in range(0, length, most):
                    count = min(most, length - first)
                    places = slice(start + first, start + first + count)
                    k_out, v_out = (pool[:, places] for pool in pools[layer])
                    event = self._promote_layer(
                        layer,
                        blocks[at + first : at + first + count],
                        k_out,
                        v_out,
                        reason,
                        writes=[("hot", slot, layer) for slot in range(places.start, places.stop)],
                        after=[before, *(() if self._codec.lossless else events[-1:])],
                        priority=priority,
                    )
                    events.append(event)
        return Move(tuple(blocks), "below", "hot", tuple(slots), tuple(events), reason)

    def _promote_layer(
        self, layer: int, blocks: Sequence[Block], k_out: torch.Tensor, v_out: torch.Tensor, reason: str, **order: Any
    ) -> Event:
        """Copy one layer of blocks up into `k_out` and `v_out`, as `fetch` takes them."""

        def load() -> Arrival:
            scratch = None
            if not self._codec.lossless:
                scratch = tuple(plane.empty(len(blocks), k_out.device) for plane in self.planes[layer])
            return self.fetch(layer, blocks, k_out, v_out, scratch, reason=reason)

        return self._device.up.submit(
            load,
            finish=self.arrived,
            reads=read_regions(blocks),
            nbytes=self.row_bytes[layer] * len(blocks),
            garbage=[k_out, v_out],
            name="promote",
            **order,
        )

    def fetch(
        self,
        layer: int,
        blocks: Sequence[Block],
        k_out: torch.Tensor,
        v_out: torch.Tensor,
        scratch: Planes | None,
        *,
        reason: str = "stream",
    ) -> Arrival:
        """Ask for one layer of blocks, on the calling thread's current stream.

        Args:
            layer: tiered layer.
            blocks: stored blocks; each is read from the fastest tier below hot that has it.
            k_out: [kv_heads, blocks, block_size, k_dim], written.
            v_out: [kv_heads, blocks, block_size, v_dim], written.
            scratch: encoded planes for as many blocks, on the computing device; None for the raw codec, which arrives
                in its destination.
            reason: for the log, see `MoveRecord`.

        Returns:
            What `arrived` has to be given when the stream has done that, before anything is used.

        Raises:
            ChecksumError: a block is wrong in every tier that has it.
            ColdTierError: a block cannot be read from any tier that has it.
        """
        planes, parts = scratch or (k_out, v_out), []
        for first, count, tier in by_tier(blocks):
            started = time.perf_counter()
            some, where = blocks[first : first + count], slice(first, first + count)
            own = tuple(plane[:, where] for plane in planes)
            check = self._reads.read(layer, some, tier, own, non_blocking=True)
            asking_seconds = time.perf_counter() - started
            parts.append(Part(some, where, tier, own, check, asking_seconds))
        return Arrival(layer, tuple(parts), k_out, v_out, scratch is not None, reason)

    def arrived(self, arrival: Arrival, took: Took) -> None:
        """Make what was fetched usable: compare checksums, read again what is wrong, decode; and count.

        Args:
            arrival: what `fetch` returned.
            took: seconds from the begin of the fetch until all of it was done.

        Raises:
            ChecksumError, ColdTierError: as `fetch`.
        """
        began, finishing_seconds = time.perf_counter(), list[float]()
        for part in arrival.parts:
            part_began = time.perf_counter()
            part.check()
            if arrival.decodes:
                self._codec.decode(part.planes, arrival.k_out[:, part.where], arrival.v_out[:, part.where])
            finishing_seconds.append(time.perf_counter() - part_began)
        seconds = took()
        beside = self._device.up.overlaps_finish  # then the copies were still under way at first
        started = (time.perf_counter() if beside else began) - seconds
        shares = zip(arrival.parts, arrival.split(seconds), finishing_seconds, strict=True)
        for part, part_seconds, own_seconds in shares:
            part_seconds += 0.0 if beside else own_seconds
            self._counters.moved(
                part.tier,
                "hot",
                part.blocks,
                total_bytes=self.row_bytes[arrival.layer] * len(part.blocks),
                seconds=part_seconds,
                started=started,
                reason=arrival.reason,
                layer=arrival.layer,
                count=len(part.blocks) / len(self._layers),
            )
            started += part_seconds

    def forget(self, block: Block) -> None:
        """A block was freed: drop what was remembered about it."""
        self._reads.forget(block)
