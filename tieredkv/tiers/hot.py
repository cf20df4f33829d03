"""The tiers in device memory, hot and packed: one tensor per layer and plane.

Imports: block, tiers.base, tiers.pool, tiers.slots.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Literal

import torch

from tieredkv.block import Plane, Planes
from tieredkv.tiers.base import Empty, slot_bytes
from tieredkv.tiers.pool import PoolTier
from tieredkv.tiers.slots import SlotPool


class LayerPools:
    """Per layer its whole pool, tensors `[kv_heads, slots, *inner]`, made when first asked for."""

    def __init__(self, layers: Sequence[tuple[Plane, ...]], slots: int, empty: Empty) -> None:
        self._layers, self._slots, self._empty = tuple(layers), slots, empty
        self._pools: dict[int, Planes] = {}
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Planes]:
        return (self[layer] for layer in range(len(self._layers)))

    def __getitem__(self, layer: int) -> Planes:
        pool = self._pools.get(layer)
        return pool if pool is not None else self._make(layer)

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the pools made so far."""
        with self._lock:
            return sum(plane.nbytes for pool in self._pools.values() for plane in pool)

    def clear(self) -> None:
        """Drop the tensors."""
        with self._lock:
            self._pools.clear()

    def _make(self, layer: int) -> Planes:
        # Tensors made in inference mode could not be written outside of it later.
        with self._lock, torch.inference_mode(False):
            if layer not in self._pools:
                self._pools[layer] = tuple(
                    self._empty((plane.kv_heads, self._slots, *plane.inner), plane.dtype)
                    for plane in self._layers[layer]
                )
            return self._pools[layer]


class HotTier(PoolTier):
    """Blocks in device memory, one contiguous pool per layer and plane.

    Args:
        layers: for each layer its planes.
        slots: number of slots; the budget is `slots` times the bytes of one block.
        empty: makes an uninitialised tensor on the device.
        role: "hot", or "packed" where the planes are those of a lossy codec.

    Attributes:
        planes: `planes[layer]` is the layer's whole pool, a tensor `[kv_heads, slots, *inner]` per plane; the same
            tensors for the life of the tier. Slots never written hold arbitrary values.
    """

    def __init__(
        self,
        layers: Sequence[tuple[Plane, ...]],
        slots: int,
        empty: Empty,
        *,
        role: Literal["hot", "packed"] = "hot",
    ) -> None:
        super().__init__(role, layers, SlotPool(slots, tier=role), slots * slot_bytes(layers))
        self.planes = LayerPools(layers, slots, empty)

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the layers' pools made so far: a layer's whole pool is made at its first use."""
        return self.planes.reserved_bytes

    def close(self) -> None:
        """Drop the pools; views handed out keep their memory until they are dropped too."""
        super().close()
        self.planes.clear()

    def _views(self, layer: int, start: int, length: int) -> Planes:
        return tuple(pool[:, start : start + length] for pool in self.planes[layer])
