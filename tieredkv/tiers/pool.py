"""What hot and warm have in common: blocks in tensors that the processor beside them can address.

Imports: block, checksum, errors, tiers.base.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from tieredkv.block import Planes
from tieredkv.checksum import Checksummer
from tieredkv.errors import MismatchError
from tieredkv.tiers.base import Copy, Tier, copy_blocks


class PoolTier(Tier):
    """A tier over tensors `[kv_heads, slots, *inner]`: copies are slices, and runs are views."""

    in_through: Copy | None = None
    """What copies into this tier's memory go through, and out of it, where that is beside a device of its own."""
    out_through: Copy | None = None

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

    @abstractmethod
    def _views(self, layer: int, start: int, length: int) -> Planes:
        """Views `[kv_heads, length, *inner]` of a run, taking its memory first where it was not yet used."""
