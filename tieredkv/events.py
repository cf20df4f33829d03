"""The move log as files: JSON lines for programs, a Chrome trace for people (chrome://tracing, ui.perfetto.dev).

Imports: stats.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tieredkv.stats import MoveRecord

_MICROSECONDS = 1e6  # the unit of a Chrome trace


def write_events(records: Iterable[MoveRecord], path: str | os.PathLike[str]) -> None:
    """Write one JSON object a line, in order of their start; names and units are those of `MoveRecord`.

    Raises:
        OSError: the file cannot be written.
    """
    with Path(path).open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(dataclasses.asdict(record)) + "\n" for record in in_order(records))


def write_trace(records: Iterable[MoveRecord], path: str | os.PathLike[str]) -> None:
    """Write a Chrome trace with a track for each direction; a slice is one block, in one layer or in all of them.

    Blocks that were copied together stand side by side, each with its share of the copy's time.

    Raises:
        OSError: the file cannot be written.
    """
    with Path(path).open("w", encoding="utf-8") as file:
        json.dump({"displayTimeUnit": "ms", "traceEvents": trace_events(in_order(records))}, file)


def in_order(records: Iterable[MoveRecord]) -> list[MoveRecord]:
    """Records by the start of their copy; workers log a copy when it ends."""
    return sorted(records, key=lambda record: record.start_seconds)


def trace_events(records: Sequence[MoveRecord]) -> list[dict[str, Any]]:
    """The events of a Chrome trace: complete events ("X"), times in microseconds, and the names of the tracks."""
    tracks = {
        name: number for number, name in enumerate(sorted({f"{r.source} to {r.target}" for r in records}), start=1)
    }
    events: list[dict[str, Any]] = [{"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "tieredkv"}}]
    for name, number in tracks.items():
        events.append({"name": "thread_name", "ph": "M", "pid": 1, "tid": number, "args": {"name": name}})
    for record in records:
        layer = "" if record.layer is None else f" layer {record.layer}"
        events.append(
            {
                "name": f"block {record.block}{layer}",
                "cat": record.reason,
                "ph": "X",
                "ts": record.start_seconds * _MICROSECONDS,
                "dur": record.seconds * _MICROSECONDS,
                "pid": 1,
                "tid": tracks[f"{record.source} to {record.target}"],
                "args": {
                    "block": record.block,
                    "layer": record.layer,
                    "from": record.source,
                    "to": record.target,
                    "bytes": record.bytes,
                    "reason": record.reason,
                },
            }
        )
    return events
