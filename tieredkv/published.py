"""Between a block store and the directory of published blocks: what goes there, what comes back, whether it pays.

Whatever goes wrong on the way is a miss: the tokens are computed again.

Imports: errors, block, durable, hf.rates, store.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Sequence

from tieredkv.block import Block
from tieredkv.durable import BlockRecord, DurableBlocks, DurableSettings, DurableStats, Identity
from tieredkv.errors import ColdTierError, TieredKVError
from tieredkv.hf.rates import Rates
from tieredkv.store import BlockStore
from tieredkv.store.kept import KeptBlocks
from tieredkv.store.restore import Export, Restore

logger = logging.getLogger("tieredkv")


class Published:
    """The directory of published blocks as one `KVStore` sees it. Hold the store's lock where a store is passed.

    Args:
        settings: the directory, or None where nothing is published.
        rates: what loading and prefilling took so far.
    """

    def __init__(self, settings: DurableSettings | None, rates: Rates) -> None:
        self._settings, self._rates = settings, rates
        self._lock = threading.Lock()
        self._opened: dict[str, DurableBlocks] = {}
        self.restored_blocks = 0

    @property
    def is_open(self) -> bool:
        """Whether there is a directory that answers."""
        return self._settings is not None

    @contextlib.contextmanager
    def found(
        self, store: BlockStore, kept: KeptBlocks, fingerprint: str, chains: Sequence[Sequence[str]]
    ) -> Iterator[list[list[Block]]]:
        """Inside, the blocks of the longest known start of each chain, in memory or brought there from disk.

        Until its end they have a reference, so that room for one chain is not made of what was found for another.
        """
        with contextlib.ExitStack() as held:
            yield [self._find(store, kept, fingerprint, hashes, held) for hashes in chains]

    def _find(
        self,
        store: BlockStore,
        kept: KeptBlocks,
        fingerprint: str,
        hashes: Sequence[str],
        held: contextlib.ExitStack,
    ) -> list[Block]:
        found = kept.find(hashes)
        for block in found:
            block.refs += 1
            held.callback(kept.let_go, block)
        if len(found) < len(hashes) and self.is_open:
            for block in self.restore(store, fingerprint, hashes[len(found) :]):
                held.callback(kept.let_go, block)
                found.append(block)
            kept.add(hashes[: len(found)], found)
        return found

    def restore(self, store: BlockStore, fingerprint: str, hashes: Sequence[str]) -> list[Block]:
        """Bring the longest published start of a chain into memory, as far as there is room and loading pays.

        Returns:
            sealed blocks, each with one reference, whose bytes are those that were published.
        """
        directory = self._open(store, fingerprint)
        if directory is None or not self._pays(store):
            return []
        records: list[BlockRecord] = []
        for name in hashes[: directory.find(hashes)]:
            record = directory.record(name)
            if record is None or record.tokens != store.block_size:
                break
            records.append(record)
        if not records:
            return []
        hashes = [record.hash for record in records]
        with Restore(store, hashes, [record.checksums for record in records]) as loading:
            try:
                self._load(store, directory, hashes[: loading.room], loading)
            except ColdTierError as failure:
                logger.info("tieredkv: a published block is computed again: %s", failure)
            if loading.wrong is not None:
                store.counters.failed(checksum=1)
                directory.set_aside(loading.wrong, "a checksum is wrong")
            blocks = loading.finish()
        self.restored_blocks += len(blocks)
        return blocks

    def _load(self, store: BlockStore, directory: DurableBlocks, hashes: Sequence[str], loading: Restore) -> None:
        """Read until all is there, or the prefill would be faster, see `_pays`."""
        started, timed = time.perf_counter(), 0
        for piece in directory.read_all(hashes) if hashes else ():
            if not loading.take(piece):
                break
            if loading.whole > timed:
                now = time.perf_counter()
                self._rates.loaded((loading.whole - timed) * store.block_size, now - started)
                started, timed = now, loading.whole
                if not self._pays(store):
                    break

    def _pays(self, store: BlockStore) -> bool:
        """Whether to load. A lossy codec's blocks always are: what a token is read from may not hang on the clock."""
        return not store.codec.lossless or self._rates.loading_pays

    def publish(
        self, store: BlockStore, fingerprint: str, salt: str, hashes: Sequence[str], blocks: Sequence[Block]
    ) -> int:
        """Make sealed blocks of one chain, from its first block on, durable; returns how many are.

        A disk that refuses is warned of once, by the directory, and never an error here.
        """
        directory = self._open(store, fingerprint)
        if directory is None or not hashes:
            return 0
        known = directory.find(hashes)
        export = Export(store, blocks[known:])
        try:
            records = [
                BlockRecord(name, hashes[i - 1] if i else "", store.block_size, salt, export.checksums(i - known))
                for i, name in enumerate(hashes)
                if i >= known
            ]
            return known + (directory.publish(records, export.rows) if records else 0)
        except TieredKVError as failure:
            store.counters.failed(tier=1)
            logger.warning("tieredkv: blocks were not published: %s", failure)
            return known

    def stats(self) -> DurableStats | None:
        """Counts of the directory; of the model as it was last, where its weights or adapters changed."""
        return next((each.stats() for each in reversed(list(self._opened.values()))), None)

    def close(self) -> None:
        """Close the directory. May be called again."""
        with self._lock:
            for directory in self._opened.values():
                directory.close()
            self._opened.clear()
            self._settings = None

    def _open(self, store: BlockStore, fingerprint: str) -> DurableBlocks | None:
        """The directory for blocks of this model; None, told once, when it cannot be used."""
        with self._lock:
            if self._settings is None:
                return None
            if fingerprint not in self._opened:
                planes = tuple(tuple(each) for each in store.mover.planes)
                identity = Identity(fingerprint, planes, store.block_size, store.codec.name)
                try:
                    self._opened[fingerprint] = DurableBlocks(self._settings, identity)
                except ColdTierError as failure:
                    logger.warning("tieredkv: going on without published blocks: %s", failure)
                    self._settings = None
                    return None
            return self._opened[fingerprint]
