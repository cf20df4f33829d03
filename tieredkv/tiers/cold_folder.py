"""The private folder of one running cache on disk: locked while the cache lives, swept by others afterwards.

Under the directory that the user gave, each cache makes `spill-<pid>-<random>` with a file `lock` that it holds by
flock. The operating system drops that lock however the process ends, so a folder whose lock can be taken is dead.
No step needs a lock on the whole directory:

- a folder becomes its maker's only once its lock file is held *and* still there; a sweeper that came first takes the
  folder away, and the maker tries another name;
- removing goes data first, then the lock file, then the folder, so that what a crash leaves is found again: a folder
  with a free lock, or an empty one.

Imports: errors, files.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from tieredkv.errors import ColdTierError
from tieredkv.files import try_lock

LOCK_NAME = "lock"
_NAME = re.compile(r"spill-\d+-[0-9a-f]{16}")

_CHANGES = {
    errno.ENOSPC: "free space on that disk, lower the cold cap, or put the cold directory elsewhere",
    errno.EDQUOT: "raise the disk quota, lower the cold cap, or put the cold directory elsewhere",
    errno.EROFS: "remount the disk writable, or put the cold directory elsewhere",
    errno.EACCES: "give this user the right to write there, or put the cold directory elsewhere",
    errno.EPERM: "give this user the right to write there, or put the cold directory elsewhere",
    errno.ENOTDIR: "name a directory, not a file",
    errno.EEXIST: "name a directory, not a file",
    errno.ENOENT: "do not remove the cold directory while a cache uses it",
    errno.EIO: "check the disk",
}


def cold_error(what: str, path: Path | str, cause: OSError) -> ColdTierError:
    """The typed error for a failed system call; raise it `from cause`."""
    return ColdTierError(
        what,
        wanted=f"a working disk below {path}",
        got=cause,
        change=_CHANGES.get(cause.errno or 0, "check the cold directory, or put it elsewhere"),
    )


class SpillFolder:
    """A folder that belongs to this process until `remove`.

    Attributes:
        path: the folder.
        swept: how many dead folders of others were removed when it was made.
    """

    def __init__(self, parent: str | os.PathLike[str]) -> None:
        """Make the folder under `parent`, which is made too if missing, after sweeping dead ones.

        Raises:
            ColdTierError: `parent` cannot be used.
        """
        root = Path(parent).expanduser().absolute()
        if os.name != "posix":
            raise ColdTierError(
                "The cold tier needs POSIX file locks.", wanted="posix", got=os.name, change="leave cold out"
            )
        self.swept = 0
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.swept = sum(_sweep(Path(entry.path)) for entry in list(os.scandir(root)) if _is_spill(entry))
            self.path, self._lock = _make(root)
        except OSError as cause:
            raise cold_error(f"The cold directory {root} cannot be used.", root, cause) from cause
        self._pid = os.getpid()
        self._removed = False

    def remove(self) -> None:
        """Remove the folder and release its lock; what cannot be removed is left for a sweep. May be called again.

        In a forked child nothing happens: the folder is its parent's.
        """
        if self._removed or os.getpid() != self._pid:
            return
        self._removed = True
        with suppress(OSError):
            _remove(self.path)
        os.close(self._lock)


def _is_spill(entry: os.DirEntry[str]) -> bool:
    return _NAME.fullmatch(entry.name) is not None and entry.is_dir(follow_symlinks=False)


def _make(root: Path) -> tuple[Path, int]:
    """A new folder and the descriptor that holds its lock."""
    while True:
        folder = root / f"spill-{os.getpid()}-{secrets.token_hex(8)}"
        folder.mkdir(mode=0o700)
        try:
            lock = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except FileNotFoundError:
            if root.is_dir():
                continue  # swept while still empty
            raise
        try:
            if try_lock(lock) and (folder / LOCK_NAME).exists():
                return folder, lock
        except OSError:  # a file system without locks
            os.close(lock)
            with suppress(OSError):
                _remove(folder)
            raise
        os.close(lock)  # swept between making the lock file and holding it


def _sweep(folder: Path) -> bool:
    """Remove a folder if nobody holds its lock. A folder that cannot be removed, such as another user's, stays."""
    try:
        lock = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        with suppress(OSError):  # not empty: its maker was faster
            folder.rmdir()
            return True
        return False
    except OSError:
        return False
    try:
        if not try_lock(lock):
            return False
        _remove(folder)
        return True
    except OSError:
        return False
    finally:
        os.close(lock)


def _remove(folder: Path) -> None:
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        elif entry.name != LOCK_NAME:
            os.unlink(entry.path)
    (folder / LOCK_NAME).unlink(missing_ok=True)
    folder.rmdir()
