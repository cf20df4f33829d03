"""Reports as files: JSON, Markdown, pictures, and beside an older one."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path

import pytest
from loadtest.fake_server import Answer, FakeServer
from loadtest.test_run import page

from tieredkv.errors import ConfigError
from tieredkv.loadtest import LoadSettings, Report, compare, plots, run
from tieredkv.loadtest.figures import Figures, Spread
from tieredkv.loadtest.markdown import markdown
from tieredkv.loadtest.report import read_report
from tieredkv.loadtest.write import JSON, MARKDOWN, make_folder, write


@pytest.fixture(scope="module")
def report() -> Report:
    """Of a ramp, with a failure and a page of metrics."""

    async def go() -> Report:
        server = FakeServer(
            lambda number, seen: Answer(status=500) if number == 7 else Answer(), metrics=(page(1000, 5_000_000),)
        )
        async with server:
            settings = LoadSettings(server.url, ramp=True, concurrency=2, requests=8, api_key="a-secret-key")
            return await run(settings)

    return asyncio.run(go())


def test_a_report_is_written_and_read_again(report: Report, tmp_path: Path) -> None:
    make_folder(tmp_path / "a" / "b")
    files = write(report, tmp_path / "a" / "b")
    assert {JSON, MARKDOWN} <= {file.name for file in files} and all(file.stat().st_size for file in files)
    read = read_report(tmp_path / "a" / "b" / JSON)
    assert read == json.loads(json.dumps(report.as_json()))
    assert read["whole"]["errors"] == {"http 500": 1} and len(read["requests"]) == 8
    for file in files:
        assert b"a-secret-key" not in file.read_bytes()


def test_pictures_are_drawn(report: Report, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need tieredkv[plots]")
    names = plots.draw(report, tmp_path)
    assert set(names) == {"over_time.png", "lengths.png", "latency.png", "parts.png", "memory.png"}
    for name in names:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
        assert f"]({name})" in markdown(report, None, names)
    bare = dataclasses.replace(report, parts=report.parts[:1], server=type(report.server)())
    (tmp_path / "bare").mkdir()
    assert set(plots.draw(bare, tmp_path / "bare")) == {"over_time.png", "lengths.png", "latency.png"}


def test_without_matplotlib_the_rest_is_written(
    report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots, "can_draw", lambda: False)
    assert [file.name for file in write(report, tmp_path)] == [JSON, MARKDOWN]
    assert "matplotlib is not installed" in (tmp_path / MARKDOWN).read_text()


def test_markdown_names_failures_parts_and_memory(report: Report) -> None:
    text = markdown(report)
    assert "7 of 8 requests answered" in text and "| http 500 | 1 |" in text
    parts = text.split("## Parts")[1].splitlines()
    assert [line.split(" | ")[:2] for line in parts if line.startswith(("| 1 ", "| 2 "))] == [
        ["| 1", "4"],
        ["| 2", "4"],
    ]
    assert "Server, keys and values: 0.000977 MiB at the peak" in text


def test_a_comparison_has_ratios_and_says_what_differs(report: Report) -> None:
    old = json.loads(json.dumps(report.as_json()))
    old["whole"]["answer_tokens_per_second"] = report.whole.answer_tokens_per_second / 2
    old["whole"]["errors"] = {}
    del old["whole"]["between_tokens_seconds"]
    found = compare(old, report)
    changes = {change.measure: change for change in found.changes}
    assert changes["answer tokens/s"].ratio == pytest.approx(2)
    assert changes["answered requests/s"].ratio == 1
    assert (changes["failures"].old, changes["failures"].new, changes["failures"].ratio) == (0, 1, None)
    assert changes["between tokens, p99, s"].old is None and changes["between tokens, p99, s"].ratio is None
    assert changes["KV bytes at their peak"].ratio == 1
    assert not found.differences
    other = compare(old | {"load": "another", "model": "b"}, report)
    assert [each.split(":")[0] for each in other.differences] == ["model", "load"]
    text = markdown(report, other)
    assert "Not the same load: model: b then" in text and "| failures | 0 | 1 |  |" in text


@pytest.mark.parametrize("text", ["", "[]", "{", '{"kind": "another"}'])
def test_what_is_no_report_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigError, match="no report"):
        read_report(tmp_path / "x.json")
    with pytest.raises(ConfigError):
        read_report(tmp_path / "absent.json")


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--out"):
        make_folder(tmp_path / "file" / "below")


def test_percentiles_are_values() -> None:
    spread = Spread.of(range(1, 101))
    assert (spread.least, spread.p50, spread.p90, spread.p99, spread.most) == (1, 51, 91, 100, 100)
    assert Spread.of([]) == Spread() and Spread.of([3.0]).p99 == 3.0


def test_every_figure_is_described() -> None:
    described = " ".join((Figures.__doc__ or "").split())
    assert all(field.name in described for field in dataclasses.fields(Figures))
