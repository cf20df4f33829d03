"""Reads blocks out of a tier and holds what arrived against their checksums, as often as the settings say.

What differs is read once more, then from the other tiers that have it. What goes wrong and is put right is counted, and
told once for each tier; what cannot be put right is an error that names block, layer and tier.

Imports: errors, block, checksum, config, counters, tiers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from tieredkv.block import LOWER, Block, Planes
from tieredkv.checksum import Checksummer
from tieredkv.config import Verify
from tieredkv.counters import Counters
from tieredkv.errors import ChecksumError, ColdTierError, MismatchError
from tieredkv.tiers import Tier

logger = logging.getLogger("tieredkv")

Check = Callable[[], None]
"""To be called once the copies are done: compares, and reads again what is wrong."""


class VerifiedReads:
    """Reads for one store.

    Args:
        tiers: "hot" and those of `LOWER` that exist.
        checksummer: of the store.
        row_bytes: for each layer the bytes of one block as stored.
        verify: when checksums are compared.
        counters: where comparisons and failures are counted.
    """

    def __init__(
        self,
        tiers: Mapping[str, Tier],
        checksummer: Checksummer,
        row_bytes: Sequence[int],
        verify: Verify,
        counters: Counters,
    ) -> None:
        self._tiers, self._checksummer, self._row_bytes = tiers, checksummer, row_bytes
        self._verify, self._counters = verify, counters
        self._seen: set[tuple[str, int, int]] = set()  # (tier, block id, layer) that were read and right
        self._told: set[str] = set()

    def read(self, layer: int, blocks: Sequence[Block], tier: str, out: Planes, *, non_blocking: bool = False) -> Check:
        """Copy one layer of blocks out of a tier, in the order of the current stream.

        Args:
            layer: tiered layer.
            blocks: blocks that the tier stores.
            tier: where they are read first.
            out: for each plane `[kv_heads, blocks, *inner]`, written.
            non_blocking: return before the copies are done.

        Returns:
            What has to be called before `out` is used, when the stream has done what was asked of it. It raises
            ChecksumError or ColdTierError where a block is wrong, or cannot be read, in every tier that has it.

        Raises:
            ChecksumError, ColdTierError: the same, where the tier said at once that it cannot be read.
        """
        slots, sums = [slot_of(block, tier) for block in blocks], None
        try:
            if self._looks_at(layer, blocks, tier):
                sums = self._tiers[tier].read_summed(layer, slots, out, self._checksummer)
            if sums is None:
                self._tiers[tier].read(layer, slots, out, non_blocking=non_blocking)
        except ColdTierError as failure:
            self._counters.failed(tier=1)
            self._tell(tier, failure)
            for index, block in enumerate(blocks):
                self._read_again(layer, block, tier, _one(out, index))
            return _nothing

        def check() -> None:
            for index, _ in self._wrong_blocks(layer, blocks, tier, out, sums):
                self._read_again(layer, blocks[index], tier, _one(out, index))

        return check

    def compare(
        self, layer: int, blocks: Sequence[Block], tier: str, planes: Planes, sums: Sequence[int] | None = None
    ) -> list[tuple[int, ChecksumError]]:
        """Of blocks whose bytes, as they are in a tier, are not those that were stored: index and error; counted.

        Their checksums may have been taken as they were read.
        """
        lying = self._checksummer.checksum(planes).tolist() if sums is None else sums
        wrong = [
            (i, ChecksumError(block=block.id, layer=layer, tier=tier, wanted=block.checksums[layer] or 0, got=got))
            for i, (block, got) in enumerate(zip(blocks, lying, strict=True))
            if block.checksums[layer] != got
        ]
        self._counters.verified(len(blocks) - len(wrong))
        if wrong:
            self._counters.failed(checksum=len(wrong))
            self._tell(tier, wrong[0][1])
        return wrong

    def _looks_at(self, layer: int, blocks: Sequence[Block], tier: str) -> bool:
        """Whether the settings say to compare what is read now."""
        if self._verify != "first":
            return self._verify == "always"
        # In another tier it lies as other bytes, which nobody has looked at yet.
        return not all((tier, block.id, layer) in self._seen for block in blocks)

    def _wrong_blocks(
        self, layer: int, blocks: Sequence[Block], tier: str, planes: Planes, sums: Sequence[int] | None = None
    ) -> list[tuple[int, ChecksumError]]:
        """`compare` of what was read, as often as the settings say; what is right is remembered."""
        if not self._looks_at(layer, blocks, tier):
            return []
        wrong = self.compare(layer, blocks, tier, planes, sums)
        if not wrong and self._verify == "first":
            self._seen.update((tier, block.id, layer) for block in blocks)
        return wrong

    def _read_again(self, layer: int, block: Block, tier: str, out: Planes) -> None:
        """Read one block once more, then from the other tiers that have it; raise when none gives the right bytes."""
        error: ChecksumError | ColdTierError | None = None
        for source in (tier, *(t for t in LOWER if t != tier and getattr(block, t) is not None)):
            self._counters.failed(retries=1)
            try:
                self._tiers[source].read(layer, [slot_of(block, source)], out)
            except ColdTierError as failure:
                self._counters.failed(tier=1)
                error = self._unreadable(block, layer, source, failure)
                continue
            wrong = self._wrong_blocks(layer, [block], source, out)
            if not wrong:
                return
            error = wrong[0][1]
        if error is not None:
            raise error

    def _unreadable(self, block: Block, layer: int, tier: str, failure: ColdTierError) -> ColdTierError:
        """The tier's own error, with the block and the layer that were wanted."""
        error = ColdTierError(
            f"Block {block.id}, layer {layer} cannot be read from {tier}.",
            wanted=f"{self._row_bytes[layer]} bytes with checksum {(block.checksums[layer] or 0) & (2**64 - 1):#018x}",
            got=f"{failure.what} {failure.got}",
            change=failure.change,
        )
        error.__cause__ = failure
        return error

    def _tell(self, tier: str, failure: ChecksumError | ColdTierError) -> None:
        """Warn of the first failure of a tier; all are counted."""
        if tier not in self._told:
            self._told.add(tier)
            what = f"{failure.what} Wanted: {failure.wanted}. Got: {failure.got}."
            logger.warning("tieredkv: %s fails at times, and what fails is tried again: %s", tier, what)

    def forget(self, block: Block) -> None:
        """A block was freed: drop what was remembered about it."""
        if self._verify == "first":
            layers = range(len(self._row_bytes))
            self._seen -= {(tier, block.id, layer) for tier in LOWER for layer in layers}


def _nothing() -> None:
    """The check of what was compared already."""


def slot_of(block: Block, tier: str) -> int:
    """The block's slot in a tier that has it.

    Raises:
        MismatchError: it has none there: a plan and the place of its blocks do not agree.
    """
    slot: int | None = getattr(block, tier)
    if slot is None:
        raise MismatchError(
            f"Block {block.id} is not in {tier}.",
            wanted=f"a block with a slot of {tier}",
            got=f"one that lies in {block.location}",
            change="report this: what was planned and where the block lies do not agree",
        )
    return slot


def _one(planes: Planes, index: int) -> Planes:
    return tuple(plane[:, index : index + 1] for plane in planes)
