"""Reading the headers of files, many at once.

Imports: durable.folder, durable.format, durable.identity.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import TypeVar

from tieredkv.durable.folder import Seen, open_to_read
from tieredkv.durable.format import (
    Refusal,
    StoredFile,
    decode_header,
    header_bytes,
    identity_of,
    is_ours,
    read_metadata,
)
from tieredkv.durable.identity import Identity

T = TypeVar("T")

THREADS = 8

# Most headers end here, and a disk reads as much in any case.
_FIRST_READ_BYTES = 16 << 10
_FILES_PER_TASK = 32


def read_header(path: str) -> tuple[bytes, int] | Refusal:
    """A file's header and its size.

    Raises:
        OSError: it cannot be opened or read.
    """
    descriptor = open_to_read(path)
    try:
        start = os.pread(descriptor, _FIRST_READ_BYTES, 0)
        wanted = header_bytes(start)
        if wanted is None:
            return Refusal("damaged", "its header has no such length")
        while len(start) < wanted:
            more = os.pread(descriptor, wanted - len(start), len(start))
            if not more:
                return Refusal("damaged", "it ends within its header")
            start += more
        return start[:wanted], os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def examine(seen: Seen, identity: Identity | None = None) -> StoredFile | Refusal | None:
    """What a file in the folder of `identity` is, or of the one that its header names; None when it went meanwhile."""
    if not is_ours(seen.name):
        return Refusal("foreign", "its name is not one of ours")
    try:
        found = read_header(seen.path)
    except FileNotFoundError:
        return None
    except OSError as cause:
        return Refusal("unreadable", f"it cannot be read: {cause}")
    if isinstance(found, Refusal):
        return found
    its = identity or _named_identity(seen.name, found[0])
    return its if isinstance(its, Refusal) else decode_header(its, seen.name, *found)


def _named_identity(name: str, header: bytes) -> Identity | Refusal:
    metadata = read_metadata(name, header)
    return metadata if isinstance(metadata, Refusal) else identity_of(metadata)


def examine_all(identity: Identity, files: Sequence[Seen]) -> Iterator[tuple[Seen, StoredFile | Refusal | None]]:
    """`examine` for many files, in their order."""
    return zip(files, in_parallel(lambda seen: examine(seen, identity), files), strict=True)


def in_parallel(work: Callable[[Seen], T], files: Sequence[Seen]) -> Iterable[T]:
    """`work` for each file, in several threads when there are many."""
    if len(files) <= _FILES_PER_TASK:
        return [work(seen) for seen in files]
    tasks = [files[start : start + _FILES_PER_TASK] for start in range(0, len(files), _FILES_PER_TASK)]
    with ThreadPoolExecutor(THREADS, thread_name_prefix="tieredkv-index") as pool:
        return chain.from_iterable(list(pool.map(lambda task: [work(seen) for seen in task], tasks)))
