"""How every command speaks to its user: errors in their parts, with an exit code and without a traceback.

Imports: errors; typer and rich.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import typer
from rich.console import Console
from rich.markup import escape

from tieredkv.errors import TieredKVError

REFUSED = 2
INTERRUPTED = 130
"""Exit codes; the second is the one that a shell gives a process that SIGINT ended."""


def terminal(*, stderr: bool = False) -> Console:
    """A console that leaves `:names:` in a path as they are. It reads markup: escape every text that is not ours."""
    return Console(stderr=stderr, emoji=False)


@contextlib.contextmanager
def errors_told(stopped: str = "stopped") -> Iterator[None]:
    """Tell typed errors on stderr and leave with exit code 2, and after an interrupt with 130.

    Args:
        stopped: what is said after an interrupt.

    Raises:
        typer.Exit: in place of both.
    """
    try:
        yield
    except TieredKVError as error:
        show_error(error, terminal(stderr=True))
        raise typer.Exit(REFUSED) from error
    except KeyboardInterrupt as stop:
        terminal(stderr=True).print(f"\n{stopped}", markup=False, highlight=False)
        raise typer.Exit(INTERRUPTED) from stop


def show_error(error: TieredKVError, console: Console) -> None:
    """Print what happened, and below it what was wanted, what was got and what to change."""
    console.print(f"[red]error[/red] {escape(error.what)}", highlight=False, soft_wrap=True)
    for name, value in (("wanted", error.wanted), ("got", error.got), ("to change", error.change)):
        console.print(f"  {name}: {value}", markup=False, highlight=False, soft_wrap=True)
