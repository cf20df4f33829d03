"""A load test's report: figures of the whole and of its parts, what the server said, and how it was measured.

Imports: errors, figures, records, server, settings.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tieredkv.errors import ConfigError
from tieredkv.loadtest.figures import Figures, concurrency_over_time, figures_of, throughput_over_time
from tieredkv.loadtest.records import Record
from tieredkv.loadtest.server import ServerFigures
from tieredkv.loadtest.settings import LoadSettings

KIND = "tieredkv stress 1"
"""What a report's JSON says it is."""


@dataclasses.dataclass(frozen=True)
class Report:
    """What a load test found. Times are seconds since its start.

    Args:
        date: when it began, ISO.
        url, model: what was asked.
        load: what was sent, in a line.
        is_open: whether requests came at times of their own.
        seed: of the words.
        whole: figures of everything.
        parts: of each part: one, or those of a ramp.
        concurrency: (seconds, requests under way from then on).
        throughput: (seconds, pieces of answers a second).
        server: what it said of its memory.
        notes: what a reader must know to trust the figures.
        requests: a short record of each request.
    """

    date: str
    url: str
    model: str
    load: str
    is_open: bool
    seed: int
    whole: Figures
    parts: Sequence[Figures]
    concurrency: Sequence[tuple[float, float]]
    throughput: Sequence[tuple[float, float]]
    server: ServerFigures
    notes: Sequence[str]
    requests: Sequence[dict[str, Any]]

    def as_json(self) -> dict[str, Any]:
        """Everything, for a file and for `compare`."""
        return {"kind": KIND, **dataclasses.asdict(self)}


def make_report(
    settings: LoadSettings,
    model: str,
    parts: Sequence[tuple[int | None, Sequence[Record]]],
    server: ServerFigures,
    notes: Sequence[str],
) -> Report:
    """The report of what was recorded.

    Args:
        settings: what was to be done.
        model: that answered.
        parts: for each part its concurrency and its records.
        server: what it said of its memory.
        notes: of what went on before.
    """
    records = [record for _, each in parts for record in each]
    start = min(record.sent_seconds for record in records)
    whole = figures_of(records, None if settings.is_open else settings.at_once)
    return Report(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        url=settings.base_url,
        model=model,
        load=settings.load,
        is_open=settings.is_open,
        seed=settings.seed,
        whole=whole,
        parts=[figures_of(each, concurrency) for concurrency, each in parts],
        concurrency=_since(start, concurrency_over_time(records)),
        throughput=_since(start, throughput_over_time(records)),
        server=dataclasses.replace(
            server, kv_bytes=_since(start, server.kv_bytes), device_bytes=_since(start, server.device_bytes)
        ),
        notes=[*notes, *_notes(settings, records, server)],
        requests=[_short(record, start) for record in records],
    )


def read_report(path: Path) -> dict[str, Any]:
    """A report's JSON.

    Raises:
        ConfigError: it cannot be read, or is something else.
    """
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        kind = report.get("kind")
    except (OSError, ValueError, AttributeError) as error:
        raise _no_report(path, repr(error)) from error
    if kind != KIND:
        raise _no_report(path, f"kind {kind!r}")
    return dict(report)


def _no_report(path: Path, got: str) -> ConfigError:
    return ConfigError(
        f"{path} is no report of a load test.",
        wanted=f"a JSON file of kind {KIND!r}",
        got=got,
        change="pass the report.json that `tieredkv stress --out` wrote",
    )


def _since(start: float, points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(moment - start, value) for moment, value in points]


def _short(record: Record, start: float) -> dict[str, Any]:
    return {
        "number": record.ask.number,
        "part": record.part,
        "sent_seconds": record.sent_seconds - start,
        "first_token_seconds": record.first_token_seconds,
        "ended_seconds": record.ended_seconds - start,
        "wanted_prompt_tokens": record.ask.prompt_tokens,
        "prompt_tokens": record.prompt_tokens,
        "wanted_answer_tokens": record.ask.answer_tokens,
        "answer_tokens": record.new_tokens,
        "finish": record.finish,
        "error": record.error,
        "message": record.message,
    }


def _notes(settings: LoadSettings, records: Sequence[Record], server: ServerFigures) -> list[str]:
    notes = []
    whole = [record for record in records if record.error is None]
    uncounted = sum(record.answer_tokens is None for record in whole)
    if uncounted:
        notes.append(f"{uncounted} answers came without a usage: their pieces are counted as tokens.")
    counted = [record for record in whole if record.answer_tokens is not None]
    tokens, pieces = sum(r.new_tokens for r in counted), sum(len(r.piece_seconds) for r in counted)
    if pieces and tokens > 1.05 * pieces:
        notes.append(f"A piece of an answer has {tokens / pieces:.2f} tokens: between tokens means between pieces.")
    short = sum(record.new_tokens < record.ask.answer_tokens for record in whole)
    if short:
        notes.append(f"{short} of {len(whole)} answers ended before the length that was asked for.")
    if settings.trace is not None and len(records) < settings.requests:
        notes.append(f"The trace has {len(records)} requests that could be sent, fewer than {settings.requests}.")
    if server.missing:
        notes.append(f"Memory of the server is not known: {server.missing}.")
    return notes
