"""Results on disk, charts, and the pages made of them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks import harness, pages, plots
from benchmarks.harness import Row
from benchmarks.plots import Chart

ROWS = [
    Row("chat: sequences at once, blocks over x", 12.2, "x", ">= 4", True),
    Row("slow", 1234.5, "µs", "<= 60", False),
]
CHART = Chart("device", "Memory", "tokens", "GiB", {"a": [(1024.0, 1.0), (2048.0, 2.0)]}, log_x=True, note="measured")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Results of one question."""
    harness.write("memory", ROWS, tmp_path, [CHART])
    return tmp_path


def test_a_result_is_read_as_it_was_written(folder: Path) -> None:
    (result,) = pages.newest(folder)
    assert (result.question, result.rows) == ("memory", ROWS)
    assert result.charts[0].title == "Memory"
    assert [list(point) for point in result.charts[0].series["a"]] == [[1024.0, 1.0], [2048.0, 2.0]]


def test_the_newest_result_of_a_machine_wins(folder: Path) -> None:
    (path,) = folder.glob("*.json")
    old = json.loads(path.read_text()) | {"rows": []}
    path.with_name(f"{path.stem[:-10]}2020-01-01.json").write_text(json.dumps(old))
    (result,) = pages.newest(folder)
    assert result.rows == ROWS


def test_a_page_names_what_falls_short_and_what_is_missing(folder: Path) -> None:
    text = pages.page(pages.newest(folder))
    short = text.split("## What falls short")[1].split("##")[0]
    assert "| slow | 1,234 µs | <= 60 | **no** |" in short
    assert "12.2" not in short
    assert "`capacity`" in text.split("## Without results here")[1]
    assert "figures/memory_device.png" in text


def test_the_readme_changes_between_its_marks_only(folder: Path) -> None:
    before = f"above\n{pages.MARKS[0]}\nold\n{pages.MARKS[1]}\nbelow\n"
    after = pages.readme(before, pages.newest(folder))
    assert after.startswith(f"above\n{pages.MARKS[0]}\n")
    assert after.endswith(f"{pages.MARKS[1]}\nbelow\n")
    assert "old" not in after
    assert "docs/figures/memory_device.png" in after


def test_the_readme_has_its_marks() -> None:
    text = pages.README.read_text(encoding="utf-8")
    assert [text.count(mark) for mark in pages.MARKS] == [1, 1]


def test_a_chart_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="charts need tieredkv[plots]")
    plots.draw(CHART, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_contestants_take_turns() -> None:
    order: list[str] = []
    times = harness.interleave({n: lambda n=n: order.append(n) for n in "ab"}, rounds=3, warmup=0, inner=2)
    assert "".join(order) == "aabb" * 3
    assert times["a"].rounds == 6


def test_what_goes_around_a_run_is_not_timed_and_is_done_for_each() -> None:
    order: list[str] = []

    @contextmanager
    def around() -> Iterator[None]:
        order.append("(")
        time.sleep(0.02)
        yield
        order.append(")")

    runs = {n: lambda n=n: order.append(n) for n in "ab"}
    times = harness.interleave(runs, rounds=2, warmup=1, inner=2, around={"b": around})
    assert "".join(order) == "ab" + "aa(b)(b)" * 2
    assert times["b"].median_seconds < 0.02
