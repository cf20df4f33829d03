"""Writes a report into a folder: JSON, Markdown, and pictures where matplotlib is installed.

Imports: errors, compare, markdown, plots, report.
"""

from __future__ import annotations

import json
from pathlib import Path

from tieredkv.errors import ConfigError
from tieredkv.loadtest import plots
from tieredkv.loadtest.compare import Comparison
from tieredkv.loadtest.markdown import markdown
from tieredkv.loadtest.report import Report

JSON, MARKDOWN = "report.json", "report.md"


def make_folder(folder: Path) -> None:
    """Make the folder of a report, before the load is sent.

    Raises:
        ConfigError: it cannot be made, or not be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / JSON).touch()
    except OSError as error:
        raise ConfigError(
            "A report cannot be written there.", wanted="a folder", got=str(error), change="pass another --out"
        ) from error


def write(report: Report, folder: Path, comparison: Comparison | None = None) -> list[Path]:
    """Write everything into a folder that exists; returns the files."""
    pictures = plots.draw(report, folder) if plots.can_draw() else []
    (folder / JSON).write_text(json.dumps(report.as_json(), indent=2) + "\n", encoding="utf-8")
    text = markdown(report, comparison, pictures)
    if not plots.can_draw():
        text += "\nNo pictures: matplotlib is not installed (pip install 'tieredkv[plots]').\n"
    (folder / MARKDOWN).write_text(text, encoding="utf-8")
    return [folder / name for name in (JSON, MARKDOWN, *pictures)]
