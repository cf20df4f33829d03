"""Streams chunks of blocks through a ring of staging buffers: while one is attended, the next are on their way.

A forward announces the order in which it will read (layers, and in each layer the same chunks); the ring runs ahead of
it across the layer border, and at the end of a forward into the next one's first layer. Reading in another order is
right too: the ring is emptied and starts again from there.

On a device whose copies are not aside, as on a CPU, nothing is read ahead: a chunk is read when it is waited for.

A buffer is overwritten only after the attention that read it (an event of the compute stream), and read only after its
load is done (an event of the `up` stream).

Imports: counters, block, device, tiers, plan, inflight, transfer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence

import torch

from tieredkv.block import Block, LayerGeometry, Planes
from tieredkv.counters import Counters
from tieredkv.device import Device, Event
from tieredkv.inflight import read_regions
from tieredkv.plan import Chunk
from tieredkv.tiers import Empty
from tieredkv.transfer import Mover

logger = logging.getLogger("tieredkv")

SLOW_SECONDS = 1.0
"""A forward that waits longer than this for one chunk says so, once."""


@dataclasses.dataclass(eq=False)
class _Load:
    """A chunk in a buffer, or on its way there.

    Args:
        layer: tiered layer.
        blocks: the chunk's.
        buffer: which.
        event: done when it is there; None while nobody has begun to read it.
    """

    layer: int
    blocks: Sequence[Block]
    buffer: int
    event: Event | None = None

    def is_of(self, layer: int, chunk: Chunk) -> bool:
        """Whether it is this chunk's in this layer: blocks never change."""
        if self.layer != layer:
            return False
        # Mostly it is the very chunk that was announced; ids are compared where a new plan lists the same blocks.
        return self.blocks is chunk.blocks or [b.id for b in self.blocks] == [b.id for b in chunk.blocks]


class Staging:
    """One staging buffer: room for `blocks` blocks of any one layer, seen through that layer's geometry.

    Args:
        layers: geometry of each tiered layer.
        mover: names the encoded planes; lossy codecs arrive in a scratch beside the decoded blocks.
        blocks: capacity.
        block_size: tokens of a block.
        lossless: whether the codec is raw, which needs no scratch.
        empty: allocates device memory.
    """

    def __init__(
        self,
        layers: Sequence[LayerGeometry],
        mover: Mover,
        blocks: int,
        block_size: int,
        lossless: bool,
        empty: Empty,
    ) -> None:
        self._layers, self._mover, self._block_size = layers, mover, block_size
        self.blocks, self._lossless = blocks, lossless
        self.nbytes = staging_bytes(layers, mover.row_bytes, blocks, block_size, lossless)
        self.memory = empty((self.nbytes,), torch.uint8)
        self._views: dict[int, tuple[torch.Tensor, torch.Tensor, Planes | None]] = {}

    def views(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, Planes | None]:
        """(k, v, scratch) of a layer: [kv_heads, blocks, block_size, dim] twice, and encoded planes or None."""
        if layer not in self._views:
            # Seen as another dtype in inference mode, memory could not be written outside of it, as a stream does.
            with torch.inference_mode(False):
                self._views[layer] = self._carved(layer)
        return self._views[layer]

    def _carved(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, Planes | None]:
        geometry, offset = self._layers[layer], 0

        def carve(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            nonlocal offset
            size = math.prod(shape) * dtype.itemsize
            part = self.memory[offset : offset + size].view(dtype).view(shape)
            offset += size
            return part

        heads, room = geometry.kv_heads, self.blocks
        k = carve((heads, room, self._block_size, geometry.k_dim), geometry.dtype)
        v = carve((heads, room, self._block_size, geometry.v_dim), geometry.dtype)
        if self._lossless:
            return k, v, None
        return k, v, tuple(carve((heads, room, *p.inner), p.dtype) for p in self._mover.planes[layer])


def staging_bytes(
    layers: Sequence[LayerGeometry], row_bytes: Sequence[int], blocks: int, block_size: int, lossless: bool
) -> int:
    """Bytes of one staging buffer: its blocks in the largest layer, and their encoded form for lossy codecs."""
    sizes = zip(layers, row_bytes, strict=True)
    return blocks * max(layer.block_bytes(block_size) + (0 if lossless else row) for layer, row in sizes)


class Prefetcher:
    """The ring of one store.

    Args:
        device: streams and events.
        mover: reads, verifies and decodes.
        buffers: the staging buffers, at least two where anything is read ahead.
        counters: where stalls are counted.
    """

    def __init__(self, device: Device, mover: Mover, buffers: Sequence[Staging], counters: Counters) -> None:
        self._device, self._mover, self._buffers, self._counters = device, mover, buffers, counters
        self._loads: deque[_Load] = deque()
        self._free: deque[int] = deque(range(len(buffers)))
        # Whoever had a buffer's memory before may be reading it yet, in the order of the compute stream.
        self._read: list[Event] = [device.record() for _ in buffers]
        self._layers: Sequence[int] = ()
        self._chunks: Sequence[Chunk] = ()
        self._next = 0
        self._lock = device.lock()
        self._told = False
        self.chunk_blocks = buffers[0].blocks if buffers else 0

    def start(self, layers: Sequence[int], chunks: Sequence[Chunk]) -> None:
        """Announce a forward: these layers in this order, each reading these chunks in order.

        Loads start at once, where anything is read ahead.
        """
        with self._lock:
            self._layers, self._chunks = layers, chunks
            fits = len(self._loads) <= len(layers) * len(chunks)
            if not fits or not all(self._matches(load, index) for index, load in enumerate(self._loads)):
                self.flush()
            self._next = len(self._loads)
            self._fill()

    @contextlib.contextmanager
    def chunk(
        self, layers: Sequence[int], chunks: Sequence[Chunk], layer: int, index: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
        """K and V of `chunks[index]` in a layer, [kv_heads, tokens, dim] each, and the number of their buffer.

        Valid inside the `with`; what reads them must run through `Device.run` and name the region ("stage", buffer).
        Waits for the load; the time is counted as a stall. Only one chunk of a store is open at a time.

        Raises:
            ChecksumError, ColdTierError: the chunk cannot be had.
        """
        with self._lock:
            if (self._layers, self._chunks) != (layers, chunks):
                self.start(layers, chunks)
            load = self._front(layer, index)
            self._wait(load)
            k, v, _ = self._buffers[load.buffer].views(layer)
            count = len(chunks[index].blocks)
            try:
                yield k[:, :count].flatten(1, 2), v[:, :count].flatten(1, 2), load.buffer
            finally:
                # An attention that failed may have begun to read.
                self._read[load.buffer] = self._device.record()
            self._loads.popleft()
            self._free.append(load.buffer)
            self._fill()

    def _front(self, layer: int, index: int) -> _Load:
        """The load of this chunk, at the front of the ring; the ring starts again from here when it is not there."""
        if not self._loads or not self._loads[0].is_of(layer, self._chunks[index]):
            self.flush()
            self._next = self._layers.index(layer) * len(self._chunks) + index
            self._fill()
        return self._loads[0]

    def _wait(self, load: _Load) -> None:
        started = None if load.event is not None and load.event.done() else time.perf_counter()
        try:
            if load.event is None:
                self._read_now(load)
            else:
                load.event.wait()
        except Exception:
            self.flush()
            raise
        finally:
            if started is not None:
                self._waited(time.perf_counter() - started)

    def _waited(self, seconds: float) -> None:
        self._counters.stalled(seconds)
        if seconds > SLOW_SECONDS and not self._told:
            self._told = True
            logger.warning(
                "tieredkv: a forward waited %.1f s for blocks from below hot; the disk or memory there is slow", seconds
            )

    @contextlib.contextmanager
    def lend(self) -> Iterator[torch.Tensor]:
        """A staging buffer's bytes, uint8, for work of the compute stream inside the `with`.

        What was loaded ahead is dropped. Not while a chunk is open, and only where there are buffers.
        """
        with self._lock:
            self.flush()
            try:
                yield self._buffers[0].memory
            finally:
                self._read[0] = self._device.record()

    def holds(self, block: Block) -> bool:
        """Whether a load of this block is under way or waiting to be attended."""
        with self._lock:
            return any(each.id == block.id for load in self._loads for each in load.blocks)

    def flush(self) -> None:
        """Wait for every load and forget what was loaded; failures of loads that nobody took are dropped."""
        with self._lock:
            while self._loads:
                if (event := self._loads[0].event) is not None:
                    with contextlib.suppress(Exception):
                        event.wait()
                self._free.append(self._loads.popleft().buffer)

    def _matches(self, load: _Load, index: int) -> bool:
        return load.is_of(*self._at(index))

    def _at(self, index: int) -> tuple[int, Chunk]:
        index %= len(self._layers) * len(self._chunks)
        return self._layers[index // len(self._chunks)], self._chunks[index % len(self._chunks)]

    def _fill(self) -> None:
        # Never more loads than one pass over all layers holds, so that the same chunk is not loaded twice.
        room = len(self._layers) * len(self._chunks) - len(self._loads)
        while self._free and room > 0:
            layer, chunk = self._at(self._next)
            self._submit(layer, chunk, self._free[0])
            self._free.popleft()
            self._next += 1
            room -= 1

    def _submit(self, layer: int, chunk: Chunk, buffer: int) -> None:
        if not self._device.copies_aside:
            self._loads.append(_Load(layer, chunk.blocks, buffer))
            return
        k, v, scratch = self._buffers[buffer].views(layer)
        count = len(chunk.blocks)
        event = self._device.up.submit(
            lambda: self._mover.fetch(layer, chunk.blocks, k[:, :count], v[:, :count], scratch),
            finish=self._mover.arrived,
            reads=read_regions(chunk.blocks) if self._device.follows_accesses else (),
            writes=[("stage", buffer)],
            after=[self._read[buffer]],
            nbytes=self._mover.row_bytes[layer] * count,
            garbage=[k[:, :count], v[:, :count]],
            name=f"load layer {layer}",
        )
        self._loads.append(_Load(layer, chunk.blocks, buffer, event))

    def _read_now(self, load: _Load) -> None:
        """Read a chunk with all cores, when it is waited for.

        Where the cores that compute do the copying, doing it beside computing would win nothing, and lose what threads
        of one core wait for each other (docs/decisions/0015).
        """
        started = time.perf_counter()
        k, v, scratch = self._buffers[load.buffer].views(load.layer)
        count = len(load.blocks)
        arrival = self._mover.fetch(load.layer, load.blocks, k[:, :count], v[:, :count], scratch)
        seconds = time.perf_counter() - started
        self._mover.arrived(arrival, lambda: seconds)
