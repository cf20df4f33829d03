"""Charts as data, and how they are drawn: matplotlib without a display, where it is installed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from tieredkv.loadtest.plots import empty_figure, name_axes

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


def draw(chart: Chart, path: Path) -> None:
    """Write a chart as PNG."""
    from matplotlib.ticker import FuncFormatter

    figure = empty_figure()
    x_label = chart.x_label if not chart.note else f"{chart.x_label}\n\n{chart.note}"
    axes = name_axes(figure.add_subplot(), chart.title, x_label, chart.y_label)
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
    axes.legend(fontsize=8)
    figure.savefig(path, metadata={"Software": None})
