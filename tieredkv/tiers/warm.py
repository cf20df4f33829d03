"""The warm tier: host memory, in one piece where it costs nothing until touched, in growing pieces where it does.

Imports: block, device, base, pool, slots.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Literal

import torch

from tieredkv.block import Plane, Planes
from tieredkv.device import Bounce
from tieredkv.tiers.base import Empty, slot_bytes
from tieredkv.tiers.pool import PoolTier
from tieredkv.tiers.slots import SlotPool

FIRST_PIECE_BYTES = 64 << 20
LARGEST_PIECE_BYTES = 1 << 30
FIRST_PIECE_ONE_IN = 8
"""The first growing piece is one part in so many of the budget, if that is more: a chunk of blocks in few pieces is few
copies."""


def first_piece(budget_bytes: int) -> int:
    """Bytes of the first growing piece, a power of two."""
    share_bytes = 1 << max(0, (budget_bytes // FIRST_PIECE_ONE_IN).bit_length() - 1)
    return min(max(share_bytes, FIRST_PIECE_BYTES), LARGEST_PIECE_BYTES)


def piece_sizes(slots: int, block_bytes: int, first_bytes: int = FIRST_PIECE_BYTES) -> list[int]:
    """Slots of each piece: as many as fit `first_bytes`, twice that, … 1 GiB, then smaller powers of two for the rest.

    Allocators of pinned memory round a request up to a power of two, so each piece stays just below one.
    """
    sizes: list[int] = []
    piece_bytes, shrinking, left = first_bytes, False, slots
    while left:
        while (count := max(1, piece_bytes // block_bytes)) > left:
            piece_bytes, shrinking = piece_bytes // 2, True
        sizes.append(count)
        left -= count
        if not shrinking and piece_bytes < LARGEST_PIECE_BYTES:
            piece_bytes *= 2
    return sizes


class WarmTier(PoolTier):
    """Blocks in host memory.

    Args:
        layers: for each layer its planes.
        slots: number of slots; the budget is `slots` times the bytes of one block. 0 makes a tier that holds nothing.
        host_empty: makes an uninitialised tensor in host memory; asked for flat uint8 tensors.
        pieces: "one" takes all memory at the first use, for allocators that commit pages as they are touched;
            "growing" takes pieces as blocks arrive, for pinned memory, which is committed at once. `runs` and `run`
            never cross a piece.
        first_piece_bytes: size of the first growing piece; None to choose by the budget.
        bounce: what copies to and from a device go through, or None where they need nothing.
    """

    def __init__(
        self,
        layers: Sequence[tuple[Plane, ...]],
        slots: int,
        host_empty: Empty,
        *,
        pieces: Literal["one", "growing"] = "one",
        first_piece_bytes: int | None = None,
        bounce: Bounce | None = None,
    ) -> None:
        block_bytes = slot_bytes(layers)
        # Growing pieces are filled from the lowest slot, so that no piece is taken while another has room.
        pool = SlotPool(slots, tier="warm", spread=pieces == "one")
        super().__init__("warm", layers, pool, slots * block_bytes)
        first_bytes = first_piece(slots * block_bytes) if first_piece_bytes is None else first_piece_bytes
        sizes = piece_sizes(slots, block_bytes, first_bytes) if pieces == "growing" else [slots] * bool(slots)
        if bounce is not None:
            self.in_through = partial(bounce.copy, to_device=False)
            self.out_through = partial(bounce.copy, to_device=True)
        self._sizes = sizes
        self._starts = [0, *accumulate(sizes)]
        self._host_empty = host_empty
        self._pieces: dict[int, list[Planes]] = {}  # piece -> per layer tensors [kv_heads, piece slots, *inner]
        self._lock = threading.Lock()

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the pieces taken so far."""
        with self._lock:
            return sum(self._sizes[piece] for piece in self._pieces) * self.slot_bytes

    def close(self) -> None:
        """Drop the pieces; views handed out keep their memory until they are dropped too."""
        super().close()
        with self._lock:
            self._pieces.clear()

    def _border(self, slot: int) -> int:
        return self._starts[bisect_right(self._starts, slot)]

    def _views(self, layer: int, start: int, length: int) -> Planes:
        piece = bisect_right(self._starts, start) - 1
        layers = self._pieces.get(piece)
        if layers is None:
            layers = self._take(piece)
        index = start - self._starts[piece]
        return tuple(plane[:, index : index + length] for plane in layers[layer])

    def _take(self, piece: int) -> list[Planes]:
        # Tensors made in inference mode could not be written outside of it later.
        with self._lock, torch.inference_mode(False):
            if piece not in self._pieces:
                count = self._sizes[piece]
                memory = self._host_empty((count * self.slot_bytes,), torch.uint8)
                self._pieces[piece] = list(_carve(memory, self.layers, count))
            return self._pieces[piece]


def _carve(memory: torch.Tensor, layers: Sequence[tuple[Plane, ...]], count: int) -> list[Planes]:
    """Tensors `[kv_heads, count, *inner]` for every layer and plane, one after the other in flat memory."""
    offset, carved = 0, []
    for planes in layers:
        views = []
        for plane in planes:
            stop = offset + count * plane.block_bytes
            views.append(memory[offset:stop].view(plane.dtype).view(plane.kv_heads, count, *plane.inner))
            offset = stop
        carved.append(tuple(views))
    return carved
