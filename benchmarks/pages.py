"""Writes docs/benchmarks.md, and the README's figures, from the newest results: python -m benchmarks.pages

Of each question the newest JSON of each machine is taken. A question without results is named as such.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness, plots
from benchmarks.harness import RESULTS, Row
from benchmarks.plots import Chart
from tieredkv.loadtest.plots import can_draw

ROOT = Path(__file__).parents[1]
PAGE, PICTURES, README = ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "figures", ROOT / "README.md"
MARKS = "<!-- figures: written by python -m benchmarks.pages -->", "<!-- end of figures -->"

TITLES = {
    "memory": "Memory against context",
    "capacity": "Sequences in one budget",
    "serving": "Many requests at once",
    "windows": "How much must stay hot",
    "decode": "Decode and prefill against DynamicCache",
    "transfer": "Moving blocks",
    "codecs": "What a codec costs",
    "quality": "Recall and error through a codec",
    "quality_long": "Error through a codec up to 32K",
    "prefix": "Prefix reuse",
    "replay": "Eviction on recorded traces",
    "block_size": "The size of a block",
}
"""In the order of the page; questions that are not here come last."""

README_ROWS = (
    ("memory", r"device memory of DynamicCache over ours, .*rest warm, "),
    ("capacity", r"chat: sequences at once, blocks over"),
    ("decode", r"decode step at 8192, (fp32|bf16), everything hot"),
    ("decode", r"slowdown at 8192 tokens, window 1024"),
    ("decode", r"streamed from (warm|cold), window 512,"),
    ("decode", r"prefill of 4K"),
    ("codecs", r"int8: perplexity change"),
    ("serving", r"16 requests, prompts of 64 to 1,000 tokens, 32 new: tokens/s over"),
    ("serving", r"sequences at once on equal KV bytes"),
)
"""(question, pattern of its measures): what the README shows."""
README_PICTURE = "memory_device"


@dataclasses.dataclass(frozen=True)
class Result:
    """One JSON of the results."""

    question: str
    environment: Mapping[str, Any]
    rows: Sequence[Row]
    charts: Sequence[Chart]

    @classmethod
    def read(cls, path: Path) -> Result:
        """The result in a file."""
        record = json.loads(path.read_text(encoding="utf-8"))
        charts = [Chart(**chart) for chart in record.get("charts", ())]
        return cls(record["question"], record["environment"], [Row(**row) for row in record["rows"]], charts)

    @property
    def machine(self) -> str:
        """Where and when, in a line."""
        env = self.environment
        where = env["gpu"] or f"{env['cpu']}, {env['threads']} threads"
        load = float(env["load"][0])
        busy = f"; load {load:.1f} at the end" if load > float(env["cores"] or 1) + 0.5 else ""
        return f"{env['date']}, {where}, torch {env['torch']}, transformers {env['transformers']}{busy}"


def newest(folder: Path) -> list[Result]:
    """Of each question and machine the newest result, in the order of the page."""
    latest: dict[str, Path] = {}
    for path in sorted(folder.glob("*.json"), key=lambda path: path.stem[-10:]):
        latest[path.stem[:-11]] = path  # without the date
    order = list(TITLES)
    found = [Result.read(path) for path in latest.values()]
    return sorted(found, key=lambda r: (order.index(r.question) if r.question in order else len(order), r.machine))


def page(results: Iterable[Result]) -> str:
    """docs/benchmarks.md."""
    results = list(results)
    missed = [row for result in results for row in result.rows if row.reached is False]
    lines = [
        "# Benchmarks",
        "",
        "Written by `make bench` from `benchmarks/results/`: each section is one file of `benchmarks/`, run by",
        "`python -m benchmarks.<name>`. Contestants take turns in interleaved rounds, and figures are medians; the",
        "JSON of each result has the 90th and 99th percentiles. What was not reached is in bold.",
    ]
    if missed:
        lines += ["", "## What falls short", "", *harness.table(missed)]
    for result in results:
        title = TITLES.get(result.question, result.question)
        where = " (GPU)" if result.environment["gpu"] else ""
        lines += ["", f"## {title}{where}", "", f"`python -m benchmarks.{result.question}` · {result.machine}"]
        for chart in result.charts:
            lines += ["", f"![{chart.title}](figures/{result.question}_{chart.name}.png)"]
        lines += ["", *harness.table(result.rows)]
    absent = [name for name in TITLES if name not in {result.question for result in results}]
    if absent:
        lines += ["", "## Without results here", "", ", ".join(f"`{name}`" for name in absent) + "."]
    return "\n".join(lines) + "\n"


def readme(text: str, results: Iterable[Result]) -> str:
    """The README with its figures written anew between the marks."""
    lines = [MARKS[0], ""]
    results = list(results)
    for result in results:
        for chart in result.charts:
            if f"{result.question}_{chart.name}" == README_PICTURE:
                picture = f"docs/figures/{README_PICTURE}.png"
                lines += [f"![{chart.title}]({picture})", "", f"{chart.note[:1].upper()}{chart.note[1:]}.", ""]
    rows = [
        row
        for question, pattern in README_ROWS
        for result in results
        if result.question == question and not result.environment["gpu"]
        for row in result.rows
        if re.match(pattern, row.measure)
    ]
    lines += [*harness.table(rows), "", MARKS[1]]
    before, rest = text.split(MARKS[0])
    return before + "\n".join(lines) + rest.split(MARKS[1])[1]


def draw(results: Iterable[Result]) -> None:
    """Every chart, where matplotlib is installed."""
    if not can_draw():
        print("matplotlib is not installed: charts are left as they were")
        return
    PICTURES.mkdir(parents=True, exist_ok=True)
    for result in results:
        for chart in result.charts:
            plots.draw(chart, PICTURES / f"{result.question}_{chart.name}.png")


def main() -> None:
    """Write all three."""
    results = newest(RESULTS)
    draw(results)
    PAGE.write_text(page(results), encoding="utf-8")
    README.write_text(readme(README.read_text(encoding="utf-8"), results), encoding="utf-8")


if __name__ == "__main__":
    main()
