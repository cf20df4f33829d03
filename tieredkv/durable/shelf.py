"""The files of one identity in a directory: which are there, which are usable, and how one leaves.

Two locks: `scanning` around looks at the disk, `lock` around what is in memory. Whoever takes both takes `scanning`
first, and nobody holds `lock` during a system call, so that a disk that hangs does not stop those who only ask the
index.

Imports: eviction, durable.{folder,format,identity,index,reading,scan,settings,stats}.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from tieredkv.durable.folder import QUARANTINE, TEMPORARY, Census, DurableFolder, Mark, Seen, quarantine
from tieredkv.durable.format import Refusal, StoredFile, is_ours
from tieredkv.durable.identity import Identity
from tieredkv.durable.index import Index
from tieredkv.durable.reading import FileReader
from tieredkv.durable.scan import examine_all
from tieredkv.durable.settings import DurableSettings
from tieredkv.durable.stats import DurableStats
from tieredkv.eviction import policy

IDENTITY_DIGITS = 16

logger = logging.getLogger("tieredkv")

# How exactly the time of use is known to other processes and after a restart; each change costs a system call.
_USED_EVERY_NS = 60 * 10**9


class Shelf:
    """Files on disk and what is known of them. Thread safe.

    Args:
        settings: the directory and its limits.
        identity: what its blocks agree on.
    """

    def __init__(self, settings: DurableSettings, identity: Identity) -> None:
        self.identity = identity
        self.folder = DurableFolder(settings.path, identity.digest()[:IDENTITY_DIGITS])
        self.counts = DurableStats()
        self.index = Index(policy(settings.policy))
        self.reader = FileReader()
        self.lock = threading.Lock()
        self.scanning = threading.RLock()
        self._census = Census(self.folder.root)
        self._mark = Mark(self.folder.temporary)
        self._retention_seconds = settings.retention_seconds
        self._used_ns: dict[str, int] = {}
        self._warned = False

    def refresh(self, *, if_published: bool = False) -> None:
        """Learn of what other processes published and removed.

        Args:
            if_published: only when something was published since the last look.
        """
        with self.scanning:
            if not self._mark.moved() and if_published:
                return
            came, went = self._census.refresh()
            new = [seen for seen in came if self._is_of_identity(seen) and seen.name not in self.index.files]
            new.sort(key=lambda seen: (seen.used_ns, seen.name))
            good: list[StoredFile] = []
            for seen, found in examine_all(self.identity, new):
                if isinstance(found, Refusal):
                    self._refuse(seen, found)
                elif found is not None:
                    good.append(found)
                    self._used_ns[found.name] = seen.used_ns
            with self.lock:
                self.index.add(good)
                for seen in filter(self._is_of_identity, went):
                    self._drop(seen.name)

    def path(self, file: StoredFile) -> Path:
        """Where a file lies."""
        return self.folder.path(file.name)

    def usable(self, hashes: Iterable[str]) -> Iterator[StoredFile | None]:
        """For each block the file that holds it, if that is there still; looks at each file once."""
        good: set[StoredFile] = set()
        for hash in hashes:
            before: StoredFile | None = None
            while True:
                with self.lock:
                    file = self.index.holder(hash)
                if file is None or file in good:
                    break
                if self._is_usable(file):
                    good.add(file)
                    break
                if file is before:  # it stays in the index and is of no use: the disk is silent, or lets nothing go
                    file = None
                    break
                before = file  # another file may hold the block too
            yield file

    def _is_usable(self, file: StoredFile) -> bool:
        """Whether a file of the index is there still, has its size and is not past its retention; counts as a use."""
        try:
            seen = Seen.of(str(self.path(file)), os.stat(self.path(file)))
        except FileNotFoundError:
            self.forget(file)
            return False
        except OSError:
            return False
        if seen.file_bytes != file.file_bytes:
            self.set_aside(file, f"it has {seen.file_bytes} bytes instead of {file.file_bytes}")
            return False
        if self.is_expired(seen):
            with self.scanning, suppress(OSError):
                self.remove(seen)
            return False
        now_ns = time.time_ns()
        if abs(now_ns - self._used_ns.get(file.name, 0)) > _USED_EVERY_NS:
            self._used_ns[file.name] = now_ns
            with suppress(OSError):  # a directory that is read only
                os.utime(seen.path, ns=(now_ns, seen.written_ns))
        return True

    def add(self, file: StoredFile) -> None:
        """A file was published by this process."""
        now_ns = time.time_ns()
        with self.scanning, self.lock:
            self._census.add(Seen(str(self.path(file)), file.file_bytes, now_ns, now_ns))
            self._used_ns[file.name] = now_ns
            self.index.add([file])
            self.counts.published += len(file.hashes)

    def forget(self, file: StoredFile) -> None:
        """A file has gone, or is of no use here."""
        with self.scanning:
            self._census.forget(self.path(file))
            with self.lock:
                self._drop(file.name)

    def set_aside(self, file: StoredFile, why: str) -> None:
        """Put a damaged file into quarantine; where that cannot be done it is only forgotten."""
        with self.scanning:
            self._quarantine(self.path(file), why)
            with self.lock:
                self._drop(file.name)

    def fail(self, what: str, cause: object) -> None:
        """Count a failure of the disk; the first one is told."""
        with self.lock:
            self.counts.failures += 1
            first, self._warned = not self._warned, True
        if first:
            logger.warning("tieredkv: %s in %s, blocks are not kept: %s", what, self.folder.directory, cause)

    # ---- for making room, under `scanning`

    def counted(self) -> Iterator[tuple[str, Seen]]:
        """(kind, file) of all that counts in the cap: "published", "quarantine" or "temporary"."""
        for seen in self._census.files():
            above = os.path.basename(os.path.dirname(seen.path))
            if above in (TEMPORARY, QUARANTINE):
                yield ("temporary" if above == TEMPORARY else "quarantine"), seen
            elif is_ours(seen.name):
                yield "published", seen

    def used_ns(self, file: StoredFile) -> int:
        """When a file of the index was last used, as far as is known."""
        return self._used_ns.get(file.name, 0)

    def is_expired(self, seen: Seen) -> bool:
        """Whether a file was written longer ago than the retention; never when the clock was set back."""
        keep = self._retention_seconds
        return keep is not None and time.time_ns() - seen.written_ns > keep * 1e9

    def remove(self, seen: Seen) -> None:
        """Delete a file, of whichever identity.

        Raises:
            OSError: it cannot be deleted.
        """
        with suppress(FileNotFoundError):
            os.unlink(seen.path)
        self._census.forget(Path(seen.path))
        with self.lock:
            file = self._drop(seen.name) if self._is_of_identity(seen) else None
            self.counts.evicted += len(file.hashes) if file else 0

    def remove_expired(self) -> None:
        """Delete what is past its retention."""
        if self._retention_seconds is not None:
            for seen in [seen for kind, seen in self.counted() if kind != "temporary" and self.is_expired(seen)]:
                self.remove(seen)

    def _drop(self, name: str) -> StoredFile | None:
        self.reader.drop(name)
        self._used_ns.pop(name, None)
        return self.index.forget(name)

    def _refuse(self, seen: Seen, refusal: Refusal) -> None:
        if refusal.kind == "damaged":
            self._quarantine(Path(seen.path), refusal.why)
        else:
            with self.lock:
                self.counts.foreign += 1

    def _quarantine(self, path: Path, why: str) -> None:
        logger.warning("tieredkv: a damaged file is set aside, its blocks count as absent: %s: %s", path.name, why)
        with self.lock:
            self.counts.set_aside += 1
        with suppress(OSError):
            quarantine(self.folder.root, path)
            self._census.forget(path)  # one that stays where it is must not seem new at the next look

    def _is_of_identity(self, seen: Seen) -> bool:
        folder, above = os.path.split(os.path.dirname(seen.path))
        return above != TEMPORARY and folder == str(self.folder.blocks)
