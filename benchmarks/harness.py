"""The one harness: interleaved rounds, medians and percentiles, the environment, JSON, Markdown and plots.

Contestants take turns within a round, so that a machine that slows down slows all of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks import plots
from benchmarks.plots import Chart
from tieredkv.loadtest.markdown import number
from tieredkv.loadtest.plots import can_draw

RESULTS = Path(__file__).parent / "results"


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one contestant over all rounds."""

    median_seconds: float
    p90_seconds: float
    p99_seconds: float
    rounds: int


@dataclasses.dataclass(frozen=True)
class Row:
    """One measured figure.

    Args:
        measure: what was measured.
        value: the number.
        unit: of the number.
        must: what it must reach, as text, or "".
        reached: whether it does, or None where nothing is asked.
        detail: the timings and sizes behind it.
    """

    measure: str
    value: float
    unit: str
    must: str = ""
    reached: bool | None = None
    detail: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def interleave(
    contestants: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warmup: int = 2,
    inner: int = 1,
    around: Mapping[str, Callable[[], AbstractContextManager[object]]] | None = None,
) -> dict[str, Timing]:
    """Time each contestant `inner` times in each round, after a warm-up of its own.

    Args:
        contestants: what is timed, by name.
        rounds, warmup, inner: how often.
        around: by name, what is entered before each timed run and left after it, without being timed.
    """
    prepared = around or {}
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for run in contestants.values():
        for _ in range(warmup):
            run()
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, run in contestants.items():
                for _ in range(inner):
                    with prepared.get(name, nullcontext)():
                        started = time.perf_counter()
                        run()
                        seconds[name].append(time.perf_counter() - started)
    finally:
        gc.enable()
    return {name: timing(values) for name, values in seconds.items()}


def timing(seconds: Sequence[float]) -> Timing:
    """Median and percentiles of some seconds."""
    ordered = sorted(seconds)

    def percentile(share: float) -> float:
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)]

    return Timing(statistics.median(ordered), percentile(0.9), percentile(0.99), len(ordered))


def plain(times: Mapping[str, Timing]) -> dict[str, Any]:
    """Timings as a row's detail has them."""
    return {name: dataclasses.asdict(each) for name, each in times.items()}


def difference(got: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest between two tensors of one shape, as a share of the largest exact value."""
    return float((got - exact).abs().max() / exact.abs().max())


def read_bandwidth(seconds: float = 1.0) -> float:
    """Bytes a second that all cores read from memory, the best of several sums over 512 MiB."""
    buffer = torch.ones(2**27)
    best, stop = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < stop:
        started = time.perf_counter()
        buffer.sum()
        best = max(best, buffer.nbytes / (time.perf_counter() - started))
    return best


def environment() -> dict[str, Any]:
    """What the figures depend on and a reader cannot see."""
    cpu = next(
        (line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor(),
    )
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "load": os.getloadavg(),
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def hardware_name() -> str:
    """A short name of the machine for file names."""
    if torch.cuda.is_available():
        return "".join(c for c in torch.cuda.get_device_name().lower().replace(" ", "-") if c.isalnum() or c == "-")
    return f"cpu{os.cpu_count()}"


def write(question: str, rows: Sequence[Row], folder: Path = RESULTS, charts: Sequence[Chart] = ()) -> Path:
    """Write <question>_<hardware>_<date>.json and .md, a PNG for each chart, and return the Markdown's path.

    Without matplotlib the charts are in the JSON alone: `python -m benchmarks.pages` draws them later.
    """
    env = environment()
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"{question}_{hardware_name()}_{env['date']}"
    record = {
        "question": question,
        "environment": env,
        "rows": [dataclasses.asdict(row) for row in rows],
        "charts": [dataclasses.asdict(chart) for chart in charts],
    }
    stem.with_suffix(".json").write_text(json.dumps(record, indent=2, default=str) + "\n")
    lines = [f"# {question}", "", ", ".join(f"{name} {value}" for name, value in env.items()), "", *table(rows)]
    for chart in charts:
        if can_draw():
            picture = stem.with_name(f"{stem.name}_{chart.name}.png")
            plots.draw(chart, picture)
            lines += ["", f"![{chart.title}]({picture.name})"]
    stem.with_suffix(".md").write_text("\n".join(lines) + "\n")
    return stem.with_suffix(".md")


def table(rows: Sequence[Row]) -> list[str]:
    """Lines of a Markdown table."""
    lines = ["| measure | value | must reach | reached |", "|---|---|---|---|"]
    for row in rows:
        reached = {True: "yes", False: "**no**", None: ""}[row.reached]
        lines.append(f"| {row.measure} | {number(row.value)} {row.unit} | {row.must} | {reached} |")
    return lines


def answer(question: str, description: str | None, figures: Callable[[bool], tuple[list[Row], list[Chart]]]) -> None:
    """The command line of a question: measure, print, write.

    Args:
        question: its name.
        description: for --help.
        figures: (quick) -> rows and charts.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="small sizes, for checking that it runs; writes nothing")
    quick = parser.parse_args().quick
    started = time.perf_counter()
    with torch.no_grad():
        rows, charts = figures(quick)
    conclude(question, rows, charts, started=started, keep=not quick)


def conclude(question: str, rows: Sequence[Row], charts: Sequence[Chart] = (), *, started: float, keep: bool) -> None:
    """Print what was measured since `started` (of `time.perf_counter`), and write it if it is to be kept."""
    for row in rows:
        print(f"{row.measure}: {number(row.value)} {row.unit} (must {row.must or '-'}; reached: {row.reached})")
    if keep:
        print(write(question, rows, charts=charts), f"{time.perf_counter() - started:.0f} s")
