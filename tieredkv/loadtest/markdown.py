"""A report as Markdown.

Imports: compare, figures, report.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tieredkv.loadtest.compare import Comparison
from tieredkv.loadtest.figures import Figures, Spread
from tieredkv.loadtest.report import Report

MIB = 2**20


def markdown(report: Report, comparison: Comparison | None = None, pictures: Sequence[str] = ()) -> str:
    """The whole report.

    Args:
        report: of a load test.
        comparison: with an older one.
        pictures: names of files beside it.
    """
    whole = report.whole
    lines = [
        f"# Load test of {report.model}",
        "",
        f"{report.date}, {report.url}: {report.load}; seed {report.seed}.",
        "",
        f"{whole.answered} of {whole.requests} requests answered in {number(whole.seconds)} s: "
        f"{number(whole.requests_per_second)} requests/s, {number(whole.answer_tokens_per_second)} answer tokens/s, "
        f"{number(whole.tokens_per_second)} tokens/s with prompts; "
        f"{number(whole.mean_concurrency)} at once on average, {whole.peak_concurrency} at most.",
        "",
        *_spreads(whole),
        "",
        *_errors(whole),
        *_memory(report),
    ]
    if len(report.parts) > 1:
        lines += ["", "## Parts", "", *_parts(report.parts)]
    if comparison is not None:
        lines += ["", f"## Beside {comparison.old_date}", "", *_comparison(comparison)]
    if report.notes:
        lines += ["", "## Notes", "", *(f"- {note}" for note in report.notes)]
    for picture in pictures:
        lines += ["", f"![{picture.removesuffix('.png').replace('_', ' ')}]({picture})"]
    return "\n".join(lines) + "\n"


def number(value: float | None) -> str:
    """Three digits, without an exponent where it can be read; "" for nothing."""
    if value is None:
        return ""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.3g}"


def _spreads(figures: Figures) -> Iterator[str]:
    yield "| | values | least | mean | p50 | p90 | p99 | most |"
    yield "|---|---|---|---|---|---|---|---|"
    rows: tuple[tuple[str, Spread], ...] = (
        ("prompt, tokens", figures.prompt_lengths),
        ("answer, tokens", figures.answer_lengths),
        ("time to first token, s", figures.first_token_seconds),
        ("between tokens, s", figures.between_tokens_seconds),
        ("whole request, s", figures.request_seconds),
        ("sent later than planned, s", figures.late_seconds),
    )
    for name, spread in rows:
        values = (spread.least, spread.mean, spread.p50, spread.p90, spread.p99, spread.most)
        yield f"| {name} | {spread.count} | {' | '.join(number(value) for value in values)} |"


def _errors(figures: Figures) -> Iterator[str]:
    if not figures.errors:
        yield "No request failed."
        return
    yield "| failure | requests |"
    yield "|---|---|"
    for kind, count in figures.errors.items():
        yield f"| {kind} | {count} |"


def _memory(report: Report) -> Iterator[str]:
    kv, device = report.server.kv_bytes, report.server.device_bytes
    if kv:
        peak, last = max(value for _, value in kv), kv[-1][1]
        yield ""
        yield f"Server, keys and values: {number(peak / MIB)} MiB at the peak, {number(last / MIB)} MiB after the load."
    if device:
        yield ""
        yield f"Server, on the device: {number(max(value for _, value in device) / MIB)} MiB at the peak."


def _parts(parts: Sequence[Figures]) -> Iterator[str]:
    yield (
        "| at once | requests | failed | prompt p50 | answer tokens/s | first token p50, s | p99, s "
        "| between tokens p50, s | p99, s |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for part in parts:
        cells = (
            part.concurrency,
            part.requests,
            part.requests - part.answered,
            part.prompt_lengths.p50,
            part.answer_tokens_per_second,
            part.first_token_seconds.p50,
            part.first_token_seconds.p99,
            part.between_tokens_seconds.p50,
            part.between_tokens_seconds.p99,
        )
        yield f"| {' | '.join(number(cell) for cell in cells)} |"


def _comparison(comparison: Comparison) -> Iterator[str]:
    if comparison.differences:
        yield f"Not the same load: {'; '.join(comparison.differences)}."
        yield ""
    yield "| | then | now | now over then |"
    yield "|---|---|---|---|"
    for change in comparison.changes:
        yield f"| {change.measure} | {number(change.old)} | {number(change.new)} | {number(change.ratio)} |"
