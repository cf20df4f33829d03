"""`tieredkv doctor`: advice from saved figures, and the bisection, which must name what was broken on purpose."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from support import feed, small, tiny, tokens
from typer.testing import CliRunner

from tieredkv.advice import explain
from tieredkv.attention import engine
from tieredkv.cli import app
from tieredkv.cli import doctor as command
from tieredkv.cli.bisect import bisect
from tieredkv.cli.model import Loaded
from tieredkv.cli.prompt import Prompt
from tieredkv.errors import ConfigError
from tieredkv.tiers import ColdTier, WarmTier

BLOCK = 16


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *arguments], env={"COLUMNS": "200"})


@pytest.fixture
def report(cold_dir: Path, tmp_path: Path) -> Path:
    """Saved statistics of a small gathering run."""
    model = tiny()
    with small(model.config, cold_dir) as cache:
        feed(model, tokens(100), cache, [80])
        file = tmp_path / "stats.json"
        stats = cache.stats()
        file.write_text(stats.to_json(), encoding="utf-8")
        assert command.read_stats(file) == stats
    return file


def test_saved_figures_give_the_advice_of_the_run(report: Path) -> None:
    result = run(str(report))
    assert result.exit_code == 0
    for finding in explain(command.read_stats(report)):
        assert finding.text in result.output
    assert "limit gather" in result.output and "to change: TieredCache(model)" in result.output


def test_the_demos_report_is_read_too(report: Path, tmp_path: Path) -> None:
    nested = tmp_path / "demo.json"
    nested.write_text(json.dumps({"model": "m", "stats": json.loads(report.read_text())}), encoding="utf-8")
    assert run(str(nested)).output == run(str(report)).output


def test_figures_of_another_version_are_read(report: Path, tmp_path: Path) -> None:
    saved = json.loads(report.read_text())
    del saved["unused_bytes"], saved["decode"]["step_seconds"]
    saved["later"] = saved["hot"]["later"] = 1
    other = tmp_path / "other.json"
    other.write_text(json.dumps(saved), encoding="utf-8")
    assert run(str(other)).exit_code == 0


def test_json_is_the_findings(report: Path) -> None:
    found = json.loads(run(str(report), "--json").output)
    assert found == [dataclasses.asdict(finding) for finding in explain(command.read_stats(report))]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"stats": 3}', '{"hot": {}}'])
def test_what_is_no_report_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(text, encoding="utf-8")
    result = run(str(tmp_path / "file"))
    assert result.exit_code == 2
    assert isinstance(result.exception, SystemExit)


def test_nothing_to_look_at_is_refused() -> None:
    assert run().exit_code == 2
    assert run("/nowhere/file.json").exit_code == 2


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--bisect"], "--bisect"),
        (["--bisect", "--model", "m"], "--bisect"),
        (["--model", "m"], "--model"),
        (["--prompt-tokens", "1024"], "--prompt-tokens"),  # as without it, and yet of no use
        (["--codec", "raw", "--device", "cpu"], "--codec, --device"),
    ],
)
def test_what_would_have_no_effect_is_refused(report: Path, options: list[str], named: str) -> None:
    result = run(str(report), *options)
    assert result.exit_code == 2 and result.stdout == ""
    (got,) = (line for line in result.stderr.splitlines() if line.startswith("  got: "))
    assert got == (f"  got: {report} and --bisect" if "--bisect" in options else f"  got: {named}")


# ---- bisect


def broken_write(monkeypatch: pytest.MonkeyPatch, tier: type, layer: int) -> None:
    """What a tier stores of one layer is wrong, and nobody compares checksums."""
    write = tier.write

    def wrong(self: Any, at: int, slots: Any, planes: Any) -> None:
        write(self, at, slots, tuple(p + 1 if at == layer else p for p in planes))

    monkeypatch.setattr(tier, "write", wrong)
    monkeypatch.setattr("tieredkv.verified.VerifiedReads.compare", lambda *_: [])


def test_a_sound_cache_departs_nowhere_but_in_a_lossy_codec(cold_dir: Path) -> None:
    stages = bisect(tiny(), tokens(260), 6, "int4", cold_dir)
    assert [stage.name for stage in stages] == ["hot only", "+ warm", "+ cold", "+ int4"]
    assert [stage.departs for stage in stages] == [False, False, False, True]
    assert [stage.lossless for stage in stages] == [True, True, True, False]
    reads = [tuple(count > 0 for count in stage.blocks) for stage in stages]
    assert reads == [(True, False, False), (True, True, False), (True, True, True), (True, True, True)]
    assert stages[-1].layer == 0


@pytest.mark.parametrize(("tier", "name"), [(WarmTier, "+ warm"), (ColdTier, "+ cold")])
def test_a_broken_tier_is_named_with_layer_and_block(
    tier: type, name: str, cold_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken_write(monkeypatch, tier, layer=1)
    last = bisect(tiny(), tokens(260), 6, "int8", cold_dir)[-1]
    assert (last.name, last.departs, last.layer) == (name, True, 1)
    assert last.block is not None and last.where == f"layer 1, block {last.block}"


def test_broken_attention_is_found_hot_already(cold_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "merge", lambda *a, merge=engine.merge, **k: merge(*a, **k) * 1.5)
    (stage,) = bisect(tiny(), tokens(260), 6, "int8", cold_dir)
    assert (stage.name, stage.departs, stage.layer, stage.block) == ("hot only", True, 1, 0)


def test_an_error_is_a_departure(cold_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = ColdTier.read

    def flipped(self: Any, layer: int, slots: Any, out: Any, **options: Any) -> None:
        read(self, layer, slots, out, **options)
        out[0].add_(1)

    monkeypatch.setattr(ColdTier, "read", flipped)
    last = bisect(tiny(), tokens(260), 6, "int8", cold_dir)[-1]
    assert (last.name, last.difference, last.layer) == ("+ cold", None, 0)
    assert "checksum" in last.where


def test_a_text_that_fills_no_tier_is_refused(cold_dir: Path) -> None:
    with pytest.raises(ConfigError, match="too short"):
        bisect(tiny(), tokens(20), 6, "int8", cold_dir)


@pytest.mark.parametrize("is_broken", [False, True])
def test_the_command_bisects(is_broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "load", lambda *_: Loaded(tiny(), None, "tiny"))
    monkeypatch.setattr(command, "build", lambda *_: Prompt(tokens(260), "text", "?"))
    if is_broken:
        broken_write(monkeypatch, WarmTier, layer=0)
    result = run("--bisect", "--new-tokens", "4")
    assert result.exit_code == int(is_broken), result.output
    if is_broken:
        assert "the first to depart is + warm: layer 0, block" in result.output
    else:
        assert "nothing departs that must not" in result.output
        stages = json.loads(run("--bisect", "--new-tokens", "4", "--json").output)
        assert [stage["departs"] for stage in stages[:3]] == [False] * 3
