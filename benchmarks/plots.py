"""Charts as data, and how they are drawn: matplotlib without a display, where it is installed."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

COLOURS = ("#1b6ca8", "#d1495b", "#66a182", "#edae49", "#6c4f9c", "#8d6b4b", "#3aa6b9", "#555555")
DASHES = ("-", "--", "-.", ":")


@dataclasses.dataclass(frozen=True)
class Chart:
    """Lines over one axis.

    Args:
        name: part of the file's name.
        title: what is shown.
        x_label, y_label: with units.
        series: for each line its points, (x, y) each.
        log_x, log_y: logarithmic axes, base 2 for x.
        note: how it was measured, drawn under the chart.
        marks: draw each point.
    """

    name: str
    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Sequence[tuple[float, float]]]
    log_x: bool = False
    log_y: bool = False
    note: str = ""
    marks: bool = True


def can_draw() -> bool:
    """Whether matplotlib is installed: `pip install tieredkv[plots]`."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(chart: Chart, path: Path) -> None:
    """Write a chart as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    figure = Figure(figsize=(8, 4.8), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for index, (name, points) in enumerate(chart.series.items()):
        xs, ys = [x for x, _ in points], [y for _, y in points]
        colour, dash = COLOURS[index % len(COLOURS)], DASHES[index // len(COLOURS) % len(DASHES)]
        axes.plot(xs, ys, dash, color=colour, marker="o" if chart.marks else None, markersize=4, label=name)
    if chart.log_x:
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({x for points in chart.series.values() for x, _ in points}))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 1024:g}K" if x >= 1024 else f"{x:g}"))
    if chart.log_y:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set_title(chart.title, fontsize=11, loc="left")
    axes.set_xlabel(chart.x_label if not chart.note else f"{chart.x_label}\n\n{chart.note}", fontsize=9)
    axes.set_ylabel(chart.y_label, fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, metadata={"Software": None})
