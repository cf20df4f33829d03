"""The command line: `tieredkv demo`, the main job on a real model, and `tieredkv plan`, what a context needs.

Imports: errors and this package; typer.
"""

from __future__ import annotations

from typing import Annotated

import typer

from tieredkv import __version__
from tieredkv.cli.demo import demo as _demo
from tieredkv.cli.plan import plan as _plan

__all__ = ["app", "main"]

app = typer.Typer(
    help="A KV cache for transformers in three tiers: device memory, host memory, disk.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("demo")(_demo)
app.command("plan")(_plan)


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
