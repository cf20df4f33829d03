"""`tieredkv demo`: a real model answers about a long document from a `TieredCache`, then from `DynamicCache`.

Imports: everything to its left; torch, typer and rich.
"""

from __future__ import annotations

import dataclasses
import os
import resource
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from transformers.cache_utils import DynamicCache

from tieredkv import sizing
from tieredkv.cache import TieredCache
from tieredkv.cli.demo.choices import Choices, cold_folder, resolve_settings
from tieredkv.cli.demo.report import Report, Timings, first_difference, kv_tensor_bytes, logit_difference, report_table
from tieredkv.cli.demo.run import Run, generate
from tieredkv.cli.model import Loaded, load, quiet
from tieredkv.cli.prompt import Prompt, build
from tieredkv.cli.telling import errors_told, terminal
from tieredkv.codecs import get_codec
from tieredkv.config import CacheSettings, Size
from tieredkv.errors import ConfigError
from tieredkv.sizing import format_bytes
from tieredkv.stats import CacheStats


@errors_told("stopped; the cold tier's files are removed")
def demo(
    model: Annotated[
        str | None, typer.Option(help="Folder, .gguf file or hub id.", show_default="SmolLM2-135M-Instruct")
    ] = None,
    hot: Annotated[str | None, typer.Option(help='"32MiB" or "512 tokens".', show_default="1/8 of all K/V")] = None,
    warm: Annotated[str | None, typer.Option(help="The same forms.", show_default="1/4 of all K/V")] = None,
    cold: Annotated[Path | None, typer.Option(help="Folder.", show_default="a temporary one")] = None,
    window: Annotated[
        int | None, typer.Option(help="Recent tokens that stay hot.", show_default="what fits hot")
    ] = None,
    codec: Annotated[str, typer.Option(help="Below hot: raw, fp8, int8 or int4.")] = "raw",
    hot_codec: Annotated[str | None, typer.Option(help="The same name: encoded on the device too.")] = None,
    block_size: Annotated[
        int | None, typer.Option(help="Tokens of a block.", show_default="128, less where hot is small")
    ] = None,
    verify: Annotated[str, typer.Option(help="Compare checksums: always, first or off.")] = "always",
    kernel: Annotated[str, typer.Option(help="auto, native, flex or flash.")] = "auto",
    attention: Annotated[str, typer.Option(help="blocks, or gather for any other attention.")] = "blocks",
    document: Annotated[
        Path | None, typer.Option(help="Text file.", show_default="Python's documentation, in Python")
    ] = None,
    question: Annotated[str | None, typer.Option(help="What to ask about it.", show_default="one that suits")] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(help="Cut the document to this.", show_default="6144, or the whole file")
    ] = None,
    new_tokens: Annotated[int, typer.Option(help="Most tokens of the answer.")] = 48,
    prefill_chunk: Annotated[int, typer.Option(help="Tokens of one prefill forward; 0: all in one.")] = 0,
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "fp32",
    device: Annotated[str | None, typer.Option(help="cpu or cuda.", show_default="cuda where there is one")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
) -> None:
    """Answer a question about a long document from a cache in three tiers, and compare with DynamicCache.

    Exit code 0: done; 1: with the exact codec, tokens or logits differ; 2: it cannot be run.
    """
    console = terminal()
    tiers: dict[str, Any] = {"hot": hot, "warm": warm, "cold": cold, "window": window}
    chosen: dict[str, Any] = {"codec": codec, "hot_codec": hot_codec, "verify": verify, "kernel": kernel}
    with quiet():
        choices = Choices(
            model=model,
            document=document,
            question=question,
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            chunk_tokens=prefill_chunk,
            dtype=sizing.parse_dtype(dtype),
            device=device,
            attention=attention,
            block_size=block_size,
            settings=CacheSettings(**tiers, **chosen),
        )
        _check_writable(json_file)
        report = run_demo(choices, console)
    show_report(report, console)
    if json_file is not None:
        json_file.write_text(report.to_json() + "\n", encoding="utf-8")
    if report.failure is not None:
        raise typer.Exit(1)


def run_demo(choices: Choices, console: Console) -> Report:
    """Load the model, answer twice, compare.

    Args:
        choices: what to run.
        console: where progress and the answer go.

    Raises:
        TieredKVError: something that was chosen cannot be served.
    """
    if choices.block_size is not None:
        dataclasses.replace(choices.settings, block_size=choices.block_size)  # a bad one is refused before the wait
    with console.status("loading the model"):
        loaded = load(choices.model, choices.dtype, choices.device)
    prompt = build(loaded.tokenizer, choices.document, choices.question, choices.prompt_tokens)
    dtype = str(choices.dtype).removeprefix("torch.")
    console.print(f"[bold]model[/bold]     {escape(loaded.name)}, {dtype}, {loaded.model.device}", highlight=False)
    console.print(
        f"[bold]document[/bold]  {escape(prompt.document)}: prompt of {prompt.tokens:,} tokens", highlight=False
    )
    console.print(f"[bold]question[/bold]  {escape(prompt.question)}\n", highlight=False)
    with cold_folder(choices) as cold:
        settings = resolve_settings(choices, loaded.model.config, prompt.tokens, cold)
        ours, stats = _run_tiered(choices, loaded, prompt, settings, console)
    console.print("[bold]DynamicCache[/bold]: all keys and values on the device", highlight=False)
    dynamic = DynamicCache(config=loaded.model.config)
    theirs = _run(choices, loaded, prompt, dynamic, console, stream=False)
    return Report(
        model=loaded.name,
        dtype=dtype,
        device=str(loaded.model.device),
        attention=choices.attention,
        document=prompt.document,
        question=prompt.question,
        prompt_tokens=prompt.tokens,
        codec=settings.codec,
        lossless=get_codec(settings.codec).lossless,
        same_tokens=ours.tokens == theirs.tokens,
        first_difference=first_difference(ours.tokens, theirs.tokens),
        logit_difference=logit_difference(ours, theirs),
        tiered=Timings.of(ours, stats.hot.peak_bytes + stats.gather_peak_bytes + stats.other_layers_bytes),
        dynamic=Timings.of(theirs, kv_tensor_bytes(dynamic)),
        stats=stats,
        process_peak_bytes=_process_peak_bytes(),
    )


def _run_tiered(
    choices: Choices, loaded: Loaded, prompt: Prompt, settings: CacheSettings, console: Console
) -> tuple[Run, CacheStats]:
    given = loaded.model if choices.attention == "blocks" else loaded.model.config
    budgets = f"hot {_show_size(settings.hot)}, warm {_show_size(settings.warm)}"
    cold = escape(str(settings.cold))
    console.print(f"[bold]TieredCache[/bold]: {budgets}, the rest in {cold}", highlight=False, soft_wrap=True)
    with TieredCache(given, settings=settings) as cache:
        run = _run(choices, loaded, prompt, cache, console, stream=True)
        cache.measure_links()  # afterwards: what copies reached is told as a share of it
        return run, cache.stats()


def _run(choices: Choices, loaded: Loaded, prompt: Prompt, cache: Any, console: Console, *, stream: bool) -> Run:
    return generate(
        loaded,
        prompt,
        cache,
        new_tokens=choices.new_tokens,
        chunk_tokens=choices.chunk_tokens,
        console=console,
        stream=stream,
    )


def show_report(report: Report, console: Console) -> None:
    """Print the table, and whether the demo passed."""
    console.print()
    console.print(report_table(report))
    console.print(f"most memory of the process, in both: {format_bytes(report.process_peak_bytes)}", highlight=False)
    if report.attention == "blocks" and report.stats.fallback_reason is not None:
        console.print(f"[yellow]gathered[/yellow]: {escape(report.stats.fallback_reason)}", highlight=False)
    if not report.lossless and not report.same_tokens:
        console.print(f"the codec {report.codec} is lossy; DynamicCache's answer:", highlight=False)
        console.print(report.dynamic.text, markup=False, highlight=False, style="italic")
    if report.failure is not None:
        console.print(f"[red]failed[/red]: {report.failure}", highlight=False)


def _show_size(size: object) -> str:
    parsed = Size.parse(size)  # type: ignore[arg-type]
    return str(parsed) if parsed.bytes_ is None else format_bytes(parsed.bytes_)


def _check_writable(path: Path | None) -> None:
    """Before minutes of work, not after; the file itself is made when there is something to write."""
    if path is not None and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)):
        raise ConfigError(
            "The figures cannot be written.", wanted="a file that can be made", got=str(path), change="--json FILE"
        )


def _process_peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
