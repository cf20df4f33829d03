"""Numbers out of records: distributions, concurrency over time, throughput over time, failures by kind.

Imports: records.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import statistics
from collections.abc import Iterable, Sequence

from tieredkv.loadtest.records import Record

WINDOWS = 60
"""Stretches of a run over which throughput is shown."""


@dataclasses.dataclass(frozen=True)
class Spread:
    """A distribution; all but `count` are None where there is nothing.

    Args:
        count: of values.
        least, mean, p50, p90, p99, most: of the values; a percentile is one of them.
    """

    count: int = 0
    least: float | None = None
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    most: float | None = None

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """The distribution of some values."""
        ordered = sorted(values)
        if not ordered:
            return cls()
        p50, p90, p99 = (ordered[min(int(share * len(ordered)), len(ordered) - 1)] for share in (0.5, 0.9, 0.99))
        return cls(len(ordered), ordered[0], statistics.fmean(ordered), p50, p90, p99, ordered[-1])


@dataclasses.dataclass(frozen=True)
class Figures:
    """What came of a part of the load, or of all of it.

    Args:
        concurrency: kept going at once; None in an open loop.
        requests: sent.
        answered: of these, with a whole answer.
        errors: failures by kind.
        seconds: from the first sending to the last end.
        prompt_tokens, answer_tokens: of all answers, broken ones too.
        requests_per_second: answered.
        answer_tokens_per_second, tokens_per_second: of answers; of prompts and answers.
        peak_concurrency: most requests under way at once.
        mean_concurrency: over time.
        prompt_lengths, answer_lengths: in tokens, of whole answers.
        first_token_seconds: from sending to the first piece of the answer.
        between_tokens_seconds: from each piece of an answer to its next.
        request_seconds: from sending to the end, of whole answers.
        late_seconds: how much later than planned requests were sent.
    """

    concurrency: int | None
    requests: int
    answered: int
    errors: dict[str, int]
    seconds: float
    prompt_tokens: int
    answer_tokens: int
    requests_per_second: float
    answer_tokens_per_second: float
    tokens_per_second: float
    peak_concurrency: int
    mean_concurrency: float
    prompt_lengths: Spread
    answer_lengths: Spread
    first_token_seconds: Spread
    between_tokens_seconds: Spread
    request_seconds: Spread
    late_seconds: Spread


def figures_of(records: Sequence[Record], concurrency: int | None) -> Figures:
    """The figures of some records, at least one."""
    whole = [record for record in records if record.error is None]
    seconds = max(r.ended_seconds for r in records) - min(r.sent_seconds for r in records)
    prompt_tokens = sum(record.prompt_tokens or 0 for record in records)
    answer_tokens = sum(record.new_tokens for record in records)
    firsts = [record.first_token_seconds for record in records]
    under_way = sum(record.ended_seconds - record.sent_seconds for record in records)
    span = seconds or float("inf")  # nothing took any time: no rate can be told
    return Figures(
        concurrency=concurrency,
        requests=len(records),
        answered=len(whole),
        errors=dict(sorted(collections.Counter(r.error for r in records if r.error is not None).items())),
        seconds=seconds,
        prompt_tokens=prompt_tokens,
        answer_tokens=answer_tokens,
        requests_per_second=len(whole) / span,
        answer_tokens_per_second=answer_tokens / span,
        tokens_per_second=(prompt_tokens + answer_tokens) / span,
        peak_concurrency=max(count for _, count in concurrency_over_time(records)),
        mean_concurrency=under_way / span,
        prompt_lengths=Spread.of(record.prompt_tokens for record in whole if record.prompt_tokens is not None),
        answer_lengths=Spread.of(record.new_tokens for record in whole),
        first_token_seconds=Spread.of(first for first in firsts if first is not None),
        between_tokens_seconds=Spread.of(gap for record in records for gap in record.gaps_seconds),
        request_seconds=Spread.of(record.ended_seconds - record.sent_seconds for record in whole),
        late_seconds=Spread.of(record.sent_seconds - record.planned_seconds for record in records),
    )


def concurrency_over_time(records: Iterable[Record]) -> list[tuple[float, int]]:
    """(the clock's seconds, requests under way from then on), at each change."""
    changes: collections.Counter[float] = collections.Counter()
    for record in records:
        changes[record.sent_seconds] += 1
        changes[record.ended_seconds] -= 1
    return list(zip(sorted(changes), itertools.accumulate(changes[moment] for moment in sorted(changes)), strict=True))


def throughput_over_time(records: Sequence[Record]) -> list[tuple[float, float]]:
    """(the clock's seconds in the middle of a stretch, pieces of answers that came in it, a second)."""
    start, end = min(r.sent_seconds for r in records), max(r.ended_seconds for r in records)
    width = (end - start) / WINDOWS
    if width <= 0:
        return []
    moments = (moment for record in records for moment in record.piece_seconds)
    counts = collections.Counter(min(int((moment - start) / width), WINDOWS - 1) for moment in moments)
    return [(start + (index + 0.5) * width, counts[index] / width) for index in range(WINDOWS)]
