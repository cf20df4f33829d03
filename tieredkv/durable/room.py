"""Room for one more file below the cap and above the free-space floor, made by letting others go.

First what is damaged goes, then what was used longest ago among other models' files and the policy's choice of ours.

Imports: durable.{folder,settings,shelf}.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from tieredkv.durable.folder import Seen, locked, sweep
from tieredkv.durable.settings import DurableSettings
from tieredkv.durable.shelf import Shelf


class Room:
    """Begins files where there is room, also when other processes do so at the same time.

    Args:
        settings: the limits.
        shelf: the files.
    """

    def __init__(self, settings: DurableSettings, shelf: Shelf) -> None:
        self._shelf = shelf
        self._cap_bytes = settings.cap_bytes(shelf.identity.block_bytes // shelf.identity.block_size)
        self._floor_bytes = settings.free_floor_bytes

    def clear(self) -> None:
        """Remove what dead writers left and what is past its retention.

        Raises:
            OSError: the directory cannot be written.
        """
        with self._shelf.scanning:
            self._shelf.refresh()
            with locked(self._shelf.folder.root):
                sweep(self._shelf.folder.root)
                self._shelf.remove_expired()

    def begin(self, file_bytes: int, kept: set[str]) -> tuple[Path, int] | None:
        """A temporary file and its descriptor, or None when room cannot be made.

        Args:
            file_bytes: size of the file.
            kept: names of files that must not go.

        Raises:
            OSError: the disk refuses.
        """
        with self._shelf.scanning, locked(self._shelf.folder.root):
            self._shelf.refresh()
            self._shelf.remove_expired()
            if not self._make(file_bytes, kept):
                return None
            return self._shelf.folder.begin(file_bytes)

    def _make(self, file_bytes: int, kept: set[str]) -> bool:
        missing = self._missing_bytes(file_bytes)
        if missing > 0 and sweep(self._shelf.folder.root):
            self._shelf.refresh()
            missing = self._missing_bytes(file_bytes)
        if missing <= 0:
            return True
        evictable = [seen for kind, seen in self._shelf.counted() if kind != "temporary" and seen.name not in kept]
        if missing > sum(seen.file_bytes for seen in evictable):
            return False  # nothing is thrown away for what does not fit then either
        for victim in self._victims(kept):
            self._shelf.remove(victim)
            missing -= victim.file_bytes
            if missing <= 0:
                return True
        return False

    def _missing_bytes(self, file_bytes: int) -> int:
        """Bytes that have to go before a file of that size can come."""
        total = unwritten = 0
        for kind, seen in self._shelf.counted():
            total += seen.file_bytes
            unwritten += seen.file_bytes if kind == "temporary" else 0
        disk = os.statvfs(self._shelf.folder.root)
        below_floor = file_bytes + unwritten + self._floor_bytes - disk.f_bavail * disk.f_frsize
        above_cap = 0 if self._cap_bytes is None else total + file_bytes - self._cap_bytes
        return max(below_floor, above_cap)

    def _victims(self, kept: set[str]) -> Iterator[Seen]:
        """Files in the order in which they go, each gone before the next is asked for."""
        shelf = self._shelf
        counted = list(shelf.counted())
        damaged = [seen for kind, seen in counted if kind == "quarantine"]
        yield from sorted(damaged, key=lambda seen: seen.written_ns)
        published = {seen.name: seen for kind, seen in counted if kind == "published"}
        others = [seen for name, seen in published.items() if name not in shelf.index.files]
        others.sort(key=lambda seen: seen.used_ns, reverse=True)
        while True:
            with shelf.lock:
                ours = shelf.index.victim(kept)
            if others and (ours is None or others[-1].used_ns < shelf.used_ns(ours)):
                yield others.pop()
            elif ours is not None:
                yield published.get(ours.name) or Seen(str(shelf.path(ours)), 0, 0, 0)
            else:
                return
