"""`tieredkv plan`: what fits where, what a step costs, and how it was counted, as tables or as JSON.

Imports: config, sizing and this package's telling; typer and rich.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tieredkv import sizing
from tieredkv.cli.telling import errors_told, terminal
from tieredkv.config import parse_bytes
from tieredkv.sizing import Plan, Rates, format_bytes, format_seconds

_STYLES = {"hot": "green", "warm": "yellow", "cold": "cyan", "too large": "red"}
_GB = 10**9


@errors_told()
def plan(
    model_config: Annotated[
        str, typer.Argument(help="A model's folder, its config.json, or a hub id.", metavar="MODEL_CONFIG")
    ],
    context: Annotated[int, typer.Option(help="Tokens of each request, prompt and answer.")] = 32768,
    batch: Annotated[int, typer.Option(help="Requests at once.")] = 1,
    device_memory: Annotated[str, typer.Option(help="All memory of the device.")] = "24GiB",
    host_memory: Annotated[str, typer.Option(help="Host memory for the warm tier.")] = "64GiB",
    disk: Annotated[str, typer.Option(help="Disk for the cold tier; 0 for none.")] = "500GiB",
    dtype: Annotated[str | None, typer.Option(help="fp16, bf16 or fp32; the config's if not given.")] = None,
    codec: Annotated[str, typer.Option(help="How warm and cold store blocks: raw, fp8, int8 or int4.")] = "raw",
    block_size: Annotated[int, typer.Option(help="Tokens of a block.")] = sizing.DEFAULT_BLOCK_SIZE,
    pcie_gbps: Annotated[float, typer.Option(help="Host to device, in GB/s.")] = Rates().pcie_bytes_per_second / _GB,
    nvme_gbps: Annotated[float, typer.Option(help="Disk to host, in GB/s.")] = Rates().nvme_bytes_per_second / _GB,
    device_gbps: Annotated[float, typer.Option(help="Device memory, in GB/s.")] = Rates().device_bytes_per_second / _GB,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Predict what a model's KV cache needs: bytes per token, what fits hot, warm and cold, seconds per step.

    Exit code 0: it fits; 1: it does not fit in all tiers together; 2: it cannot be planned.
    """
    found = sizing.plan(
        model_config,
        context,
        batch,
        parse_bytes(device_memory),
        host_memory_bytes=parse_bytes(host_memory),
        disk_bytes=parse_bytes(disk),
        dtype=dtype,
        codec=codec,
        block_size=block_size,
        rates=Rates(pcie_gbps * _GB, nvme_gbps * _GB, device_gbps * _GB),
    )
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(found) | {"fits": found.fits}, indent=2))
    else:
        show_plan(found, terminal())
    if not found.fits:
        raise typer.Exit(1)


def show_plan(found: Plan, console: Console) -> None:
    """Print a plan for people."""
    console.print(
        f"[bold]{format_bytes(found.kv_bytes_per_token)} per token[/bold],"
        f" {format_bytes(found.spread.total_bytes)} for {found.batch} x {found.context_tokens:,} tokens"
        f" in {found.dtype}, blocks of {found.block_size}",
        highlight=False,
    )
    for line in found.layers:
        console.print(f"  {escape(line)}", highlight=False)
    if found.cross_kv_bytes_per_source_token:
        cross = format_bytes(found.cross_kv_bytes_per_source_token)
        console.print(f"  cross-attention: {cross} per source token, apart from all totals", highlight=False)
    console.print(_device_table(found), _codec_table(found), _tier_table(found), _context_table(found))
    _show_cost(found, console)
    for line in found.warnings:
        console.print(f"[yellow]warning[/yellow] {escape(line)}", highlight=False)
    if found.suggestion:
        console.print("\n[bold]suggestion[/bold]")
        # Printed as it stands, so that it can be copied: no wrapping, no markup.
        console.print(found.suggestion, markup=False, highlight=False, soft_wrap=True)
    console.print("\n[bold]how it was counted[/bold]")
    for line in found.how:
        console.print(f"  {escape(line)}", highlight=False)


def _show_cost(found: Plan, console: Console) -> None:
    cost = found.cost
    console.print(
        f"[bold]each step[/bold] (one token for each of {found.batch} requests): streams"
        f" {format_bytes(cost.streamed_bytes)}, transfer {format_seconds(cost.transfer_seconds)},"
        f" compute {format_seconds(cost.compute_seconds)}: [bold]{format_seconds(cost.seconds)} per token[/bold]",
        highlight=False,
    )


def _device_table(found: Plan) -> Table:
    table = Table("", "bytes", title=f"device: {format_bytes(found.device.device_bytes)}", title_justify="left")
    device = found.device
    parts = {
        "weights": device.weights_bytes,
        "activations": device.activations_bytes,
        "reserve": device.reserve_bytes,
        "left for keys and values": device.left_bytes,
    }
    for name, count in parts.items():
        table.add_row(name, format_bytes(count))
    return table


def _codec_table(found: Plan) -> Table:
    table = Table("codec", "per token", "of raw", title="below hot, scales included", title_justify="left")
    for name, count in found.kv_bytes_per_token_by_codec.items():
        share = count / found.kv_bytes_per_token if found.kv_bytes_per_token else 1.0
        table.add_row(name, format_bytes(count), f"{share:.1%}", style="bold" if name == found.codec else None)
    return table


def _tier_table(found: Plan) -> Table:
    table = Table("tier", "codec", "budget", "used", "blocks", "would hold tokens", title="tiers", title_justify="left")
    for tier in found.spread.tiers:
        table.add_row(
            tier.name,
            tier.codec,
            format_bytes(tier.budget_bytes),
            format_bytes(tier.used_bytes),
            f"{tier.used_blocks:,}",
            f"{tier.capacity_tokens:,}",
        )
    return table


def _context_table(found: Plan) -> Table:
    batches = sorted({cell.batch for cell in found.table})
    table = Table("context", *(f"{batch} at once" for batch in batches), title="what each needs", title_justify="left")
    for context in sorted({cell.context_tokens for cell in found.table}):
        cells = {cell.batch: cell for cell in found.table if cell.context_tokens == context}
        table.add_row(
            f"{context:,}",
            *(
                f"[{_STYLES[cells[batch].verdict]}]{cells[batch].verdict}[/] {format_bytes(cells[batch].kv_bytes)}"
                for batch in batches
            ),
        )
    return table
