"""What hot and warm have in common: blocks in tensors that the processor beside them can address.

Imports: block, checksum, errors, tiers.base, tiers.rows.
"""

from __future__ import annotations

import array
import functools
from abc import abstractmethod
from collections.abc import Sequence

from tieredkv.block import Planes
from tieredkv.checksum import Checksummer
from tieredkv.errors import MismatchError
from tieredkv.tiers.base import Copy, Tier, copy_blocks
from tieredkv.tiers.rows import row_bytes


class PoolTier(Tier):
    """A tier over tensors `[kv_heads, slots, *inner]`: copies are slices, and runs are views."""

    in_through: Copy | None = None
    """What copies into this tier's memory go through, and out of it, where that is beside a device of its own."""
    out_through: Copy | None = None
    _addresses: array.array[int] | None = None

    def write(self, layer: int, slots: Sequence[int], planes: Planes, *, non_blocking: bool = False) -> None:
        """See `Tier.write`."""
        self._check(layer, len(slots), planes)
        for index, start, length in self.runs(slots):
            for pool, plane in zip(self._views(layer, start, length), planes, strict=True):
                part = plane[:, index : index + length]
                copy_blocks(pool, part, non_blocking=non_blocking, through=self.in_through)

    def read(self, layer: int, slots: Sequence[int], out: Planes, *, non_blocking: bool = False) -> None:
        """See `Tier.read`."""
        self._check(layer, len(slots), out)
        for index, start, length in self.runs(slots):
            for pool, plane in zip(self._views(layer, start, length), out, strict=True):
                part = plane[:, index : index + length]
                copy_blocks(part, pool, non_blocking=non_blocking, through=self.out_through)

    def read_summed(self, layer: int, slots: Sequence[int], out: Planes, checksummer: Checksummer) -> list[int] | None:
        """See `Tier.read_summed`."""
        self._check(layer, len(slots), out)
        if self.out_through is not None:  # to a device of its own
            return None
        sums = list[int]()
        for index, start, length in self.runs(slots):
            part = tuple(plane[:, index : index + length] for plane in out)
            some = checksummer.copy_summed(part, self._views(layer, start, length))
            if some is None:
                return None
            sums += some.tolist()
        return sums

    def run(self, layer: int, start: int, blocks: int) -> Planes:
        """See `Tier.run`; never None."""
        self._check_layer(layer)
        if not 0 <= start < start + blocks <= self.slots.total or start + blocks > self._border(start):
            raise MismatchError(
                f"The slots are not one run of the {self.role} tier.",
                wanted="neighbouring slots as `runs` gives them",
                got=f"{start} … {start + blocks - 1} of {self.slots.total}",
                change="split the slots with `runs`",
            )
        return self._views(layer, start, blocks)

    def addresses(self) -> array.array[int] | None:
        """Where all of the tier lies, for code that copies by address: valid until it is closed.

        Returns:
            for each plane, layer after layer, its address, and the bytes from a head and from a slot to the next; None
            where it is not one stretch of a CPU's memory, or copies go through something.

        Raises:
            ClosedError: the tier is closed.
        """
        self._check_layer(0)
        if self._addresses is None and self._is_whole:
            found = array.array("q")
            for layer in range(len(self.layers)):
                for plane in self._views(layer, 0, self.slots.total):
                    if not plane.is_cpu or not plane[0, 0].is_contiguous():
                        return None
                    found.extend((plane.data_ptr(), *(plane.element_size() * plane.stride(dim) for dim in (0, 1))))
            self._addresses = found
        return self._addresses

    @functools.cached_property
    def shapes(self) -> array.array[int]:
        """For each plane, layer after layer: its layer, heads, bytes of one head of a block, 8-byte words before it."""
        found = array.array("q")
        for layer, planes in enumerate(self.layers):
            words = 0
            for plane in planes:
                found.extend((layer, plane.kv_heads, plane.block_bytes // plane.kv_heads, words))
                words += plane.block_bytes // 8
        return found

    @functools.cached_property
    def row_bytes(self) -> list[int]:
        """Bytes of one block of each layer."""
        return [row_bytes(planes) for planes in self.layers]

    def close(self) -> None:
        """See `Tier.close`."""
        super().close()
        self._addresses = None

    @property
    def _is_whole(self) -> bool:
        """Whether all slots are one run, and copies need nothing to go through."""
        return bool(self.slots.total) and self._border(0) >= self.slots.total and self.in_through is None

    @abstractmethod
    def _views(self, layer: int, start: int, length: int) -> Planes:
        """Views `[kv_heads, length, *inner]` of a run, taking its memory first where it was not yet used."""
