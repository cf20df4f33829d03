"""`tieredkv ls`, `verify` and `prune`: what was published into a directory, whether it is whole, and letting it go.

Imports: errors, durable, sizing and this package's telling; typer and rich.
"""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tieredkv.cli.telling import errors_told, terminal
from tieredkv.durable.format import Refusal, StoredFile
from tieredkv.durable.survey import Surveyed, set_aside, survey, why_not_whole
from tieredkv.durable.survey import prune as prune_files
from tieredkv.errors import ConfigError
from tieredkv.sizing import format_bytes

_DIGITS = 12
_AGE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([smhdw])\s*")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}

Directory = Annotated[Path, typer.Argument(help="The directory that was given as cold.", metavar="DIR")]


@errors_told()
def ls(directory: Directory) -> None:
    """List what was published into a directory, by model and salt.

    Exit code 0; 2: the directory cannot be read.
    """
    files = survey(directory)
    table = Table("model", "codec", "block size", "salt", "files", "blocks", "tokens", "bytes", "oldest", "newest")
    groups: dict[tuple[str, ...], list[Surveyed]] = defaultdict(list)
    for file in files:
        groups[_group(file)].append(file)
    for group, members in sorted(groups.items()):
        table.add_row(*map(escape, group), *_totals(members))
    console = terminal()
    _show(f"published in {directory}", table, console)
    whole = sum(file.seen.file_bytes for file in files)
    console.print(f"{len(files):,} files, {format_bytes(whole)}", highlight=False)


@errors_told()
def verify(
    directory: Directory,
    aside: Annotated[bool, typer.Option("--set-aside", help="Put damaged files into quarantine.")] = False,
) -> None:
    """Read all that was published into a directory and compare it with its checksums.

    Exit code 0: everything is whole; 1: a file is damaged or unreadable; 2: the directory cannot be read.
    """
    files = [file for file in survey(directory) if file.place == "published"]
    table = Table("file", "why", title="files that are not whole", title_justify="left")
    found: Counter[str] = Counter()
    read_bytes = 0
    for file in files:
        wrong = why_not_whole(file)
        if wrong is None or wrong.kind == "damaged":
            read_bytes += file.seen.file_bytes
        if wrong is not None:
            found[wrong.kind] += 1
            table.add_row(escape(file.seen.path), escape(wrong.why))
            if aside and wrong.kind == "damaged":
                set_aside(directory, file)
    console = terminal()
    if found:
        console.print(table)
    told = f"{found['damaged']} damaged, {found['unreadable']} unreadable"
    console.print(f"{len(files):,} files, {format_bytes(read_bytes)} read, {told}", highlight=False)
    if found:
        raise typer.Exit(1)


@errors_told()
def prune(
    directory: Directory,
    older_than: Annotated[
        str | None, typer.Option(help="Delete what was written longer ago: 90s, 30m, 12h, 7d, 4w.")
    ] = None,
    salt: Annotated[
        str | None, typer.Option(help="Delete what belongs to this salt, or to this digest as ls shows it.")
    ] = None,
) -> None:
    """Delete published blocks by age, by salt, or by both; and always what is damaged or was never finished.

    Exit code 0; 2: an age that is none, or a directory that cannot be pruned.
    """
    seconds = None if older_than is None else _age_seconds(older_than)
    gone = prune_files(directory, older_than_seconds=seconds, salt=salt)
    table = Table("", "files", "bytes")
    for place in ("published", "quarantine"):
        members = [file for file in gone if file.place == place]
        table.add_row(place, f"{len(members):,}", format_bytes(sum(file.seen.file_bytes for file in members)))
    _show(f"deleted from {directory}", table, terminal())


def _show(title: str, table: Table, console: Console) -> None:
    """A table below its title, which it would break at its own width: a path can be copied."""
    console.print(title, style="italic", markup=False, highlight=False, soft_wrap=True)
    console.print(table)


def _group(file: Surveyed) -> tuple[str, ...]:
    if file.place == "quarantine":
        return ("quarantine", "", "", "")
    if isinstance(file.content, Refusal):
        return (file.content.kind, "", "", "")
    identity = file.content.identity
    salt = file.content.salt[:_DIGITS] or "none"
    return (identity.fingerprint[:_DIGITS], identity.codec, str(identity.block_size), salt)


def _totals(files: list[Surveyed]) -> tuple[str, ...]:
    contents = [file.content for file in files if isinstance(file.content, StoredFile)]
    blocks = sum(len(content.hashes) for content in contents)
    tokens = sum(content.token_count for content in contents)
    written = [file.seen.written_ns / 1e9 for file in files]
    return (
        f"{len(files):,}",
        f"{blocks:,}",
        f"{tokens:,}",
        format_bytes(sum(file.seen.file_bytes for file in files)),
        *(time.strftime("%Y-%m-%d %H:%M", time.localtime(when)) for when in (min(written), max(written))),
    )


def _age_seconds(text: str) -> float:
    match = _AGE.fullmatch(text)
    if match is None:
        raise ConfigError(
            "This is no age.", wanted="90s, 30m, 12h, 7d or 4w", got=repr(text), change="give --older-than such an age"
        )
    return float(match[1]) * _SECONDS[match[2]]
