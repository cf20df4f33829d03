"""Readers for recorded requests, in the two formats that are published.

Imports: errors.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from tieredkv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace.

    Args:
        at_seconds: since the first request of the trace.
        input_tokens: length of the prompt.
        output_tokens: length of the answer.
        blocks: ids of the prompt's blocks, first to last; equal ids stand for equal text from the prompt's start on.
            Empty where a trace records lengths only.
    """

    at_seconds: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


def read_trace(path: str | Path) -> list[Request]:
    """The requests of a file, in its order.

    Args:
        path: `.jsonl` with `timestamp` (ms), `input_length`, `output_length`, `hash_ids` (Mooncake), or `.csv` with
            TIMESTAMP, ContextTokens, GeneratedTokens (Azure LLM inference).

    Raises:
        ConfigError: the file is absent, is of another format, or a line of it is not what the format says.
    """
    path = Path(path)
    readers: dict[str, Callable[[Iterable[str]], list[Request]]] = {".jsonl": _mooncake, ".csv": _azure}
    reader = readers.get(path.suffix)
    if reader is None:
        raise _refusal(path, "a .jsonl (Mooncake) or .csv (Azure) file", f"a file ending in {path.suffix!r}")
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            return reader(lines)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _refusal(path, f"lines as read_trace describes them for {path.suffix}", repr(error)) from error


def parents_of(requests: Sequence[Request]) -> dict[int, int | None]:
    """For each block of a trace the one before it, None for the first of a prompt.

    Raises:
        ConfigError: no request names blocks, a request names one twice, or one follows two different blocks.
    """
    parents: dict[int, int | None] = {}
    for number, request in enumerate(requests):
        before: int | None = None
        for block in request.blocks:
            if parents.setdefault(block, before) != before:
                got = f"block {block} after {before} in request {number}, after {parents[block]} before"
                raise _refusal("the trace", "ids that stand for all text up to their block", got)
            before = block
        if len(set(request.blocks)) != len(request.blocks):
            raise _refusal("the trace", "each block once in a request", f"request {number} with one twice")
    if not parents:
        raise _refusal("the trace", "ids of blocks", "lengths only, which say nothing of what could be shared")
    return parents


def _mooncake(lines: Iterable[str]) -> list[Request]:
    requests = []
    for line in lines:
        if line.strip():
            entry: dict[str, Any] = json.loads(line)
            blocks = tuple(int(block) for block in entry["hash_ids"])
            lengths = int(entry["input_length"]), int(entry["output_length"])
            requests.append(Request(float(entry["timestamp"]) / 1000, *lengths, blocks))
    return requests


def _azure(lines: Iterable[str]) -> list[Request]:
    requests: list[Request] = []
    first: datetime | None = None
    for entry in csv.DictReader(lines):
        at = datetime.fromisoformat(entry["TIMESTAMP"])
        first = first or at
        since = (at - first).total_seconds()
        requests.append(Request(since, int(entry["ContextTokens"]), int(entry["GeneratedTokens"])))
    return requests


def _refusal(what: object, wanted: str, got: str) -> ConfigError:
    return ConfigError(
        f"{what} cannot be replayed.", wanted=wanted, got=got, change="pass a trace of one of the formats"
    )
