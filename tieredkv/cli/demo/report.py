"""Compares the demo's two generations: a record of all figures, a table for people, JSON for programs.

Imports: stats, sizing, run, stock; torch and rich.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import torch
from rich.table import Table

from tieredkv.cli.demo.run import Run
from tieredkv.cli.stock import LOGIT_TOLERANCE
from tieredkv.sizing import format_bytes
from tieredkv.stats import CacheStats, TierStats


@dataclasses.dataclass(frozen=True)
class Timings:
    """The figures of one generation.

    Args:
        text: the answer.
        new_tokens: how many tokens it has.
        seconds_to_first_token: the prefill.
        first_step_seconds: the first decode step, in which attention may be compiled.
        tokens_per_second: the decode steps after it.
        device_kv_bytes: most bytes of keys and values on the device.
    """

    text: str
    new_tokens: int
    seconds_to_first_token: float
    first_step_seconds: float
    tokens_per_second: float
    device_kv_bytes: int

    @classmethod
    def of(cls, run: Run, device_kv_bytes: int) -> Timings:
        """The figures of a run."""
        return cls(
            run.text,
            len(run.tokens),
            run.seconds_to_first_token,
            run.first_step_seconds,
            run.tokens_per_second,
            device_kv_bytes,
        )


@dataclasses.dataclass(frozen=True)
class Report:
    """The demo's outcome.

    Args:
        model, dtype, device, attention, document, question: what was run.
        prompt_tokens: tokens of the prompt.
        codec: the codec below hot.
        lossless: whether that codec is exact, so that equal tokens are asked for.
        same_tokens: whether both caches gave the same tokens.
        first_difference: index of the first new token that differs, or None.
        logit_difference: largest difference of logits up to there, relative to the largest logit.
        tiered, dynamic: the two generations.
        stats: of the tiered cache, when its generation was over.
        process_peak_bytes: most memory that the whole process had, in both generations.
    """

    model: str
    dtype: str
    device: str
    attention: str
    document: str
    question: str
    prompt_tokens: int
    codec: str
    lossless: bool
    same_tokens: bool
    first_difference: int | None
    logit_difference: float
    tiered: Timings
    dynamic: Timings
    stats: CacheStats
    process_peak_bytes: int

    @property
    def failure(self) -> str | None:
        """Why the demo failed, or None. With a lossy codec the answers may differ."""
        if not self.lossless:
            return None
        if not self.same_tokens:
            return f"new token {self.first_difference} differs from DynamicCache's"
        if self.dtype == "float32" and not self.logit_difference <= LOGIT_TOLERANCE:
            return f"logits differ by {self.logit_difference:.1e} of the largest, more than {LOGIT_TOLERANCE:.0e}"
        return None

    def to_json(self) -> str:
        """All figures as a JSON object; times in seconds, memory in bytes."""
        return json.dumps(dataclasses.asdict(self) | {"failure": self.failure}, indent=2)


def first_difference(a: list[int], b: list[int]) -> int | None:
    """Index of the first place where two lists differ, their ends included, or None."""
    if a == b:
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def logit_difference(tiered: Run, dynamic: Run) -> float:
    """Largest difference of logits, relative to the largest, over all steps that had the same context."""
    differs = first_difference(tiered.tokens, dynamic.tokens)
    steps = min(len(tiered.logits), len(dynamic.logits)) if differs is None else differs + 1
    ours, theirs = tiered.logits[:steps], dynamic.logits[:steps]
    if ours.shape != theirs.shape:  # one answer is the start of the other
        ours, theirs = ours[:differs], theirs[:differs]
    return float((ours - theirs).abs().max() / theirs.abs().max()) if len(theirs) else 0.0


def kv_tensor_bytes(cache: Any) -> int:
    """Bytes of the keys and values that a stock cache holds."""
    tensors = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))


def report_table(report: Report) -> Table:
    """The tiered cache beside `DynamicCache`."""
    table = Table("", "TieredCache", "DynamicCache", title="tiered beside DynamicCache", title_justify="left")
    _add_answers(table, report)
    table.add_section()
    _add_times(table, report)
    table.add_section()
    _add_tiers(table, report)
    table.add_section()
    _add_moves(table, report.stats)
    return table


def _add_answers(table: Table, report: Report) -> None:
    same = "[green]yes[/green]" if report.same_tokens else f"[red]no, from new token {report.first_difference}[/red]"
    table.add_row("same tokens", same, "")
    table.add_row("max |Δlogit| / max |logit|", f"{report.logit_difference:.1e}", "")
    fell_back = report.attention == "blocks" and report.stats.mode == "gather"
    table.add_row("attention", report.stats.mode + (" (why: see below)" if fell_back else ""), "SDPA")
    table.add_row(
        "prompt + new tokens",
        f"{report.prompt_tokens:,} + {report.tiered.new_tokens}",
        f"{report.prompt_tokens:,} + {report.dynamic.new_tokens}",
    )


def _add_times(table: Table, report: Report) -> None:
    ours, theirs = report.tiered, report.dynamic
    for name, unit, digits, field in (
        ("to first token", " s", 1, "seconds_to_first_token"),
        ("first decode step", " s", 2, "first_step_seconds"),
        ("decode after it", " tokens/s", 2, "tokens_per_second"),
    ):
        table.add_row(name, *(f"{getattr(side, field):.{digits}f}{unit}" for side in (ours, theirs)))
    stats = report.stats
    table.add_row("waited for blocks, prefill", f"{stats.prefill.stall_seconds:.2f} s", "")
    table.add_row("waited for blocks, decode", f"{stats.decode.stall_seconds:.2f} s", "")


def _add_tiers(table: Table, report: Report) -> None:
    stats = report.stats
    sizes = (format_bytes(report.tiered.device_kv_bytes), format_bytes(report.dynamic.device_kv_bytes))
    table.add_row("K and V on device, peak", *sizes)
    for name, tier in (("hot", stats.hot), ("packed", stats.packed), ("warm", stats.warm), ("cold", stats.cold)):
        if tier is stats.packed and not tier.budget_bytes:
            continue  # nobody asked for it
        table.add_row(f"{name}, peak of budget", _tier(tier), "")
    if stats.gather_peak_bytes:
        table.add_row("gathered for one layer", format_bytes(stats.gather_peak_bytes), "")
    if stats.other_layers_bytes:
        table.add_row("layers that are not tiered", format_bytes(stats.other_layers_bytes), "")


def _tier(tier: TierStats) -> str:
    if tier.budget_bytes == 0:
        return "no such tier"
    budget = "no cap" if tier.budget_bytes is None else format_bytes(tier.budget_bytes)
    return f"{format_bytes(tier.peak_bytes)} of {budget}, {tier.peak_blocks:,} blocks"


def _add_moves(table: Table, stats: CacheStats) -> None:
    hits = (stats.hot.hits + stats.packed.hits, stats.warm.hits, stats.cold.hits)
    table.add_row("reads from device, warm, cold", ", ".join(f"{count:,}" for count in hits), "")
    for name, move in sorted(stats.moves.items()):
        direction = name.replace("_to_", " → ")
        size = f"{move.blocks:,.0f} blocks, {format_bytes(move.bytes)}"
        table.add_row(direction, f"{size}, {move.seconds:.1f} s", "")
    table.add_row("verified, layer by layer", f"{stats.verified_blocks:,} blocks", "")
    failures = f"{stats.checksum_failures} ({stats.retries} reads made again)"
    table.add_row("checksum failures", failures, "")
    if stats.tier_failures:
        table.add_row("failures of lower tiers", f"[yellow]{stats.tier_failures}[/yellow]", "")
