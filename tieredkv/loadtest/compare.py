"""A report beside an older one: what became better or worse, and how far the two can be compared.

Imports: report.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from tieredkv.loadtest.report import Report

SAME = ("url", "model", "load", "seed")
"""What has to be the same in both for the ratios to mean something."""

MEASURES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("answered requests/s", ("requests_per_second",)),
    ("answer tokens/s", ("answer_tokens_per_second",)),
    ("time to first token, p50, s", ("first_token_seconds", "p50")),
    ("time to first token, p90, s", ("first_token_seconds", "p90")),
    ("time to first token, p99, s", ("first_token_seconds", "p99")),
    ("between tokens, p50, s", ("between_tokens_seconds", "p50")),
    ("between tokens, p90, s", ("between_tokens_seconds", "p90")),
    ("between tokens, p99, s", ("between_tokens_seconds", "p99")),
    ("requests at once, mean", ("mean_concurrency",)),
)


@dataclasses.dataclass(frozen=True)
class Change:
    """One measure in both reports.

    Args:
        measure: with its unit.
        old, new: values; None where a report has none.
    """

    measure: str
    old: float | None
    new: float | None

    @property
    def ratio(self) -> float | None:
        """New over old, where both are known and the old is not 0."""
        return self.new / self.old if self.new is not None and self.old else None


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A report beside an older one.

    Args:
        old_date: of the older one.
        changes: of each measure.
        differences: what was not the same in both, for people; ratios mean little then.
    """

    old_date: str
    changes: tuple[Change, ...]
    differences: tuple[str, ...]


def compare(old: Mapping[str, Any], new: Report) -> Comparison:
    """Compare with the JSON of an older report, as `read_report` gives it."""
    mine = new.as_json()
    different = [f"{name}: {old.get(name)} then, {mine[name]} now" for name in SAME if old.get(name) != mine[name]]
    return Comparison(str(old.get("date")), tuple(_changes(old, mine)), tuple(different))


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Change]:
    for measure, path in MEASURES:
        yield Change(measure, _at(old, ("whole", *path)), _at(new, ("whole", *path)))
    yield Change("failures", _failures(old), _failures(new))
    for measure, name in (("KV bytes at their peak", "kv_bytes"), ("device bytes at their peak", "device_bytes")):
        yield Change(measure, _peak(old, name), _peak(new, name))


def _at(report: Mapping[str, Any], path: tuple[str, ...]) -> float | None:
    found: Any = report
    for name in path:
        found = found.get(name) if isinstance(found, Mapping) else None
    return None if found is None else float(found)


def _failures(report: Mapping[str, Any]) -> float:
    return float(sum((report.get("whole", {}).get("errors") or {}).values()))


def _peak(report: Mapping[str, Any], name: str) -> float | None:
    points = report.get("server", {}).get(name) or ()
    return max((float(value) for _, value in points), default=None)
