"""Sealed blocks out of a store as the bytes they have below hot, and back into its slots, verified on arrival.

Imports: block, device, tiers, durable, blocks, sharing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from tieredkv.block import LOWER, TIERS, Block, Planes
from tieredkv.device import Event
from tieredkv.durable import Piece
from tieredkv.store.blocks import BlockStore
from tieredkv.store.sharing import stored
from tieredkv.tiers import Populating, pack_rows, unpack_rows


class Export:
    """The bytes of sealed blocks as they are, or would be, below hot.

    Args:
        store: the blocks' store; hold its lock while this is used.
        blocks: sealed blocks.
    """

    def __init__(self, store: BlockStore, blocks: Sequence[Block]) -> None:
        self._store, self._blocks = store, list(blocks)

    def rows(self, index: int, layer: int) -> torch.Tensor:
        """uint8 `[row_bytes]` on the CPU: one layer of `blocks[index]`.

        Raises:
            ColdTierError: the disk does not answer.
        """
        out = torch.empty((1, self._store.mover.row_bytes[layer]), dtype=torch.uint8)
        pack_rows(self._store.mover.planes[layer], self._planes(self._blocks[index], layer), out)
        return out[0]

    def checksums(self, index: int) -> tuple[int, ...]:
        """For each layer the checksum over the bytes: the block's own where it has one."""
        known, sums = self._blocks[index].checksums, []
        for layer in range(len(self._store.layers)):
            value = known[layer]
            if value is None:
                planes = self._planes(self._blocks[index], layer)
                value = int(self._store.mover.checksummer.checksum(planes)[0])
            sums.append(value)
        return tuple(sums)

    def _planes(self, block: Block, layer: int) -> Planes:
        store = self._store
        role = next(role for role in (*LOWER, "hot") if getattr(block, role) is not None)
        reads = [] if role == "cold" else [(role, getattr(block, role))]
        planes = store.device.run(lambda: stored(store, layer, block, role), reads=reads, name="export")
        return store.codec.encode(*planes) if role == "hot" else planes


class Restore:
    """Fills slots with blocks that come piece by piece, in runs: every layer of some blocks, then the next blocks.

    While a piece is checked, the one before it is still being written. In a `with` statement, slots that no block came
    to hold are free again at its end, whatever ended it.

    Args:
        store: where the blocks go; hold its lock.
        hashes: names of the blocks, for `wrong`.
        checksums: for each block the checksum of each layer, compared before anything is used.

    Attributes:
        wrong: the name of a block whose bytes were not those that were stored, or None.
    """

    def __init__(self, store: BlockStore, hashes: Sequence[str], checksums: Sequence[tuple[int, ...]]) -> None:
        self._store, self._hashes, self._checksums = store, hashes, checksums
        self._whole = 0
        self.wrong: str | None = None
        self._writes: list[Event] = []  # of the piece before
        self._places: list[tuple[str, int]] = []
        self._populating: Populating | None = None
        try:
            _take(store, len(hashes), self._places)
            self._good = len(self._places)
            self._populating = Populating(self._views())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Restore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def room(self) -> int:
        """How many of the blocks there is room for."""
        return len(self._places)

    def take(self, piece: Piece) -> bool:
        """Store a piece; False when no more are of use."""
        first = piece.first
        if min(piece.rows[0].shape[0], self._good - first) <= 0:
            return False
        for layer, rows in zip(piece.layers, piece.rows, strict=True):
            self._check(layer, first, rows)
        end = min(first + piece.rows[0].shape[0], self._good)
        self._wait()
        for role in TIERS[:-1]:
            some = [index for index in range(first, end) if self._places[index][0] == role]
            if some:
                self._write(role, piece, some)
        if piece.layers[-1] == len(self._store.layers) - 1:
            self._whole = end
        return True

    def _check(self, layer: int, first: int, rows: torch.Tensor) -> None:
        """Compare the checksums of one layer, and note the first block that is wrong."""
        got = self._store.mover.checksummer.checksum_rows(rows[: self._good - first]).tolist()
        for index, value in enumerate(got, start=first):
            if value != self._checksums[index][layer]:
                self._good, self.wrong = index, self._hashes[index]
                return

    @property
    def whole(self) -> int:
        """How many of the first blocks have all their layers."""
        return min(self._whole, self._good)

    def finish(self) -> list[Block]:
        """The blocks that arrived whole, each with one reference; the other slots are free again. Call once."""
        self._end_populating()
        self._wait()
        found: list[Block] = []
        for index, (role, slot) in enumerate(self._places[: self.whole]):
            block = self._store.new_block()
            setattr(block, role, slot)
            block.tokens, block.sealed = self._store.block_size, True
            block.checksums = list(self._checksums[index])
            found.append(block)
        del self._places[: len(found)]
        self._free()
        return found

    def close(self) -> None:
        """Free the slots that are no block's, once nothing is written there any more. May be called again."""
        self._end_populating()
        self._writes = self._writes[-1:]  # one stream: the last comes after the others
        with contextlib.suppress(Exception):  # a write that failed has ended too, and no block has its bytes
            self._wait()
        self._free()

    def _end_populating(self) -> None:
        if self._populating is not None:
            self._populating.end()

    def _free(self) -> None:
        while self._places:
            role, slot = self._places.pop()
            self._store.tiers[role].slots.release(slot)

    def _views(self) -> Iterator[torch.Tensor]:
        """The memory of the places, in the order in which it is written."""
        by_role = {role: [slot for its, slot in self._places if its == role] for role in TIERS[:-1]}
        for layer in range(len(self._store.layers)):
            for role, slots in by_role.items():
                for _, start, length in self._store.tiers[role].runs(slots) if slots else ():
                    yield from self._store.tiers[role].run(layer, start, length) or ()

    def _write(self, role: str, piece: Piece, indices: Sequence[int]) -> None:
        """Place neighbouring blocks of a piece that go to one tier."""
        store, tier = self._store, self._store.tiers[role]
        slots = [self._places[index][1] for index in indices]
        if role == "hot":
            store.note_hot_use(slots)

        def write() -> None:
            for layer, all_rows in zip(piece.layers, piece.rows, strict=True):
                rows = all_rows[indices[0] - piece.first :]
                for first, start, length in tier.runs(slots):
                    planes = tier.run(layer, start, length)
                    if planes is not None:
                        unpack_rows(store.mover.planes[layer], rows[first : first + length], planes)

        writes = [(role, slot) for slot in slots]
        self._writes.append(store.device.up.submit(write, writes=writes, after=[store.device.record()], name="restore"))

    def _wait(self) -> None:
        """Until the piece before is written: its bytes may be overwritten, and its slots be read."""
        for event in self._writes:
            event.wait()
        self._writes = []


def _take(store: BlockStore, wanted: int, places: list[tuple[str, int]]) -> None:
    """Add slots in memory: hot up to the watermark, where the codec is exact; then below. Idle blocks make way."""
    store.let_dropped_go()
    store.poll()
    while (missing := wanted - sum(_room(store).values())) > 0 and store.reclaim(missing):
        pass
    for role, room in _room(store).items():
        slots = store.tiers[role].slots.allocate_many(min(room, wanted - len(places)))
        places += [(role, slot) for slot in slots]


def _room(store: BlockStore) -> dict[str, int]:
    """Slots in memory that can be taken, by tier."""
    hot = store.hot.slots
    room = {role: store.tiers[role].slots.free for role in TIERS[:-1] if role in store.tiers}
    room["hot"] = max(int(store.settings.watermark * hot.total) - hot.used, 0) if store.codec.lossless else 0
    return room
