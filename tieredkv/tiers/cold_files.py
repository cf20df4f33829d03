"""The spill files in a private folder: made on demand, kept open up to a limit, read and written at offsets.

Imports: errors, checksum, files, tiers.cold_folder, tiers.cold_layout, tiers.native_reads.
"""

from __future__ import annotations

import array
import dataclasses
import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tieredkv.checksum import Checksummer
from tieredkv.errors import ClosedError, ColdTierError
from tieredkv.files import MOST_PIECES, after, write_at
from tieredkv.tiers.cold_folder import cold_error
from tieredkv.tiers.cold_layout import SpillLayout
from tieredkv.tiers.native_reads import NativeReads, Stretch, reason

FILES_PER_FOLDER = 256


@dataclasses.dataclass(slots=True)
class _OpenFile:
    descriptor: int
    users: int = 0
    dropped: bool = False


class SpillFiles:
    """Numbered files. Safe to use from several threads.

    Args:
        folder: an existing folder.
        layout: the layout of a file, by its number.
        free_floor_bytes: no file is made that would leave less than this free on the disk.
        max_open: how many files are kept open, besides those that are being read or written.
    """

    def __init__(
        self, folder: Path, layout: Callable[[int], SpillLayout], *, free_floor_bytes: int, max_open: int
    ) -> None:
        self._folder, self._layout = folder, layout
        self._free_floor_bytes, self._max_open = free_floor_bytes, max_open
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._made: set[int] = set()
        self._open: OrderedDict[int, _OpenFile] = OrderedDict()  # the longest unused first
        self._closed = False
        self._blocks = self._disk_bytes = 0

    @property
    def blocks(self) -> int:
        """Blocks that the files made so far have room for."""
        return self._blocks

    @property
    def disk_bytes(self) -> int:
        """Bytes of the files made so far, headers included."""
        return self._disk_bytes

    def path(self, number: int) -> Path:
        """Where a file lies, whether it exists or not."""
        return self._folder / f"{number // FILES_PER_FOLDER:04x}" / f"{number:08x}.safetensors"

    def room_bytes(self) -> int:
        """Bytes that new files may take before the disk's free-space floor.

        Raises:
            ColdTierError: the disk does not answer.
        """
        try:
            disk = os.statvfs(self._folder)
        except OSError as cause:
            raise cold_error("The cold directory is lost.", self._folder, cause) from cause
        return max(0, disk.f_bavail * disk.f_frsize - self._free_floor_bytes)

    def write(self, number: int, offset: int, data: memoryview) -> None:
        """Write bytes into a file, which is made first if it does not exist.

        Raises:
            ColdTierError: the file cannot be made or written.
            ClosedError: the files are closed, or belong to the parent of this process.
        """
        with self._use([number], make=True) as (descriptor,):
            try:
                write_at(descriptor, [data], offset)
            except OSError as cause:
                raise cold_error("A spill file cannot be written.", self._folder, cause) from cause

    def read(self, number: int, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill buffers, one after the other, from a stretch of a file.

        Raises:
            ColdTierError: the file was never written, is lost, is shorter than it was made, or cannot be read.
            ClosedError: the files are closed, or belong to the parent of this process.
        """
        with self._use([number], make=False) as (descriptor,):
            try:
                while buffers:
                    count = os.preadv(descriptor, buffers[:MOST_PIECES], offset)
                    if not count:
                        short = sum(map(len, buffers))
                        raise OSError(errno.EIO, f"file ends at {offset}, {short} bytes short")
                    buffers, offset = after(buffers, count), offset + count
            except OSError as cause:
                raise cold_error("A spill file cannot be read.", self._folder, cause) from cause

    def read_at_once(
        self,
        native: NativeReads,
        wanted: Sequence[tuple[int, int, array.array[int]]],
        block_pieces: int,
        summing: tuple[Checksummer, int] | None,
    ) -> list[int]:
        """Fill memory from several stretches of files, with all threads of the caller.

        Args:
            native: reads.
            wanted: for each stretch file number, offset, and address and bytes of each piece of memory.
            block_pieces, summing: as for `NativeReads.read`.

        Returns:
            The checksum of each block, in the order of the pieces; nothing where none were wanted.

        Raises:
            ColdTierError, ClosedError: as for `read`.
        """
        with self._use([number for number, _, _ in wanted], make=False) as descriptors:
            places = zip(descriptors, wanted, strict=True)
            stretches = [Stretch(descriptor, offset, pieces) for descriptor, (_, offset, pieces) in places]
            outcomes, sums = native.read(stretches, block_pieces, summing)
        for outcome in filter(None, outcomes):
            cause = reason(outcome)
            raise cold_error("A spill file cannot be read.", self._folder, cause) from cause
        return sums or []

    def close(self) -> None:
        """Close all files; those in use are closed when their reads and writes end."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._closed = True
            while self._open:
                _drop(self._open.popitem()[1])

    @contextmanager
    def _use(self, numbers: Sequence[int], *, make: bool) -> Iterator[list[int]]:
        """Descriptors that stay open for the length of the `with`."""
        self._check_usable()  # before the lock, which a fork may have left held
        used = list[_OpenFile]()
        try:
            with self._lock:
                self._check_usable()
                for number in numbers:
                    file = self._opened(number, make=make)
                    file.users += 1
                    used.append(file)
            yield [file.descriptor for file in used]
        finally:
            with self._lock:
                for file in used:
                    file.users -= 1
                    if file.dropped and not file.users:
                        os.close(file.descriptor)

    def _opened(self, number: int, *, make: bool) -> _OpenFile:
        file = self._open.get(number)
        if file is None:
            while len(self._open) >= self._max_open:
                _drop(self._open.popitem(last=False)[1])
            file = self._open[number] = _OpenFile(self._descriptor(number, make=make))
        self._open.move_to_end(number)
        return file

    def _check_usable(self) -> None:
        if self._closed or os.getpid() != self._pid:
            raise ClosedError(
                "The cold tier is closed.",
                wanted="an open cache of this process",
                got="a closed one" if self._closed else "one made before a fork",
                change="make a new cache in this process",
            )

    def _descriptor(self, number: int, *, make: bool) -> int:
        path = self.path(number)
        try:
            if number in self._made:
                return os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            if make:
                return self._make(number, path)
        except ColdTierError:
            raise
        except OSError as cause:
            raise cold_error("A spill file cannot be opened.", self._folder, cause) from cause
        raise ColdTierError(
            "A block was read from cold that was never written.",
            wanted=f"file {path}",
            got="no such file",
            change="write a slot before reading it",
        )

    def _make(self, number: int, path: Path) -> int:
        layout = self._layout(number)
        if self.room_bytes() < layout.file_bytes:
            raise OSError(errno.ENOSPC, f"a file of {layout.file_bytes} bytes would go below the free-space floor")
        with suppress(FileExistsError):
            os.mkdir(path.parent, 0o700)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            _preallocate(descriptor, layout.file_bytes)
            write_at(descriptor, [memoryview(layout.header)], 0)
        except OSError:
            os.close(descriptor)
            with suppress(OSError):
                os.unlink(path)
            raise
        self._made.add(number)
        self._blocks += layout.blocks
        self._disk_bytes += layout.file_bytes
        return descriptor


def _drop(file: _OpenFile) -> None:
    file.dropped = True
    if not file.users:
        os.close(file.descriptor)


def _preallocate(descriptor: int, file_bytes: int) -> None:
    """Set the size and take the space now, so that a full disk is met here and not in the middle of a block."""
    os.ftruncate(descriptor, file_bytes)
    if hasattr(os, "posix_fallocate"):  # not on macOS, where a full disk is met when writing
        try:
            os.posix_fallocate(descriptor, 0, file_bytes)
        except OSError as cause:
            if cause.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):  # a file system without it
                raise
