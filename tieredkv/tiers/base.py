"""What every tier can do: hold blocks in slots, and copy them in and out layer by layer.

A tier owns its memory or files and a `SlotPool`; who allocates slots, verifies bytes and orders copies is decided
above. All tiers share one contract suite (tests/tiers/test_tier_contract.py).

Imports: errors, config, block, checksum, tiers.slots.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from tieredkv.block import Plane, Planes
from tieredkv.checksum import Checksummer
from tieredkv.config import BLOCK_MULTIPLE, Role
from tieredkv.errors import ClosedError, ConfigError, MismatchError
from tieredkv.tiers.slots import SlotPool


class SlotRun(NamedTuple):
    """Neighbouring slots of a list.

    Args:
        at: where the first of them stands in the list.
        start: that slot.
        length: how many there are.
    """

    at: int
    start: int
    length: int


def runs(slots: Sequence[int]) -> list[SlotRun]:
    """Join neighbouring slots, in their order: `[7, 8, 9, 2]` → `[(0, 7, 3), (3, 2, 1)]`."""
    joined: list[SlotRun] = []
    begin = 0
    for index in range(1, len(slots) + 1):
        if index == len(slots) or slots[index] != slots[index - 1] + 1:
            joined.append(SlotRun(begin, slots[begin], index - begin))
            begin = index
    return joined


Empty = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
"""(shape, dtype) → an uninitialised tensor in the memory of a tier or a device, pinned where the device needs it."""

Copy = Callable[[torch.Tensor, torch.Tensor, bool], None]
"""(target, source, non_blocking): copies blocks `[kv_heads, n, *inner]` in the order of the current stream."""


def copy_blocks(
    target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool = False, through: Copy | None = None
) -> None:
    """Copy blocks between two tensors `[kv_heads, n, *inner]` of equal shape and dtype, of any stride.

    With `non_blocking` the target is safe to read, and the source to overwrite, only after the current stream's work;
    with `through` the same holds for a target on another device in any case.
    """
    if through is not None:
        through(target, source, non_blocking)
        return
    if target.device == source.device:
        target.copy_(source, non_blocking=non_blocking)
        return
    # Between devices a strided copy goes through temporary buffers; one head's neighbouring slots are contiguous.
    for head in range(target.shape[0]):
        target[head].copy_(source[head], non_blocking=non_blocking)


class Tier(ABC):
    """Blocks of all layers in numbered slots of one medium.

    Args:
        role: its name, one of `block.TIERS`.
        layers: for each layer the planes in which its blocks are stored.
        slots: the tier's slot pool.
        budget_bytes: the most the tier may hold, or None where there is no limit.

    Raises:
        ConfigError: there is no layer, or a plane's block is not a multiple of 8 bytes.
    """

    def __init__(
        self, role: Role, layers: Sequence[tuple[Plane, ...]], slots: SlotPool, budget_bytes: int | None
    ) -> None:
        self.role: Role = role
        self.layers = tuple(layers)
        self.slots = slots
        self.budget_bytes = budget_bytes
        self.slot_bytes = slot_bytes(self.layers)
        self._closed = False

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots that are live or in flight."""
        return self.slots.used * self.slot_bytes

    @property
    def peak_bytes(self) -> int:
        """The largest `used_bytes` so far."""
        return self.slots.peak_live * self.slot_bytes

    @property
    @abstractmethod
    def reserved_bytes(self) -> int:
        """Bytes taken from the medium at the moment, used or not."""

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def free_blocks(self) -> int:
        """How many blocks can be allocated and written now."""
        return self.slots.free

    def runs(self, slots: Sequence[int]) -> list[SlotRun]:
        """`runs`, also split where the tier's memory is not contiguous; each is good for `run`.

        Raises:
            MismatchError: a slot is outside the tier.
        """
        parts: list[SlotRun] = []
        for index, start, length in runs(slots):
            if start < 0 or start + length > self.slots.total:
                raise MismatchError(
                    f"A slot is outside the {self.role} tier.",
                    wanted=f"slots 0 … {self.slots.total - 1}",
                    got=f"{start} … {start + length - 1}",
                    change="use slots that this tier allocated",
                )
            while length:
                part = min(length, self._border(start) - start)
                parts.append(SlotRun(index, start, part))
                index, start, length = index + part, start + part, length - part
        return parts

    @abstractmethod
    def write(self, layer: int, slots: Sequence[int], planes: Planes, *, non_blocking: bool = False) -> None:
        """Copy n blocks into slots.

        Args:
            layer: layer index.
            slots: n distinct slots.
            planes: for each plane of the layer a tensor `[kv_heads, n, *inner]`, of any stride.
            non_blocking: between devices, return before the copy is done; the slots are then safe to read, and the
                planes to overwrite, after the current stream's work. Ignored by tiers that need the bytes at once.

        Raises:
            MismatchError: a slot, shape or dtype does not belong to this tier.
            ColdTierError: the disk failed; what the slots hold is undefined.
            ClosedError: the tier is closed.
        """

    @abstractmethod
    def read(self, layer: int, slots: Sequence[int], out: Planes, *, non_blocking: bool = False) -> None:
        """Copy n blocks out of slots; arguments and errors as for `write`, `out` is undefined after an error."""

    def read_summed(self, layer: int, slots: Sequence[int], out: Planes, checksummer: Checksummer) -> list[int] | None:
        """`read`, and the checksum of each block as it is in `out`, taken while it is in a processor's cache.

        Returns:
            The checksums; None where that is not to be had, and `out` is undefined. Errors as for `read`.
        """
        return None

    def run(self, layer: int, start: int, blocks: int) -> Planes | None:
        """The blocks of neighbouring slots in place, without a copy.

        Returns:
            Views `[kv_heads, blocks, *inner]` of the tier's own memory, which follow later writes and must not be used
            after a slot is released; None where the medium cannot be addressed.

        Raises:
            MismatchError: the slots are outside the tier or not one of its `runs`.
            ClosedError: the tier is closed.
        """
        return None

    def close(self) -> None:
        """Give the memory or files back. May be called again."""
        self._closed = True

    def _border(self, slot: int) -> int:
        """The first slot after this one that is not contiguous with it in the tier's memory."""
        return self.slots.total

    def _check_layer(self, layer: int) -> None:
        if self._closed:
            raise ClosedError(
                f"The {self.role} tier is closed.", wanted="an open tier", got="a closed one", change="make a new cache"
            )
        if not 0 <= layer < len(self.layers):
            raise MismatchError(
                f"The {self.role} tier has no such layer.",
                wanted=f"0 … {len(self.layers) - 1}",
                got=layer,
                change="use the model the cache was made for",
            )

    def _check(self, layer: int, count: int, planes: Planes) -> None:
        """Refuse tensors that are not `count` blocks of this layer; a copy would convert or broadcast them."""
        self._check_layer(layer)
        wanted = [((plane.kv_heads, count, *plane.inner), plane.dtype) for plane in self.layers[layer]]
        got = [(tuple(plane.shape), plane.dtype) for plane in planes]
        if wanted != got:
            raise MismatchError(
                f"Planes do not belong to layer {layer} of the {self.role} tier.",
                wanted=wanted,
                got=got,
                change="give one tensor [kv_heads, blocks, *inner] for each of the layer's planes",
            )


def slot_bytes(layers: Sequence[tuple[Plane, ...]]) -> int:
    """Bytes of one block over all layers.

    Raises:
        ConfigError: there is no layer, or a plane's block is not a multiple of 8 bytes, so that planes next to each
            other would be unaligned.
    """
    if not any(layers):
        raise ConfigError(
            "A tier needs a layer.", wanted="at least one layer", got="none", change="use a model with attention layers"
        )
    for planes in layers:
        for plane in planes:
            if plane.block_bytes % 8:
                raise ConfigError(
                    f"A block of plane {plane.name!r} is not whole 8-byte words.",
                    wanted="a multiple of 8 bytes",
                    got=plane.block_bytes,
                    change=f"use a block size that is a multiple of {BLOCK_MULTIPLE}",
                )
    return sum(plane.block_bytes for planes in layers for plane in planes)
