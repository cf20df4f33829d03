"""`tieredkv replay`: what share of prompts a prefix store would not have computed, for sizes and eviction policies.

Imports: errors, eviction and this package's telling; typer and rich.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tieredkv.cli.telling import errors_told, terminal
from tieredkv.errors import ConfigError
from tieredkv.eviction import DEFAULT_POLICY, POLICY_NAMES
from tieredkv.eviction.belady import optimal_hits
from tieredkv.eviction.replay import Replayed, distinct_blocks, replay
from tieredkv.eviction.traces import Request, read_trace

_POLICIES = f"One of {', '.join(POLICY_NAMES)}, several with commas between them, or all."
_HOT = "Room in hot: blocks, or % of the trace's different blocks; several with commas between them."
_COLD = "Room below hot, in the same units; one for all, or one for each of --hot."


@errors_told()
def replay_command(
    trace: Annotated[str, typer.Argument(help="A .jsonl trace with block ids (Mooncake's format).", metavar="TRACE")],
    policy: Annotated[str, typer.Option(help=_POLICIES)] = DEFAULT_POLICY,
    hot: Annotated[str, typer.Option(help=_HOT)] = "1%,2%,5%,20%",
    cold: Annotated[str, typer.Option(help=_COLD)] = "0",
    as_json: Annotated[bool, typer.Option("--json", help="Print the counts as JSON.")] = False,
) -> None:
    """Replay recorded requests on a prefix store: hit rates by policy and size, beside the optimum.

    A hit is a block of a prompt's longest stored prefix; the rate is of all prompt blocks. The optimum (Belady's) knows
    the future. Exit code 2: the trace or an option cannot be used.
    """
    requests = read_trace(trace)
    names = POLICY_NAMES if policy == "all" else tuple(name.strip() for name in policy.split(","))
    sizes = _sizes(hot, cold, distinct_blocks(requests))
    with Progress(console=terminal(stderr=True), transient=True) as progress:
        runs = [(name, size) for size in sizes for name in names]
        found = [
            replay(requests, name, hot_blocks=hot_blocks, cold_blocks=cold_blocks)
            for name, (hot_blocks, cold_blocks) in progress.track(runs, description="replaying")
        ]
    optimum = {size: optimal_hits(requests, sum(size)) for size in sizes}
    if as_json:
        typer.echo(json.dumps(_as_json(requests, found, optimum), indent=2))
    else:
        _show(requests, found, optimum, terminal())


def _sizes(hot: str, cold: str, distinct: int) -> list[tuple[int, int]]:
    """(hot blocks, cold blocks) of each column."""
    hots, colds = ([_blocks(part, distinct) for part in text.split(",")] for text in (hot, cold))
    if len(colds) == 1:
        colds *= len(hots)
    if len(colds) != len(hots):
        wanted, got = "one size, or as many as of --hot", f"{len(colds)} beside {len(hots)}"
        raise ConfigError("--cold does not match --hot.", wanted=wanted, got=got, change="pass one size for each")
    return list(dict.fromkeys(zip(hots, colds, strict=True)))


def _blocks(text: str, distinct: int) -> int:
    """Blocks of a size such as 5000 or 2%."""
    try:
        return int(distinct * float(text[:-1]) / 100) if text.strip().endswith("%") else int(text)
    except (ValueError, OverflowError) as error:
        change = "write for example --hot 2000 or --hot 1%,5%"
        raise ConfigError("Not a size.", wanted="blocks, or a percentage", got=repr(text), change=change) from error


def _as_json(
    requests: Sequence[Request], found: Sequence[Replayed], optimum: dict[tuple[int, int], int]
) -> dict[str, object]:
    return {
        "requests": len(requests),
        "distinct_blocks": distinct_blocks(requests),
        "replays": [
            dataclasses.asdict(one)
            | {"hit_rate": one.hit_rate, "optimal_hits": optimum[one.hot_blocks, one.cold_blocks]}
            for one in found
        ],
    }


def _show(
    requests: Sequence[Request], found: Sequence[Replayed], optimum: dict[tuple[int, int], int], console: Console
) -> None:
    prompt_blocks, distinct = found[0].prompt_blocks, distinct_blocks(requests)
    table = Table("policy", title="prompt blocks found in the store", title_justify="left")
    for hot_blocks, cold_blocks in optimum:
        below = f"\n+ {cold_blocks:,} cold" if cold_blocks else ""
        table.add_column(f"{hot_blocks:,} blocks ({hot_blocks / distinct:.2%}){below}", justify="right")
    rows: dict[str, list[str]] = {}
    for one in found:
        cell = f"{one.hit_rate:.1%}"
        if one.cold_blocks:
            cell += f" (hot {one.hot_hits / one.prompt_blocks:.1%})"
        rows.setdefault(one.policy, []).append(cell)
    for name, cells in rows.items():
        table.add_row(name, *cells, style="bold" if name == DEFAULT_POLICY else None)
    table.add_section()
    table.add_row("optimum", *(f"{hits / prompt_blocks:.1%}" for hits in optimum.values()))
    console.print(
        f"[bold]{len(requests):,} requests, {prompt_blocks:,} prompt blocks[/bold], {distinct:,} different ones:"
        f" at most {1 - distinct / prompt_blocks:.1%} can be found",
        highlight=False,
    )
    console.print(table)
