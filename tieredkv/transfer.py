"""Copies of blocks between tiers: encode, checksum, write; read, verify, decode. Each on a stream, ordered by events.

What runs where: demotions and the write-through of a long prefill run on the device's `down` stream; reads towards the
device run inside whatever stream calls `fetch` (the prefetcher's `up`, or compute for a promotion that is needed now).
A copy holds its source tensors until its event is done. Nothing here decides what moves; the store does.

Imports: errors, stats, block, checksum, codecs, device, tiers, plan.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Mapping, Sequence

import torch

from tieredkv.block import Block, LayerGeometry, Planes
from tieredkv.checksum import Checksummer
from tieredkv.codecs import Codec
from tieredkv.config import Verify
from tieredkv.device import Device, Event, Region
from tieredkv.errors import ChecksumError, ColdTierError
from tieredkv.plan import ThroughWrite
from tieredkv.stats import Counters
from tieredkv.tiers import HotTier, Tier

MAX_HELD_BYTES = 256 * 2**20
"""Most bytes of new K/V that copies on their way down may keep alive before the forward waits for the oldest."""


@dataclasses.dataclass(eq=False)
class Move:
    """A demotion on its way: blocks that stay readable at their source until it is applied by the store.

    Args:
        blocks: what moves.
        source: "hot" or "warm".
        target: "warm" or "cold".
        slots: the target's slot for each block.
        event: done when every layer has arrived and was verified.
        reason: for the log.
    """

    blocks: tuple[Block, ...]
    source: str
    target: str
    slots: tuple[int, ...]
    event: Event
    reason: str


class Mover:
    """Copies blocks for one store.

    Args:
        device: streams and events.
        tiers: "hot" and, where they exist, "warm" and "cold".
        codec: encoding below hot.
        layers: geometry of each tiered layer.
        block_size: tokens of a block.
        verify: when checksums are taken and compared.
        counters: where copies are counted.
    """

    def __init__(
        self,
        device: Device,
        tiers: Mapping[str, Tier],
        codec: Codec,
        layers: Sequence[LayerGeometry],
        block_size: int,
        verify: Verify,
        counters: Counters,
    ) -> None:
        self._device, self._tiers, self._codec = device, tiers, codec
        self._layers, self._block_size, self._verify = layers, block_size, verify
        self._counters = counters
        self.checksummer = Checksummer()
        self.planes = [codec.planes(layer, block_size) for layer in layers]
        self.row_bytes = [sum(plane.block_bytes for plane in planes) for planes in self.planes]
        self._seen: set[tuple[int, int]] = set()
        self._held: deque[tuple[Event, int]] = deque()
        self._held_bytes = 0
        self.peak_held_bytes = 0

    # ---- down

    def demote(self, blocks: Sequence[Block], source: str, target: str, slots: Sequence[int], reason: str) -> Move:
        """Copy sealed blocks to a lower tier, all layers, in the background.

        The blocks' slots at `source` may be read meanwhile, and must not be written or freed before the event is done.
        """
        blocks = tuple(blocks)
        source_slots = [_slot(block, source) for block in blocks]
        encoded = source != "hot"

        def work() -> None:
            started = time.perf_counter()
            for layer in range(len(self._layers)):
                planes = self._source_planes(layer, source, source_slots, blocks)
                self._store(layer, blocks, target, slots, planes, born=not encoded)
            self._counters.moved(
                source,
                target,
                [block.id for block in blocks],
                total_bytes=sum(self.row_bytes) * len(blocks),
                seconds=time.perf_counter() - started,
                reason=reason,
            )

        event = self._device.down.submit(
            work,
            reads=[(source, slot) for slot in source_slots],
            writes=[(target, slot) for slot in slots],
            after=[self._device.record()],
            nbytes=sum(self.row_bytes) * len(blocks),
            name=f"demote {source}->{target}",
        )
        return Move(blocks, source, target, tuple(slots), event, reason)

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
                [block.id for block in write.blocks],
                total_bytes=self.row_bytes[layer] * count,
                seconds=time.perf_counter() - started,
                reason="prefill",
                layer=layer,
                blocks=count / len(self._layers),
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

    def _hold(self, event: Event, held_bytes: int) -> None:
        """Bound what copies keep alive: wait for the oldest while the sum is above the limit."""
        self._held.append((event, held_bytes))
        self._held_bytes += held_bytes
        self.peak_held_bytes = max(self.peak_held_bytes, self._held_bytes)
        while self._held and (self._held[0][0].done() or self._held_bytes > MAX_HELD_BYTES):
            oldest, freed_bytes = self._held.popleft()
            self._held_bytes -= freed_bytes
            oldest.join()  # a failure belongs to the forward that wrote, and is raised when that one is committed

    def _source_planes(self, layer: int, source: str, slots: list[int], blocks: tuple[Block, ...]) -> Planes:
        if source == "hot":
            hot = self._tiers["hot"]
            if not isinstance(hot, HotTier):
                raise TypeError(type(hot))
            k_pool, v_pool = hot.planes[layer]
            index = torch.tensor(slots, device=k_pool.device)
            return self._codec.encode(k_pool.index_select(1, index), v_pool.index_select(1, index))
        planes = tuple(plane.empty(len(slots)) for plane in self.planes[layer])
        self._read_verified(layer, blocks, source, planes)
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
        if self._wrong_on_arrival(layer, blocks, tier, slots) is None:
            return
        self._counters.failed(checksum=1, retries=1)
        tier.write(layer, slots, planes)
        wrong = self._wrong_on_arrival(layer, blocks, tier, slots)
        if wrong is not None:
            self._counters.failed(checksum=1)
            raise wrong

    def _wrong_on_arrival(
        self, layer: int, blocks: Sequence[Block], tier: Tier, slots: Sequence[int]
    ) -> ChecksumError | None:
        for block, slot in zip(blocks, slots, strict=True):
            view = tier.run(layer, slot, 1)
            if view is None:
                # A disk is compared when it is read: reading back now would be served from the page cache and prove
                # nothing.
                return None
            got, wanted = int(self.checksummer.checksum(view)[0]), block.checksums[layer]
            if wanted is not None and got != wanted:
                return ChecksumError(block=block.id, layer=layer, tier=tier.role, wanted=wanted, got=got)
        self._counters.verified(len(blocks))
        return None

    # ---- up

    def fetch(
        self, layer: int, blocks: Sequence[Block], k_out: torch.Tensor, v_out: torch.Tensor, scratch: Planes | None
    ) -> None:
        """Bring one layer of blocks up: read, verify as arrived, decode. Runs on the calling thread.

        Args:
            layer: tiered layer.
            blocks: stored blocks; each is read from warm when it is there, else from cold.
            k_out: [kv_heads, blocks, block_size, k_dim], written.
            v_out: [kv_heads, blocks, block_size, v_dim], written.
            scratch: encoded planes for as many blocks, on the computing device; None for the raw codec, which arrives
                in its destination.

        Raises:
            ChecksumError: a block is wrong in every tier that has it.
            ColdTierError: a block cannot be read from any tier that has it.
        """
        for first, count, tier in _by_tier(blocks):
            started = time.perf_counter()
            some = blocks[first : first + count]
            k_part, v_part = k_out[:, first : first + count], v_out[:, first : first + count]
            planes = (k_part, v_part) if scratch is None else tuple(p[:, :count] for p in scratch)
            self._read_verified(layer, some, tier, planes)
            if scratch is not None:
                self._codec.decode(planes, k_part, v_part)
            self._counters.moved(
                tier,
                "hot",
                [block.id for block in some],
                total_bytes=self.row_bytes[layer] * count,
                seconds=time.perf_counter() - started,
                reason="stream",
                layer=layer,
                blocks=count / len(self._layers),
            )

    def _read_verified(self, layer: int, blocks: Sequence[Block], tier: str, out: Planes) -> None:
        try:
            self._tiers[tier].read(layer, [_slot(block, tier) for block in blocks], out)
        except ColdTierError:
            self._counters.failed(tier=1)
            for index, block in enumerate(blocks):
                self._read_again(layer, block, tier, tuple(p[:, index : index + 1] for p in out))
            return
        for index in self._wrong_blocks(layer, blocks, out):
            self._counters.failed(checksum=1)
            self._read_again(layer, blocks[index], tier, tuple(p[:, index : index + 1] for p in out))

    def _wrong_blocks(self, layer: int, blocks: Sequence[Block], planes: Planes) -> list[int]:
        """Indices of blocks whose bytes, as arrived, are not the bytes that were stored."""
        if self._verify == "off":
            return []
        if self._verify == "first" and all((block.id, layer) in self._seen for block in blocks):
            return []
        got = self.checksummer.checksum(planes).tolist()
        wrong = [i for i, block in enumerate(blocks) if block.checksums[layer] != got[i]]
        self._counters.verified(len(blocks) - len(wrong))
        if self._verify == "first":
            self._seen.update((block.id, layer) for i, block in enumerate(blocks) if i not in wrong)
        return wrong

    def _read_again(self, layer: int, block: Block, tier: str, out: Planes) -> None:
        """Read one block once more, then from the other tier that has it; raise when none gives the right bytes."""
        error: ChecksumError | ColdTierError | None = None
        for source in (tier, *(t for t in ("warm", "cold") if t != tier and getattr(block, t) is not None)):
            self._counters.failed(retries=1)
            try:
                self._tiers[source].read(layer, [_slot(block, source)], out)
            except ColdTierError as failure:
                error = failure
                continue
            if self._verify == "off":
                return
            got, wanted = int(self.checksummer.checksum(out)[0]), block.checksums[layer]
            if wanted is not None and got == wanted:
                self._counters.verified(1)
                return
            self._counters.failed(checksum=1)
            error = ChecksumError(block=block.id, layer=layer, tier=source, wanted=wanted or 0, got=got)
        if error is not None:
            raise error

    def forget(self, block: Block) -> None:
        """A block was freed: drop what was remembered about it."""
        if self._verify == "first":
            self._seen -= {(block.id, layer) for layer in range(len(self._layers))}


def read_regions(blocks: Sequence[Block]) -> list[Region]:
    """The regions that `fetch` of these blocks may read."""
    return [(tier, slot) for block in blocks for tier in ("warm", "cold") if (slot := getattr(block, tier)) is not None]


def _slot(block: Block, tier: str) -> int:
    slot = getattr(block, tier)
    if not isinstance(slot, int):
        raise LookupError(f"block {block.id} is not in {tier}")
    return slot


def _by_tier(blocks: Sequence[Block]) -> list[tuple[int, int, str]]:
    """Neighbouring blocks that are read from the same tier, as (first, count, tier)."""
    groups: list[tuple[int, int, str]] = []
    for index, block in enumerate(blocks):
        tier = "warm" if block.warm is not None else "cold"
        if groups and groups[-1][2] == tier:
            first, count, _ = groups[-1]
            groups[-1] = (first, count + 1, tier)
        else:
            groups.append((index, 1, tier))
    return groups
