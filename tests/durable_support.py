"""What the tests of published blocks share: small identities, and chains of blocks whose bytes follow from their hash.

Imports: tieredkv, torch.
"""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from tieredkv.block import Plane
from tieredkv.checksum import Checksummer
from tieredkv.durable import BlockRecord, DurableBlocks, DurableSettings, Identity
from tieredkv.durable.writing import smallest_file_bytes

LAYERS = (
    (Plane("k", torch.bfloat16, 2, (16, 4)), Plane("v", torch.bfloat16, 2, (16, 8))),
    (Plane("k", torch.float32, 1, (16, 4)), Plane("v", torch.float32, 1, (16, 2))),
)
IDENTITY = Identity("model-1", LAYERS, 16, "raw")
ONE_FILE_BYTES = smallest_file_bytes(IDENTITY)
"""Bytes of a file of one block."""

_CHECKSUMMER = Checksummer(native=False, compiled=False)


def settings(path: Path, **changes: object) -> DurableSettings:
    """Settings without a floor, so that a full disk under the tests does not matter."""
    return DurableSettings(**({"path": path, "free_floor": 0} | changes))  # type: ignore[arg-type]


def opened(path: Path, identity: Identity = IDENTITY, **changes: object) -> DurableBlocks:
    """A directory of published blocks."""
    return DurableBlocks(settings(path, **changes), identity)


def row(hash: str, layer: int, identity: Identity = IDENTITY) -> torch.Tensor:
    """The bytes of a block in a layer, uint8 `[row_bytes]`: they follow from its hash."""
    seed = int(hashlib.sha256(f"{hash}/{layer}".encode()).hexdigest()[:15], 16)
    made = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (identity.row_bytes[layer],), generator=made, dtype=torch.uint8)


def chain(name: str, blocks: int, *, salt: str = "", identity: Identity = IDENTITY) -> list[BlockRecord]:
    """Records of a sequence; equal names begin equally."""
    records, parent = [], ""
    for number in range(blocks):
        hash = hashlib.sha256(f"{parent}/{name}/{number}/{salt}".encode()).hexdigest()
        sums = tuple(
            int(_CHECKSUMMER.checksum_rows(row(hash, layer, identity)[None])[0])
            for layer in range(len(identity.layers))
        )
        records.append(BlockRecord(hash, parent, identity.block_size, salt, sums))
        parent = hash
    return records


def rows_of(records: Sequence[BlockRecord], identity: Identity = IDENTITY) -> Callable[[int, int], torch.Tensor]:
    """What `publish` asks for."""
    return lambda i, layer: row(records[i].hash, layer, identity)


def publish(store: DurableBlocks, records: Sequence[BlockRecord]) -> int:
    """Publish with the bytes that follow from the hashes."""
    return store.publish(records, rows_of(records, store.identity))


def hashes(records: Sequence[BlockRecord]) -> list[str]:
    """Their hashes."""
    return [record.hash for record in records]


def holds(store: DurableBlocks, records: Sequence[BlockRecord]) -> bool:
    """Whether reading gives the right bytes, layer by layer."""
    same = True
    for layer, row_bytes in enumerate(store.identity.row_bytes):
        out = torch.empty((len(records), row_bytes), dtype=torch.uint8)
        store.read(hashes(records), layer, out)
        for record, found in zip(records, out, strict=True):
            same = same and torch.equal(found, row(record.hash, layer, store.identity))
    return same


def files(path: Path) -> list[Path]:
    """Published files, those in quarantine left out."""
    return sorted(found for found in path.rglob("*.safetensors") if found.parent.name != "quarantine")


def quarantined(path: Path) -> list[Path]:
    """Files in quarantine."""
    return sorted((path / "durable" / "quarantine").iterdir())


def disk_bytes(path: Path) -> int:
    """Bytes of all files below a path that were there at one and the same moment.

    Another process may rename a file while the folders are walked, which then shows twice, or evict one and write
    another. What two walks after each other both saw was there between them.
    """
    first, second = _inodes(path), _inodes(path)
    return sum(size for inode, size in second.items() if inode in first)


def _inodes(path: Path) -> dict[int, int]:
    """Size of each file below a path by its inode; one that goes meanwhile does not count."""
    found: dict[int, int] = {}
    for each in path.rglob("*"):
        with suppress(FileNotFoundError):
            state = each.stat()
            if stat.S_ISREG(state.st_mode):
                found[state.st_ino] = state.st_size
    return found
