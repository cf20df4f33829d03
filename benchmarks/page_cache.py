"""What the system holds of files in memory: making it forget them, and whether it did.

Imports: nothing of this package.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from pathlib import Path


def drop(files: Sequence[Path]) -> None:
    """Ask the system to forget what it holds of these files. It may not: see `held_share`."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # what the disk does not have yet is not let go of
            if hasattr(os, "posix_fadvise"):  # not on macOS
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def held_share(files: Sequence[Path]) -> float:
    """The share of these files' pages that the system holds; a page of which it does not tell counts as held."""
    held = pages = 0
    for file in files:
        there = _pages_held(file)
        held, pages = held + sum(there), pages + len(there)
    return held / pages if pages else 0.0


def _pages_held(file: Path) -> list[bool]:
    """For each page whether it is in memory; nothing is read, so that asking brings none there."""
    size = file.stat().st_size
    if not size:
        return []
    told = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    with open(file, "rb") as raw, mmap.mmap(raw.fileno(), size, access=mmap.ACCESS_COPY) as mapped:
        first = ctypes.c_char.from_buffer(mapped)
        failed = ctypes.CDLL(None).mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), told)
        del first  # a mapping that something points into cannot be closed
    return [bool(failed) or bool(page & 1) for page in told]


def file_system(folder: Path) -> str:
    """The kind that a folder lies on, as "ext4" or "tmpfs"; "unknown" where the system does not tell."""
    device = folder.stat().st_dev
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    for fields in map(str.split, mounts):
        if fields[2] == f"{os.major(device)}:{os.minor(device)}":
            return fields[fields.index("-") + 1]
    return "unknown"
