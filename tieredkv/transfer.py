"""Copies of blocks between tiers: encode, checksum, write; read, verify, decode. Each on a stream, ordered by events.

What runs where: demotions and the write-through of a long prefill run on the device's `down` stream; reads towards the
device run inside whatever stream calls `fetch` (the prefetcher's `up`, or compute for a promotion that is needed now).
A copy holds its source tensors until its event is done. Nothing here decides what moves; the store does.

Imports: errors, stats, block, checksum, codecs, device, tiers, plan, verified.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch

from tieredkv.block import LOWER, Block, LayerGeometry, Planes
from tieredkv.checksum import Checksummer
from tieredkv.codecs import Codec
from tieredkv.config import Verify
from tieredkv.device import Device, Event, Region
from tieredkv.errors import ChecksumError
from tieredkv.plan import ThroughWrite
from tieredkv.stats import Counters
from tieredkv.tiers import HotTier, Tier
from tieredkv.verified import Check, VerifiedReads, slot_of

MAX_HELD_BYTES = 256 * 2**20
"""Most bytes of new K/V that copies on their way down may keep alive before the forward waits for the oldest."""


@dataclasses.dataclass(eq=False)
class Move:
    """A demotion on its way: blocks that stay readable at their source until it is applied by the store.

    Args:
        blocks: what moves.
        source: where it was.
        target: one of the tiers below it.
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
        self._reads = VerifiedReads(tiers, self.checksummer, self.row_bytes, verify, counters)
        self._held: deque[tuple[Event, int]] = deque()
        self._held_bytes = 0
        self.peak_held_bytes = 0

    # ---- down

    def demote(self, blocks: Sequence[Block], source: str, target: str, slots: Sequence[int], reason: str) -> Move:
        """Copy sealed blocks to a lower tier, all layers, in the background; not when all of them are freed meanwhile.

        The blocks' slots at `source` may be read meanwhile, and must not be written or freed before the event is done.
        """
        blocks = tuple(blocks)
        source_slots = [slot_of(block, source) for block in blocks]
        encoded = source != "hot"

        def work() -> None:
            started = time.perf_counter()
            for layer in range(len(self._layers)):
                if not any(block.refs for block in blocks):
                    return
                planes = self._source_planes(layer, source, source_slots, blocks)
                self._store(layer, blocks, target, slots, planes, born=not encoded)
            self._counters.moved(
                source,
                target,
                blocks,
                total_bytes=sum(self.row_bytes) * len(blocks),
                seconds=time.perf_counter() - started,
                started=started,
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
            oldest.join()  # a failure belongs to the forward that wrote, and is raised when that one is committed

    def _source_planes(self, layer: int, source: str, slots: list[int], blocks: tuple[Block, ...]) -> Planes:
        if source == "hot":
            hot = self._tiers["hot"]
            if not isinstance(hot, HotTier):
                raise TypeError(type(hot))
            k_pool, v_pool = hot.planes[layer]
            if len(parts := hot.runs(slots)) == 1:  # neighbours are read where they are
                _, start, count = parts[0]
                return self._codec.encode(k_pool[:, start : start + count], v_pool[:, start : start + count])
            index = torch.tensor(slots, device=k_pool.device)
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
        wrong = self._wrong_on_arrival(layer, blocks, tier, slots)
        if wrong:
            self._counters.failed(retries=1)
            tier.write(layer, slots, planes)
            wrong = self._wrong_on_arrival(layer, blocks, tier, slots)
        if wrong:
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
            arrived = self.checksummer.checksum(view).tolist()
            for block, got in zip(blocks[index : index + count], arrived, strict=True):
                wanted = block.checksums[layer]
                if wanted is not None and got != wanted:
                    wrong.append(ChecksumError(block=block.id, layer=layer, tier=tier.role, wanted=wanted, got=got))
        self._counters.verified(len(blocks) - len(wrong))
        if wrong:
            self._counters.failed(checksum=len(wrong))
            self._reads.tell(tier.role, wrong[0])
        return wrong

    # ---- up

    def fetch(
        self, layer: int, blocks: Sequence[Block], k_out: torch.Tensor, v_out: torch.Tensor, scratch: Planes | None
    ) -> Callable[[float], None]:
        """Ask for one layer of blocks, on the calling thread's current stream.

        Args:
            layer: tiered layer.
            blocks: stored blocks; each is read from the fastest tier below hot that has it.
            k_out: [kv_heads, blocks, block_size, k_dim], written.
            v_out: [kv_heads, blocks, block_size, v_dim], written.
            scratch: encoded planes for as many blocks, on the computing device; None for the raw codec, which arrives
                in its destination.

        Returns:
            What has to be called, before anything is used, when the stream has done that, with the seconds it took:
            compares the checksums of what arrived, reads again what is wrong, decodes, and counts. It raises what
            `fetch` raises.

        Raises:
            ChecksumError: a block is wrong in every tier that has it.
            ColdTierError: a block cannot be read from any tier that has it.
        """
        parts = [
            self._ask(layer, blocks[first : first + count], first, tier, scratch or (k_out, v_out))
            for first, count, tier in _by_tier(blocks)
        ]

        def arrived(seconds: float) -> None:
            asking_seconds = sum(part.asking_seconds for part in parts) or 1.0
            for part in parts:
                checked = time.perf_counter()
                part.check()
                if scratch is not None:
                    where = slice(part.first, part.first + len(part.blocks))
                    self._codec.decode(part.planes, k_out[:, where], v_out[:, where])
                its_seconds = seconds * part.asking_seconds / asking_seconds
                if not self._device.up.overlaps_finish:
                    its_seconds += time.perf_counter() - checked
                self._counters.moved(
                    part.tier,
                    "hot",
                    part.blocks,
                    total_bytes=self.row_bytes[layer] * len(part.blocks),
                    seconds=its_seconds,
                    started=part.started,
                    reason="stream",
                    layer=layer,
                    count=len(part.blocks) / len(self._layers),
                )

        return arrived

    def _ask(self, layer: int, blocks: Sequence[Block], first: int, tier: str, planes: Planes) -> _Part:
        """Read neighbouring blocks from one tier into their places among `planes`."""
        started = time.perf_counter()
        own = tuple(plane[:, first : first + len(blocks)] for plane in planes)
        check = self._reads.read(layer, blocks, tier, own, non_blocking=True)
        return _Part(first, blocks, tier, own, check, started, time.perf_counter() - started)

    def forget(self, block: Block) -> None:
        """A block was freed: drop what was remembered about it."""
        self._reads.forget(block)


@dataclasses.dataclass(frozen=True)
class _Part:
    """Some blocks of one tier on their way up.

    Args:
        first: index of the first of them among the blocks of the fetch.
        blocks: the blocks.
        tier: where they are read.
        planes: where they arrive, as stored.
        check: compares them once they are there.
        started: `time.perf_counter()` when they were asked for.
        asking_seconds: what that took the host.
    """

    first: int
    blocks: Sequence[Block]
    tier: str
    planes: Planes
    check: Check
    started: float
    asking_seconds: float


def read_regions(blocks: Sequence[Block]) -> list[Region]:
    """The regions that `fetch` of these blocks may read."""
    return [(tier, slot) for block in blocks for tier in LOWER if (slot := getattr(block, tier)) is not None]


def read_from(block: Block) -> str:
    """The tier from which a block that is not hot is read: the fastest that stores it."""
    return next((tier for tier in LOWER if getattr(block, tier) is not None), LOWER[-1])


def _by_tier(blocks: Sequence[Block]) -> list[tuple[int, int, str]]:
    """Neighbouring blocks that are read from the same tier, as (first, count, tier)."""
    groups: list[tuple[int, int, str]] = []
    for index, block in enumerate(blocks):
        tier = read_from(block)
        if groups and groups[-1][2] == tier:
            first, count, _ = groups[-1]
            groups[-1] = (first, count + 1, tier)
        else:
            groups.append((index, 1, tier))
    return groups
