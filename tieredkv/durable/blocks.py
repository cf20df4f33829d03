"""Published blocks in a directory: found again by other caches, other processes, and after a restart.

Imports: errors, tiers, ahead, deadline, format, identity, reading, room, settings, shelf, stats, writing.
"""

from __future__ import annotations

import dataclasses
import errno
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NoReturn

import torch

from tieredkv.durable.ahead import ReadAhead
from tieredkv.durable.deadline import TimedCalls
from tieredkv.durable.format import StoredFile
from tieredkv.durable.identity import BlockRecord, Identity
from tieredkv.durable.reading import Piece, Run, runs_of
from tieredkv.durable.room import Room
from tieredkv.durable.settings import DurableSettings
from tieredkv.durable.shelf import Shelf
from tieredkv.durable.stats import DurableStats
from tieredkv.durable.writing import Publisher, Rows
from tieredkv.errors import ClosedError, ColdTierError
from tieredkv.tiers import check_rows
from tieredkv.tiers.cold_folder import cold_error

# What `read_all` takes from the disk at once. Hints about what comes next cost more than they gained, from the page
# cache and from the disk.
PIECE_BYTES = 4 << 20
PIECES_AHEAD = 2
"""Pieces that are read while the caller works on one."""
PIECES_HELD = 2
"""Pieces whose bytes stay: the one that the caller works on, and the one before it."""


class DurableBlocks:
    """Blocks of one identity in a directory that processes share. Thread safe; not usable after a fork.

    A block is written aside, synced and renamed, so that it is whole or absent whenever a process or a machine stops.
    Any process may delete a file at any time; whoever wanted it meets a miss. Two processes that publish one block at
    once write it twice, at worst.

    Args:
        settings: the directory, its limits and the deadline.
        identity: what the blocks agree on.

    Raises:
        ConfigError: the cap holds no block.
        ColdTierError: the directory cannot be made or listed. One that can only be read serves reads.
    """

    def __init__(self, settings: DurableSettings, identity: Identity) -> None:
        self.settings, self.identity = settings, identity
        self._pid, self._closed = os.getpid(), False
        self._timed = TimedCalls(settings.deadline_seconds)
        self._spare_buffers: list[torch.Tensor] = []
        self._shelf = Shelf(settings, identity)
        room = Room(settings, self._shelf)
        self._publisher = Publisher(settings, self._shelf, room)
        started = time.monotonic()
        self._open(room)
        self._shelf.counts.index_seconds = time.monotonic() - started

    def find(self, hashes: Sequence[str]) -> int:
        """How many of the first blocks are there without a gap; counts as a use of them.

        Looks at the disk: for the files of these blocks, and for other processes' files when a block is missing. A
        block that is found may be gone a moment later, so that a read can be a miss still.

        Args:
            hashes: of consecutive blocks, from the first of the sequence.

        Returns:
            The number, 0 also when the disk does not answer within the deadline.
        """
        self._check_usable()
        try:
            return self._timed.run(partial(self._find, list(hashes)))
        except TimeoutError:
            self._count_late()
            return 0

    def record(self, hash: str) -> BlockRecord | None:
        """What is known of a block, or None when it is not indexed; does not look at the disk."""
        self._check_usable()
        with self._shelf.lock:
            file = self._shelf.index.holder(hash)
        return None if file is None else file.record(file.hashes.index(hash))

    def publish(self, records: Sequence[BlockRecord], rows: Rows) -> int:
        """Make blocks durable; those that are there already are not written again.

        A disk that is full, read-only or failing is warned of once and counted, and fewer blocks are durable. Room is
        made by letting other blocks go, never those that these continue. Waits for the disk, whatever the deadline.

        Args:
            records: of blocks, in the order of their sequences. Those that follow each other share files.
            rows: `rows(i, layer)` gives that layer of `records[i]`, uint8 `[row_bytes]` on the CPU, contiguous, as
                stored. Called layer by layer; a row must not change before the next layer is asked for.

        Returns:
            How many of `records` are durable now.

        Raises:
            MismatchError: a record or a row cannot be of this identity; nothing of that file is left behind. The same
                holds for whatever `rows` raises.
            ClosedError: closed, or made before a fork.
        """
        self._check_usable()
        return self._publisher.publish(records, rows)

    def read(self, hashes: Sequence[str], layer: int, out: torch.Tensor) -> None:
        """Read one layer of n blocks. The caller compares checksums before use.

        Args:
            hashes: n hashes.
            layer: layer index.
            out: uint8 `[n, row_bytes]` on the CPU, contiguous; undefined after an error.

        Raises:
            ColdTierError: a miss: a block is gone, its file is damaged (and set aside), or the deadline passed.
            MismatchError: `out` has another shape.
            ClosedError: closed, or made before a fork.
        """
        self._check_usable()
        check_rows(out, (len(hashes), self.identity.row_bytes[layer]), layer)
        self._fill_in_time(out, partial(self._read, list(hashes), layer))

    def read_all(self, hashes: Sequence[str]) -> Iterator[Piece]:
        """Read all layers of n blocks in the order in which they lie on disk: file by file, layer by layer.

        The fastest way to have everything: while the caller works on one piece, the next are read. The deadline is one
        for all pieces, and only time that a piece was waited for counts.

        Args:
            hashes: n hashes.

        Yields:
            Pieces that together hold each layer of each block once.

        Raises:
            ColdTierError: a miss, as in `read`; what came before is whole.
            ClosedError: closed, or made before a fork.
        """
        self._check_usable()
        steps = [(run, layers) for run in self._runs(hashes) for layers in run.pieces(PIECE_BYTES)]
        most_bytes = max((sum(map(run.layer_bytes, layers)) for run, layers in steps), default=0)
        # Owned by this call: a read that is given up may still write into one of them.
        rooms = [torch.empty(most_bytes, dtype=torch.uint8) for _ in steps[: PIECES_AHEAD + PIECES_HELD]]
        left = self.settings.deadline_seconds
        reads = [
            partial(self._read_run, run, layers, rooms[number % len(rooms)])
            for number, (run, layers) in enumerate(steps)
        ]
        ahead = self._begin(reads)
        try:
            for number, (run, layers) in enumerate(steps):
                left = self._wait(ahead, left)
                ends = list(itertools.accumulate((run.layer_bytes(layer) for layer in layers), initial=0))
                room = rooms[number % len(rooms)]
                rows = (room[start:end].view(run.count, -1) for start, end in itertools.pairwise(ends))
                yield Piece(layers, run.first, tuple(rows))
        finally:
            ahead.stop(left)

    def set_aside(self, hash: str, why: str) -> None:
        """Put the file of a block whose bytes were found to be wrong into quarantine; its blocks are absent then.

        What follows them is not found any more until they are published again.

        Args:
            hash: the block.
            why: for the log.
        """
        self._check_usable()
        with self._shelf.lock:
            file = self._shelf.index.holder(hash)
        if file is not None:
            self._shelf.set_aside(file, why)

    def stats(self) -> DurableStats:
        """Counts so far."""
        with self._shelf.lock:
            index = self._shelf.index
            return dataclasses.replace(self._shelf.counts, blocks=index.blocks, bytes_=index.file_bytes)

    def close(self) -> None:
        """Close all files; what is published stays. May be called again."""
        if os.getpid() == self._pid:
            self._closed = True
            self._shelf.reader.close()

    # ----

    def _open(self, room: Room) -> None:
        folder = self._shelf.folder
        if os.name != "posix":
            raise ColdTierError(
                "Published blocks need POSIX file locks.", wanted="posix", got=os.name, change="publish nothing"
            )
        try:
            folder.make()
            room.clear()
        except OSError as cause:
            try:
                os.listdir(folder.directory)
            except OSError as unlisted:
                what = f"The directory {folder.directory} of published blocks cannot be used."
                raise cold_error(what, folder.directory, unlisted) from unlisted
            self._shelf.fail("nothing can be written", cause)
            self._shelf.refresh()

    def _find(self, hashes: list[str]) -> int:
        shelf = self._shelf
        with shelf.lock:
            present = shelf.index.leading(hashes)
        if present < len(hashes):
            shelf.refresh(if_published=True)
        found: list[StoredFile] = []
        for file in shelf.usable(hashes):
            if file is None:
                break
            found.append(file)
        with shelf.lock:
            shelf.index.touch(list(dict.fromkeys(found)))
        return len(found)

    def _runs(self, hashes: Sequence[str]) -> list[Run]:
        with self._shelf.lock:
            found = [self._shelf.index.holder(hash) for hash in hashes]
        files = [file for file in found if file is not None]
        if len(files) < len(hashes):
            self._miss(f"block {hashes[found.index(None)]} is not there")
        return runs_of(files, hashes)

    def _begin(self, reads: Sequence[Callable[[], None]]) -> ReadAhead:
        try:
            return ReadAhead(self._timed, reads, PIECES_AHEAD)
        except TimeoutError as cause:
            self._late(cause)

    def _wait(self, ahead: ReadAhead, seconds: float | None) -> float | None:
        """Wait for the next read; the seconds that are left. A miss when it takes longer."""
        started = time.monotonic()
        try:
            ahead.wait(seconds)
        except TimeoutError as cause:
            self._late(cause)
        return None if seconds is None else max(0.0, seconds - (time.monotonic() - started))

    def _fill_in_time(self, out: torch.Tensor, read: Callable[[torch.Tensor], None]) -> None:
        """Let `read` fill `out`; a miss when it takes longer than the deadline."""
        if self._timed.seconds is None:
            read(out)
            return
        # A read that is given up goes on: it must not write into memory that the caller uses for something else.
        with self._shelf.lock:
            buffer = self._spare_buffers.pop() if self._spare_buffers else None
        if buffer is None or buffer.numel() < out.numel():
            buffer = torch.empty(out.numel(), dtype=torch.uint8)
        rows = buffer[: out.numel()].view(out.shape)
        try:
            self._timed.run(partial(read, rows))
        except TimeoutError as cause:
            self._late(cause)
        out.copy_(rows)
        self._spare_buffers.append(buffer)

    def _read(self, hashes: Sequence[str], layer: int, out: torch.Tensor) -> None:
        while not all(
            self._is_filled(run, range(layer, layer + 1), out[run.first : run.first + run.count])
            for run in self._runs(hashes)
        ):
            pass  # a file was lost and forgotten; another may hold its blocks too

    def _read_run(self, run: Run, layers: range, room: torch.Tensor) -> None:
        """Read some layers of a run into the first bytes of `room`."""
        if not self._is_filled(run, layers, room[: sum(map(run.layer_bytes, layers))]):
            self._miss("its file was lost")

    def _is_filled(self, run: Run, layers: range, out: torch.Tensor) -> bool:
        data = out.numpy().reshape(-1).data
        cause = self._shelf.reader.read(self._shelf.path(run.file), run, layers, data)
        if cause is not None:
            self._lose(run.file, cause)
            return False
        with self._shelf.lock:
            self._shelf.counts.read_bytes += len(data)
        return True

    def _lose(self, file: StoredFile, cause: OSError) -> None:
        if isinstance(cause, FileNotFoundError):
            self._shelf.forget(file)
        elif cause.errno == errno.EIO:
            self._shelf.set_aside(file, str(cause))
        else:  # too many open files, say: the file may be good
            self._miss(str(cause))

    def _late(self, cause: TimeoutError) -> NoReturn:
        self._count_late()
        self._miss(f"the disk took longer than {self.settings.deadline_seconds} s ({cause})")

    def _count_late(self) -> None:
        with self._shelf.lock:
            self._shelf.counts.late += 1

    def _miss(self, why: str) -> NoReturn:
        with self._shelf.lock:
            self._shelf.counts.misses += 1
        raise ColdTierError(
            "A published block cannot be had.",
            wanted="the block, whole and in time",
            got=why,
            change="compute it again from its tokens",
        )

    def _check_usable(self) -> None:
        if self._closed or os.getpid() != self._pid:
            raise ClosedError(
                "The directory of published blocks is closed.",
                wanted="an open one of this process",
                got="a closed one" if self._closed else "one opened before a fork",
                change="open it in this process",
            )
