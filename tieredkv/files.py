"""What several parts ask of the system's files: locks that end with their holder, writes to the end, durable names.

Everything here raises the OSError that it meets; what that means to a user is known to the caller.

Imports: nothing of the package.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

MOST_PIECES = 1024
"""Linux and macOS take so many buffers in one call."""


def take_lock(descriptor: int) -> None:
    """Hold a file by flock until it is closed; waits for whoever holds it."""
    import fcntl  # POSIX only; the package must import elsewhere too

    fcntl.flock(descriptor, fcntl.LOCK_EX)


def try_lock(descriptor: int) -> bool:
    """`take_lock` if nobody else holds the file; whether it is held now. A file system without locks is an error."""
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def write_at(descriptor: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Write buffers of bytes, one after the other, to a place in a file; all of them, in as many calls as it takes."""
    while buffers:
        written = os.pwritev(descriptor, buffers[:MOST_PIECES], offset)
        buffers, offset = after(buffers, written), offset + written


def after(buffers: Sequence[memoryview], count: int) -> Sequence[memoryview]:
    """What is left of buffers of bytes when the first `count` bytes are done."""
    for index, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[index + 1 :]]
        count -= len(buffer)
    return []


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
