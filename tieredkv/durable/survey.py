"""Looking through a directory of published blocks from outside, of whichever models: what is there, is it whole, prune.

Imports: checksum, errors, tiers, durable.{folder,format,identity,reading,scan}.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal

import torch

from tieredkv.checksum import Checksummer
from tieredkv.durable.folder import QUARANTINE, ROOT, TEMPORARY, Census, Seen, locked, quarantine, sweep
from tieredkv.durable.format import Refusal, StoredFile, is_ours
from tieredkv.durable.identity import salt_digest
from tieredkv.durable.reading import FileReader, Run
from tieredkv.durable.scan import examine, in_parallel
from tieredkv.errors import ColdTierError
from tieredkv.tiers.cold_folder import cold_error

# One layer of a file at a time, in pieces, so that a file of large blocks needs no more memory than a small one.
_PIECE_BYTES = 8 << 20


@dataclasses.dataclass(frozen=True)
class Surveyed:
    """One file of a directory.

    Args:
        seen: path, size and times.
        place: "published", or "quarantine" for what was set aside as damaged.
        content: what its header says, or why that is not believed.
    """

    seen: Seen
    place: Literal["published", "quarantine"]
    content: StoredFile | Refusal


def survey(directory: str | os.PathLike[str]) -> list[Surveyed]:
    """All files of a directory, of any model, in the order of their paths. Temporary ones are passed over.

    Raises:
        ColdTierError: there are no published blocks, or the directory cannot be read.
    """
    census = Census(_root(directory))
    census.refresh()
    files = sorted((seen for seen in census.files() if _place(seen) is not None), key=lambda seen: seen.path)
    return [found for found in in_parallel(_surveyed, files) if found is not None]


def wrong_rows(file: StoredFile, path: str) -> list[tuple[int, int]]:
    """(block, layer) of the rows of a file whose bytes are not those of their checksums.

    Raises:
        OSError: the file cannot be read to its end.
    """
    checksummer = Checksummer(compiled=False)
    wanted = torch.tensor([file.record(position).checksums for position in range(len(file.hashes))])
    wrong: list[tuple[int, int]] = []
    reader = FileReader()
    for layer, row_bytes in enumerate(file.identity.row_bytes):
        step = max(1, _PIECE_BYTES // row_bytes)
        for first in range(0, len(file.hashes), step):
            run = Run(file, first, first, min(step, len(file.hashes) - first))
            rows = torch.empty((run.count, row_bytes), dtype=torch.uint8)
            cause = reader.read(Path(path), run, range(layer, layer + 1), rows.numpy().reshape(-1).data)
            if cause is not None:
                raise cause
            bad = (checksummer.checksum_rows(rows) != wanted[first : first + run.count, layer]).nonzero()
            wrong += ((first + int(position), layer) for position in bad)
    return wrong


def why_not_whole(file: Surveyed) -> Refusal | None:
    """Read all of a file; why it is not whole, or None when it is, when it went meanwhile and when it is foreign."""
    content = file.content
    if isinstance(content, Refusal):
        return None if content.kind == "foreign" else content
    try:
        wrong = wrong_rows(content, file.seen.path)
    except FileNotFoundError:
        return None
    except OSError as cause:
        # As where blocks are read: what has too few bytes, or bytes that the disk does not give, is damaged.
        return Refusal("damaged" if cause.errno == errno.EIO else "unreadable", f"it cannot be read: {cause}")
    if not wrong:
        return None
    block, layer = wrong[0]
    return Refusal("damaged", f"{len(wrong)} rows have a wrong checksum, the first in block {block}, layer {layer}")


def set_aside(directory: str | os.PathLike[str], file: Surveyed) -> None:
    """Put a damaged file into quarantine.

    Raises:
        ColdTierError: it cannot be moved.
    """
    try:
        quarantine(_root(directory), Path(file.seen.path))
    except OSError as cause:
        raise cold_error("A damaged file cannot be set aside.", file.seen.path, cause) from cause


def prune(
    directory: str | os.PathLike[str], *, older_than_seconds: float | None = None, salt: str | None = None
) -> list[Surveyed]:
    """Delete files: those in quarantine and what dead writers left in any case, and published ones if asked to.

    Args:
        directory: the directory.
        older_than_seconds: delete what was written longer ago.
        salt: delete what belongs to this salt, given as such, or as its digest or the first 8 digits or more of that.
            With both, delete what both hold for.

    Returns:
        What was deleted.

    Raises:
        ColdTierError: the directory cannot be read or written.
    """
    root = _root(directory)
    chosen = [file for file in survey(directory) if _is_chosen(file, older_than_seconds, salt)]
    try:
        for file in chosen:
            with suppress(FileNotFoundError):
                os.unlink(file.seen.path)
        with locked(root):
            sweep(root)
    except OSError as cause:
        raise cold_error("The directory cannot be pruned.", root, cause) from cause
    return chosen


def _is_chosen(file: Surveyed, older_than_seconds: float | None, salt: str | None) -> bool:
    if file.place == "quarantine":
        return True
    if older_than_seconds is None and salt is None:
        return False
    if older_than_seconds is not None and time.time_ns() - file.seen.written_ns <= older_than_seconds * 1e9:
        return False
    return salt is None or (isinstance(file.content, StoredFile) and _is_salt(file.content.salt, salt))


def _is_salt(digest: str, salt: str) -> bool:
    return digest == salt_digest(salt) or (len(salt) >= 8 and digest.startswith(salt))


def _root(directory: str | os.PathLike[str]) -> Path:
    root = Path(directory).expanduser().absolute() / ROOT
    if not root.is_dir():
        raise ColdTierError(
            f"There are no published blocks in {directory}.",
            wanted=f"a folder {root}",
            got="no such folder",
            change="name the directory that was given as cold",
        )
    return root


def _place(seen: Seen) -> Literal["published", "quarantine"] | None:
    above = os.path.basename(os.path.dirname(seen.path))
    if above == TEMPORARY or not is_ours(seen.name):
        return None
    return "quarantine" if above == QUARANTINE else "published"


def _surveyed(seen: Seen) -> Surveyed | None:
    place = _place(seen)
    content = examine(seen)
    return None if place is None or content is None else Surveyed(seen, place, content)
