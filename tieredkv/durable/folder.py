"""The directory of published blocks: where files lie, how they come and go, and what is there now.

    DIR/durable/lock                          held by flock while room is made and a temporary file is begun
    DIR/durable/quarantine/<name>             damaged files
    DIR/durable/<identity>/tmp/<random>       files being written, each locked by its writer
    DIR/durable/<identity>/<two digits>/<name>

A temporary file has its final size from the start, so that every process that counts sees what is promised already. A
folder's time of change tells whether it must be listed again. Nothing here reads the clock.

Imports: files.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tieredkv.files import sync_folder, take_lock, try_lock

ROOT = "durable"
QUARANTINE = "quarantine"
TEMPORARY = "tmp"

_FAN_OUT_DIGITS = 2
# Times of change are as coarse as 2 seconds on some disks: a folder that changed as short ago is listed again.
_SETTLE_SECONDS = 2.0


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """A file as a listing showed it.

    Args:
        path: where it is.
        file_bytes: its size.
        written_ns: when it was written, by the clock of whoever wrote it.
        used_ns: when it was last used, the same.
    """

    path: str
    file_bytes: int
    written_ns: int
    used_ns: int

    @property
    def name(self) -> str:
        """Its file name."""
        return os.path.basename(self.path)

    @classmethod
    def of(cls, path: str, status: os.stat_result) -> Seen:
        """From a `stat`."""
        return cls(path, status.st_size, status.st_mtime_ns, status.st_atime_ns)


@dataclasses.dataclass(slots=True)
class _Listing:
    changed_ns: int
    first_seen: float
    listed: float
    files: dict[str, Seen]

    def is_current(self, changed_ns: int) -> bool:
        return self.changed_ns == changed_ns and self.listed - self.first_seen > _SETTLE_SECONDS


class DurableFolder:
    """One identity's folder below a directory. Every method, and every function here, raises the OSError that it meets.

    Args:
        directory: the user's directory.
        identity: first digits of an identity's digest, the name of its folder.
    """

    def __init__(self, directory: str | os.PathLike[str], identity: str) -> None:
        self.directory = Path(directory).expanduser().absolute()
        self.root = self.directory / ROOT
        self.blocks = self.root / identity
        self.temporary = self.blocks / TEMPORARY

    def make(self) -> None:
        """Make what is missing, closed to others."""
        for path in (self.directory, self.root, self.blocks, self.temporary, self.root / QUARANTINE):
            make_folder(path)

    def path(self, name: str) -> Path:
        """Where a file of this identity lies, whether it exists or not."""
        return self.blocks / name[:_FAN_OUT_DIGITS] / name

    def begin(self, file_bytes: int) -> tuple[Path, int]:
        """A new temporary file of that size and its locked descriptor; call it under `locked`."""
        path = self.temporary / f"{os.getpid()}-{secrets.token_hex(8)}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            take_lock(descriptor)
            os.ftruncate(descriptor, file_bytes)
        except OSError:
            abandon(path, descriptor)
            raise
        return path, descriptor

    def finish(self, temporary: Path, descriptor: int, name: str) -> Path:
        """Make a written temporary file durable under its name; closes it."""
        path = self.path(name)
        os.fsync(descriptor)
        make_folder(path.parent)
        os.rename(temporary, path)
        sync_folder(path.parent)
        os.close(descriptor)
        return path


class Census:
    """Which files lie below a root; looks again only where something changed. For one thread at a time.

    Args:
        root: `DIR/durable`.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._listings: dict[str, _Listing] = {}

    def files(self) -> Iterator[Seen]:
        """All files at the last `refresh`, temporary and quarantined ones included."""
        for listing in self._listings.values():
            yield from listing.files.values()

    def refresh(self) -> tuple[list[Seen], list[Seen]]:
        """Look again; returns the files that came and those that went. What is renamed meanwhile may be seen twice."""
        came: list[Seen] = []
        went: list[Seen] = []
        folders: set[str] = set()
        for folder in _folders(self._root):
            self._look(folder, came, went)
            folders.add(folder)
        for folder in self._listings.keys() - folders:
            went += self._listings.pop(folder).files.values()
        return came, went

    def add(self, seen: Seen) -> None:
        """A file was published by this process: when it is gone at the next look, it went."""
        now = time.monotonic()
        listing = self._listings.setdefault(os.path.dirname(seen.path), _Listing(-1, now, now, {}))
        listing.files[seen.name] = seen

    def forget(self, path: Path) -> None:
        """A file was removed by this process."""
        listing = self._listings.get(str(path.parent))
        if listing is not None:
            listing.files.pop(path.name, None)

    def _look(self, folder: str, came: list[Seen], went: list[Seen]) -> None:
        known = self._listings.get(folder)
        try:
            changed_ns = os.stat(folder).st_mtime_ns
            if known is not None and known.is_current(changed_ns):
                return
            files = dict(_listed(folder))
        except FileNotFoundError:
            changed_ns, files = 0, {}
        now = time.monotonic()
        before = {} if known is None else known.files
        same = known is not None and known.changed_ns == changed_ns
        self._listings[folder] = _Listing(changed_ns, known.first_seen if known and same else now, now, files)
        came += (files[name] for name in files.keys() - before.keys())
        went += (before[name] for name in before.keys() - files.keys())


class Mark:
    """Whether something was published since it was last asked, from one `stat` of the folder of temporary files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._changed_ns = -1
        self._first_seen = 0.0

    def moved(self) -> bool:
        """True when the folder changed since the last call, or so short before it that the time may not show it."""
        try:
            changed_ns = os.stat(self._folder).st_mtime_ns
        except OSError:  # nobody has published anything yet, or the disk is lost: nothing new either way
            return False
        now = time.monotonic()
        if changed_ns != self._changed_ns:
            self._changed_ns, self._first_seen = changed_ns, now
            return True
        return now - self._first_seen <= _SETTLE_SECONDS


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """One process at a time makes room below `root`; the lock ends with the process that holds it."""
    lock = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        take_lock(lock)
        yield
    finally:
        os.close(lock)


def sweep(root: Path) -> int:
    """Remove temporary files whose writers are gone; call it under `locked`. Returns how many."""
    return sum(_is_swept(path) for path in sorted(root.glob(f"*/{TEMPORARY}/*")))


def quarantine(root: Path, path: Path) -> None:
    """Put a damaged file where nobody looks for blocks."""
    os.rename(path, root / QUARANTINE / path.name)


def open_to_read(path: str | Path) -> int:
    """A descriptor for reading that does not count as a use: the time of use is set where a block is found."""
    flags = os.O_RDONLY | os.O_NOFOLLOW
    try:
        return os.open(path, flags | getattr(os, "O_NOATIME", 0))
    except PermissionError:  # of a file that is another user's
        return os.open(path, flags)


def make_folder(path: Path) -> None:
    """A folder closed to others, and its name durable; nothing when it exists."""
    if path.is_dir():
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
    sync_folder(path.parent)


def abandon(temporary: Path, descriptor: int) -> None:
    """Remove a temporary file that will not be finished; a sweep finds what cannot be removed now."""
    with suppress(OSError):
        os.unlink(temporary)
    with suppress(OSError):
        os.close(descriptor)


def _folders(root: Path) -> Iterator[str]:
    """The folders in the order in which files are renamed from one to the next, each to be looked at as it comes.

    So a file that another process renames meanwhile, even into a folder that is new, is seen once at least: one that
    was seen nowhere would have its room given away.
    """
    identities = [entry.path for entry in _subfolders(str(root)) if entry.name != QUARANTINE]
    yield from (os.path.join(path, TEMPORARY) for path in identities)
    for path in identities:
        yield from (below.path for below in _subfolders(path) if below.name != TEMPORARY)
    yield str(root / QUARANTINE)


def _subfolders(path: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return [entry for entry in entries if entry.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, PermissionError):
        return []


def _listed(folder: str) -> Iterator[tuple[str, Seen]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # it went meanwhile
                if entry.is_file(follow_symlinks=False):
                    yield entry.name, Seen.of(entry.path, entry.stat(follow_symlinks=False))


def _is_swept(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:  # finished meanwhile, or another user's
        return False
    try:
        if not try_lock(descriptor):  # its writer lives
            return False
        os.unlink(path)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
