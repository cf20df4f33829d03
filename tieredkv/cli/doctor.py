"""`tieredkv doctor`: what limits a run, from saved statistics; or which part of the cache departs, on a model.

Imports: everything to its left; typer and rich.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tieredkv import sizing
from tieredkv.advice import Finding, explain
from tieredkv.cli.bisect import Stage, bisect
from tieredkv.cli.model import load, quiet
from tieredkv.cli.prompt import build
from tieredkv.cli.telling import errors_told, terminal
from tieredkv.errors import ConfigError
from tieredkv.stats import CacheStats

_OF_BISECT = ("model", "document", "prompt_tokens", "new_tokens", "codec", "dtype", "device")
"""What a file of figures has no use for."""

_TYPED = "COMMANDLINE"
"""Where an option comes from that the user gave."""

_STYLES = {"fault": "red", "limit": "yellow", "note": "dim"}


@errors_told()
def doctor(
    context: typer.Context,
    report: Annotated[
        Path | None, typer.Argument(help="What `cache.stats().to_json()` or `tieredkv demo --json` wrote.")
    ] = None,
    bisect_: Annotated[bool, typer.Option("--bisect", help="Find the part that departs from stock.")] = False,
    model: Annotated[
        str | None, typer.Option(help="Folder, .gguf file or hub id.", show_default="SmolLM2-135M-Instruct")
    ] = None,
    document: Annotated[Path | None, typer.Option(help="Text file.", show_default="Python's documentation")] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Cut the document to this.")] = 1024,
    new_tokens: Annotated[int, typer.Option(help="Tokens decoded after the prompt.")] = 16,
    codec: Annotated[str, typer.Option(help="Of the last stage: raw, fp8, int8 or int4.")] = "int8",
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "fp32",
    device: Annotated[str | None, typer.Option(help="cpu or cuda.", show_default="cuda where there is one")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say in plain words what limits a run; or, with --bisect, which part of the cache gives other logits.

    Exit code 0: said, and with --bisect nothing departs that must not; 1: it does; 2: it cannot be run.
    """
    console = terminal()
    _check_uses(context, report, bisect_)
    if not bisect_:
        findings = explain(read_stats(report))
        _show_findings(findings, console, as_json)
        return
    with quiet():
        loaded = load(model, sizing.parse_dtype(dtype), device)
        prompt = build(loaded.tokenizer, document, None, prompt_tokens)
        with tempfile.TemporaryDirectory(prefix="tieredkv-doctor-") as folder:
            stages = bisect(loaded.model, prompt.input_ids, new_tokens, codec, Path(folder))
    _show_stages(stages, console, as_json)
    if any(stage.departs and stage.lossless for stage in stages):
        raise typer.Exit(1)


def _check_uses(context: typer.Context, report: Path | None, bisect_: bool) -> None:
    """Refuse what would be left without effect.

    Raises:
        ConfigError: a file beside --bisect, or an option of --bisect without it.
    """
    if bisect_ and report is not None:
        raise ConfigError(
            "--bisect runs a model, and reads no file.",
            wanted="a file, or --bisect",
            got=f"{report} and --bisect",
            change="leave one of them out",
        )
    sources = {name: context.get_parameter_source(name) for name in _OF_BISECT}
    # By name: newer versions of typer have a ParameterSource of their own, and older ones have click's.
    given = [f"--{name.replace('_', '-')}" for name, source in sources.items() if source and source.name == _TYPED]
    if given and not bisect_:
        raise ConfigError(
            "An option that is of use with --bisect only.",
            wanted="--bisect beside it, or a file alone",
            got=", ".join(given),
            change="add --bisect and leave out the file, or leave out the option",
        )


def read_stats(path: Path | None) -> CacheStats:
    """Statistics from a file: those of a cache, or of the demo's report.

    Raises:
        ConfigError: no file, or not such a file.
    """
    if path is None:
        raise ConfigError(
            "There is nothing to look at.", wanted="a file, or --bisect", got="neither", change="doctor REPORT.json"
        )
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        return CacheStats.from_dict(saved.get("stats", saved))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as failure:
        raise ConfigError(
            "The statistics cannot be read.",
            wanted="a file that cache.stats().to_json() or `tieredkv demo --json` wrote",
            got=f"{path}: {type(failure).__name__}: {failure}",
            change="check the file",
        ) from failure


def _show_findings(findings: list[Finding], console: Console, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
        return
    for finding in findings:
        label = f"[{_STYLES[finding.severity]}]{finding.severity}[/] [bold]{finding.kind}[/bold]"
        console.print(f"{label}  {escape(finding.text)}", highlight=False, soft_wrap=True)
        if finding.change is not None:
            console.print(f"  to change: {escape(finding.change)}", highlight=False, soft_wrap=True)


def _show_stages(stages: list[Stage], console: Console, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(s) | {"departs": s.departs} for s in stages], indent=2))
        return
    table = Table("stage", "max |Δlogit| / max |logit|", "reads hot, warm, cold", "", title="beside DynamicCache")
    for stage in stages:
        difference = "failed" if stage.difference is None else f"{stage.difference:.1e}"
        verdict = "[red]departs[/red]" if stage.departs else "[green]agrees[/green]"
        if stage.departs and not stage.lossless:
            verdict = "[yellow]departs, as a lossy codec may[/yellow]"
        table.add_row(stage.name, difference, ", ".join(f"{count:,}" for count in stage.blocks), verdict)
    console.print(table)
    wrong = next((stage for stage in stages if stage.departs and stage.lossless), None)
    if wrong is None:
        console.print("nothing departs that must not", highlight=False)
    else:
        text = f"the first to depart is [bold]{wrong.name}[/bold]: {escape(wrong.where)}"
        console.print(text, highlight=False, soft_wrap=True)
