"""`tieredkv stress`: a load test of any OpenAI-compatible server.

Imports: errors, loadtest and this package's telling; typer and rich.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tieredkv.cli.telling import errors_told, terminal
from tieredkv.errors import ConfigError
from tieredkv.loadtest import LoadSettings, Report, run
from tieredkv.loadtest.compare import Comparison, compare
from tieredkv.loadtest.figures import Spread
from tieredkv.loadtest.markdown import number
from tieredkv.loadtest.records import Record
from tieredkv.loadtest.report import read_report
from tieredkv.loadtest.write import make_folder, write

_TRACE = "Take lengths, and times, from this recording: .csv (Azure) or .jsonl (Mooncake)."
_SHAPE = "Lengths without a trace: mix (short, medium, long), or tokens IN:OUT such as 500:150."
_SCALE = "Multiply the times of the trace: 0.1 is ten times as fast."
_RATE = "Requests a second, at random times; none waits for another."
_CONCURRENCY = "Keep so many requests going at once.  [default: 8 without --trace and --rate]"
_RAMP = "From short requests, one at a time, to long ones, --concurrency at once."
_LONGEST = "Leave out requests of more tokens, prompt and answer together."
_EXTRA = 'More fields of each request, as JSON: {"ignore_eos": true} for servers that have it.'


@errors_told()
def stress(
    url: Annotated[str, typer.Option(help="The server, such as http://127.0.0.1:8000.")],
    trace: Annotated[Path | None, typer.Option(help=_TRACE)] = None,
    shape: Annotated[str, typer.Option(help=_SHAPE)] = "mix",
    scale: Annotated[float, typer.Option(help=_SCALE)] = 1.0,
    rate: Annotated[float | None, typer.Option(help=_RATE)] = None,
    concurrency: Annotated[int | None, typer.Option(help=_CONCURRENCY)] = None,
    ramp: Annotated[bool, typer.Option("--ramp", help=_RAMP)] = False,
    requests: Annotated[int, typer.Option(help="How many are sent.")] = 100,
    longest: Annotated[int | None, typer.Option(help=_LONGEST)] = None,
    model: Annotated[str | None, typer.Option(help="Model to ask.  [default: the server's first]")] = None,
    api_key: Annotated[str | None, typer.Option(help="Bearer token.", envvar="OPENAI_API_KEY")] = None,
    completions: Annotated[bool, typer.Option("--completions", help="Ask /v1/completions instead of chat.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds without a byte after which a request is given up.")] = 600.0,
    extra: Annotated[str, typer.Option(help=_EXTRA)] = "{}",
    seed: Annotated[int, typer.Option(help="Of words, lengths and times.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write report.json, report.md and pictures here.")] = None,
    old: Annotated[Path | None, typer.Option("--compare", help="The report.json of an earlier run.")] = None,
) -> None:
    """Send a load to any OpenAI-compatible server and report latencies, throughput and failures.

    Exit code 1: no request was answered. Exit code 2: the load cannot be sent.
    """
    settings = LoadSettings(
        url=url,
        model=model,
        api_key=api_key,
        chat=not completions,
        requests=requests,
        trace=trace,
        shape=shape,
        scale=scale,
        rate=rate,
        concurrency=concurrency,
        ramp=ramp,
        longest=longest,
        timeout_seconds=timeout,
        seed=seed,
        extra=_fields(extra),
    )
    earlier = None if old is None else read_report(old)
    if out is not None:
        make_folder(out)
    report = _run(settings, terminal(stderr=True))
    comparison = None if earlier is None else compare(earlier, report)
    files = [] if out is None else write(report, out, comparison)
    console = terminal()
    _show(report, console)
    if comparison is not None:
        _show_comparison(comparison, console)
    for file in files:
        console.print(f"written: {file}", markup=False, highlight=False, soft_wrap=True)
    if not report.whole.answered:
        raise typer.Exit(1)


def _fields(text: str) -> dict[str, Any]:
    """The object in --extra."""
    try:
        fields = json.loads(text)
    except ValueError as error:
        fields = str(error)
    if not isinstance(fields, dict):
        change = """pass for example --extra '{"ignore_eos": true}'"""
        raise ConfigError("--extra cannot be sent.", wanted="a JSON object", got=repr(fields), change=change)
    return fields


def _run(settings: LoadSettings, console: Console) -> Report:
    """Run with a bar on stderr; failures of one request do not end it."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("measuring prompts", total=None)
        failed, tokens = 0, 0

        def begin(count: int) -> None:
            progress.update(bar, total=count, description="sending")

        def ended(record: Record) -> None:
            nonlocal failed, tokens
            failed, tokens = failed + (record.error is not None), tokens + record.new_tokens
            progress.update(bar, advance=1, description=f"{tokens:,} tokens, {failed} failed")

        return asyncio.run(run(settings, on_begin=begin, on_record=ended))


def _show(report: Report, console: Console) -> None:
    whole = report.whole
    console.print(
        f"[bold]{whole.answered} of {whole.requests} requests answered[/bold] in {number(whole.seconds)} s by"
        f" {escape(report.model)}: {escape(report.load)}",
        highlight=False,
        soft_wrap=True,
    )
    console.print(
        f"{number(whole.requests_per_second)} requests/s, {number(whole.answer_tokens_per_second)} answer tokens/s,"
        f" {number(whole.tokens_per_second)} with prompts; {number(whole.mean_concurrency)} at once on average,"
        f" {whole.peak_concurrency} at most",
        highlight=False,
        soft_wrap=True,
    )
    for kind, count in whole.errors.items():
        console.print(f"[red]failed[/red] {count} x {escape(kind)}", highlight=False, soft_wrap=True)
    table = Table("", *(name for name in ("mean", "p50", "p90", "p99", "most")))
    rows: tuple[tuple[str, Spread], ...] = (
        ("time to first token, s", whole.first_token_seconds),
        ("between tokens, s", whole.between_tokens_seconds),
        ("prompt, tokens", whole.prompt_lengths),
        ("answer, tokens", whole.answer_lengths),
    )
    for name, spread in rows:
        table.add_row(name, *map(number, (spread.mean, spread.p50, spread.p90, spread.p99, spread.most)))
    console.print(table)
    for name, points in (("keys and values", report.server.kv_bytes), ("on the device", report.server.device_bytes)):
        if points:
            peak = max(value for _, value in points)
            console.print(f"server, {name} at the peak: {number(peak / 2**20)} MiB", highlight=False, soft_wrap=True)
    for note in report.notes:
        console.print(f"[yellow]note[/yellow] {escape(note)}", highlight=False, soft_wrap=True)


def _show_comparison(comparison: Comparison, console: Console) -> None:
    table = Table("", "then", "now", "now / then", title=f"beside {escape(comparison.old_date)}", title_justify="left")
    for change in comparison.changes:
        table.add_row(escape(change.measure), number(change.old), number(change.new), number(change.ratio))
    console.print(table)
    for difference in comparison.differences:
        console.print(f"[yellow]not the same[/yellow] {escape(difference)}", highlight=False, soft_wrap=True)
