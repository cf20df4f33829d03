"""Publishing: blocks that follow each other go into one file, written aside and renamed when it is on the disk.

Imports: errors, files, tiers, durable.{folder,format,identity,room,settings,shelf}.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import torch

from tieredkv.durable.folder import abandon
from tieredkv.durable.format import encode_header
from tieredkv.durable.identity import BlockRecord, Identity
from tieredkv.durable.room import Room
from tieredkv.durable.settings import DurableSettings
from tieredkv.durable.shelf import Shelf
from tieredkv.errors import ConfigError, TieredKVError
from tieredkv.files import write_at
from tieredkv.tiers import check_rows

Rows = Callable[[int, int], torch.Tensor]

# One layer of a file is what a restore reads at once: at 8 MiB it would be a few hundred KB for a deep model.
TARGET_FILE_BYTES = 32 << 20
MAX_FILE_BLOCKS = 64
# A cap is kept by dropping whole files: with fewer of them, much would go at once.
LEAST_FILES_IN_CAP = 8


def smallest_file_bytes(identity: Identity) -> int:
    """Bytes of a file of one block."""
    record = BlockRecord("0" * 64, "0" * 64, identity.block_size, "0" * 64, (-1,) * len(identity.layers))
    return encode_header(identity, [record])[1].file_bytes


class Publisher:
    """Writes files, one thread at a time.

    Args:
        settings: the limits.
        shelf: the files.
        room: where they find room.

    Raises:
        ConfigError: the cap holds no block.
    """

    def __init__(self, settings: DurableSettings, shelf: Shelf, room: Room) -> None:
        self._shelf, self._room = shelf, room
        self._lock = threading.Lock()
        identity = shelf.identity
        self.file_blocks = min(MAX_FILE_BLOCKS, max(1, TARGET_FILE_BYTES // identity.block_bytes))
        cap_bytes = settings.cap_bytes(identity.block_bytes // identity.block_size)
        if cap_bytes is not None:
            if cap_bytes < smallest_file_bytes(identity):
                raise ConfigError(
                    "The cap on published blocks is too small for one block.",
                    wanted=f"at least {smallest_file_bytes(identity)} bytes",
                    got=f"{cap_bytes} bytes",
                    change="raise the cap, use a smaller block_size, or leave it out",
                )
            beside_first = cap_bytes // LEAST_FILES_IN_CAP - smallest_file_bytes(identity)
            self.file_blocks = min(self.file_blocks, 1 + max(0, beside_first) // identity.block_bytes)

    def publish(self, records: Sequence[BlockRecord], rows: Rows) -> int:
        """See `DurableBlocks.publish`."""
        for record in records:
            record.check(self._shelf.identity)
        with self._lock:
            try:
                self._shelf.refresh(if_published=True)
                for _ in self._shelf.usable(record.hash for record in records):
                    pass  # what others let go is forgotten, and written again
                for group in self._groups(records):
                    if not self._write(records, group, rows):
                        self._shelf.fail("there is no room for published blocks", "the cap or the floor is reached")
                        break
            except TieredKVError:  # of `rows`; some are also an OSError
                raise
            except OSError as cause:
                self._shelf.fail("blocks cannot be published", cause)
        with self._shelf.lock:
            return sum(self._shelf.index.holder(record.hash) is not None for record in records)

    def _groups(self, records: Sequence[BlockRecord]) -> Iterator[range]:
        """Absent records that can share a file: each the parent of the next, of one salt, not too many."""
        index, first = self._shelf.index, 0
        while first < len(records):
            with self._shelf.lock:
                end = first
                while (
                    end < len(records)
                    and end - first < self.file_blocks
                    and index.holder(records[end].hash) is None
                    and (end == first or _follows(records[end], records[end - 1]))
                ):
                    end += 1
            if end > first:
                yield range(first, end)
            first = max(end, first + 1)

    def _write(self, records: Sequence[BlockRecord], group: range, rows: Rows) -> bool:
        """Write one file; False when there is no room for it."""
        shelf = self._shelf
        header, file = encode_header(shelf.identity, [records[i] for i in group])
        begun = self._room.begin(file.file_bytes, self._ancestors(file.parent))
        if begun is None:
            return False
        temporary, descriptor = begun
        try:
            write_at(descriptor, [memoryview(header)], 0)
            for layer in range(len(shelf.identity.layers)):
                write_at(descriptor, [self._row(rows, i, layer) for i in group], file.offset(layer, 0))
            shelf.folder.finish(temporary, descriptor, file.name)
        except BaseException:
            abandon(temporary, descriptor)
            raise
        shelf.add(file)
        return True

    def _ancestors(self, parent: str) -> set[str]:
        """Names of the files before a block: without them it is of no use."""
        names: set[str] = set()
        with self._shelf.lock:
            above = self._shelf.index.holder(parent)
            while above is not None and above.name not in names:
                names.add(above.name)
                above = self._shelf.index.holder(above.parent)
        return names

    def _row(self, rows: Rows, i: int, layer: int) -> memoryview:
        row = rows(i, layer)
        check_rows(row, (self._shelf.identity.row_bytes[layer],), layer)
        return row.numpy().data


def _follows(record: BlockRecord, before: BlockRecord) -> bool:
    return record.parent == before.hash and record.salt == before.salt
