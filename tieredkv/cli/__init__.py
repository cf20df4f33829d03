"""The command line: `tieredkv demo`, the main job on a real model; `tieredkv plan`, what a context needs;
`tieredkv replay`, what a prefix store would have saved; `tieredkv doctor`, what limits a run or departs from stock;
`tieredkv serve`, an OpenAI-compatible endpoint; `tieredkv stress`, a load test of one;
and `tieredkv ls`, `verify` and `prune`, what was published into a directory.

Imports: errors and this package; typer.
"""

from __future__ import annotations

from typing import Annotated

import typer

from tieredkv import __version__
from tieredkv.cli.demo import demo as _demo
from tieredkv.cli.doctor import doctor as _doctor
from tieredkv.cli.files import ls as _ls
from tieredkv.cli.files import prune as _prune
from tieredkv.cli.files import verify as _verify
from tieredkv.cli.plan import plan as _plan
from tieredkv.cli.replay import replay_command as _replay
from tieredkv.cli.serve import serve as _serve
from tieredkv.cli.stress import stress as _stress

__all__ = ["app", "main"]

app = typer.Typer(
    help="A KV cache for transformers in three tiers: device memory, host memory, disk.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("demo")(_demo)
app.command("plan")(_plan)
app.command("replay")(_replay)
app.command("doctor")(_doctor)
app.command("serve")(_serve)
app.command("stress")(_stress)
app.command("ls")(_ls)
app.command("verify")(_verify)
app.command("prune")(_prune)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tieredkv {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


def main() -> None:
    """The console script; leaves with the exit code of the command."""
    app(prog_name="tieredkv")
