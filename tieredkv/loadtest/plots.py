"""Pictures of a report, where matplotlib is installed.

Imports: report; matplotlib, inside functions.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tieredkv.loadtest.report import Report

MIB = 2**20


def can_draw() -> bool:
    """Whether matplotlib is installed: `pip install "tieredkv[plots]"`."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(report: Report, folder: Path) -> list[str]:
    """Write the pictures for which there is something to show; returns their names."""
    pictures: dict[str, tuple[bool, Callable[[Report, Any], None]]] = {
        "over_time.png": (bool(report.throughput), _over_time),
        "lengths.png": (report.whole.answered > 0, _lengths),
        "latency.png": (report.whole.first_token_seconds.count > 0, _latency),
        "parts.png": (len(report.parts) > 1, _parts),
        "memory.png": (bool(report.server.kv_bytes or report.server.device_bytes), _memory),
    }
    names = [name for name, (there, _) in pictures.items() if there]
    for name in names:
        figure = empty_figure()
        pictures[name][1](report, figure)
        figure.savefig(folder / name, metadata={"Software": None})
    return names


def empty_figure() -> Any:
    """A figure that needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.8), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def name_axes(place: Any, title: str, x_label: str, y_label: str) -> Any:
    """The axes with their names, and lines to read values by."""
    place.set_title(title, fontsize=11, loc="left")
    place.set_xlabel(x_label, fontsize=9)
    place.set_ylabel(y_label, fontsize=9)
    place.grid(alpha=0.3)
    return place


def _line(axes: Any, points: Sequence[tuple[float, float]], label: str, **style: Any) -> None:
    axes.plot([x for x, _ in points], [y for _, y in points], label=label, **style)


def _over_time(report: Report, figure: Any) -> None:
    above, below = figure.subplots(2, 1, sharex=True)
    name_axes(above, "Requests at once", "", "requests")
    _line(above, report.concurrency, "requests", drawstyle="steps-post")
    name_axes(below, "Pieces of answers", "seconds", "a second")
    _line(below, report.throughput, "pieces")
    for axes in (above, below):
        axes.set_ylim(bottom=0)


def _lengths(report: Report, figure: Any) -> None:
    whole = [request for request in report.requests if request["error"] is None]
    for axes, name in zip(figure.subplots(1, 2), ("prompt", "answer"), strict=True):
        name_axes(axes, f"Tokens of {name}s", "tokens", "requests")
        axes.hist([request[f"{name}_tokens"] for request in whole if request[f"{name}_tokens"] is not None], bins=30)


def _latency(report: Report, figure: Any) -> None:
    first = sorted(r["first_token_seconds"] for r in report.requests if r["first_token_seconds"] is not None)
    left, right = figure.subplots(1, 2)
    name_axes(left, "Time to first token", "seconds", "share of requests")
    _line(left, [(value, (index + 1) / len(first)) for index, value in enumerate(first)], "first token")
    name_axes(right, "Percentiles", "", "seconds")
    for name, spread in (
        ("first token", report.whole.first_token_seconds),
        ("between tokens", report.whole.between_tokens_seconds),
    ):
        if spread.count:
            right.plot(["p50", "p90", "p99"], [spread.p50, spread.p90, spread.p99], marker="o", label=name)
    right.set_yscale("log")
    right.legend(fontsize=8)


def _parts(report: Report, figure: Any) -> None:
    left, right = figure.subplots(1, 2)
    name_axes(left, "Throughput", "requests at once", "answer tokens/s")
    _line(left, [(p.concurrency or 0, p.answer_tokens_per_second) for p in report.parts], "tokens/s", marker="o")
    name_axes(right, "Time between tokens", "requests at once", "seconds")
    for name in ("p50", "p90", "p99"):
        values = [(p.concurrency or 0, getattr(p.between_tokens_seconds, name)) for p in report.parts]
        _line(right, [(at, value) for at, value in values if value is not None], name, marker="o")
    right.legend(fontsize=8)


def _memory(report: Report, figure: Any) -> None:
    axes = name_axes(figure.subplots(), "Memory of the server", "seconds", "MiB")
    for name, points in (
        ("keys and values", report.server.kv_bytes),
        ("on the device, most so far", report.server.device_bytes),
    ):
        if points:
            _line(axes, [(at, value / MIB) for at, value in points], name)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
