"""`tieredkv replay` as a user runs it: the table, JSON, sizes and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tieredkv.cli import app
from tieredkv.eviction import POLICY_NAMES


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Two conversations that take turns, 8 different blocks."""
    paths = [[0, 1, 2, 3], [4, 5, 6, 7]] * 3
    lines = [
        json.dumps({"timestamp": 1000 * i, "input_length": 2048, "output_length": 9, "hash_ids": path})
        for i, path in enumerate(paths)
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(lines))
    return str(file)


def run(*arguments: str, fails: bool = False) -> str:
    result = CliRunner().invoke(app, ["replay", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == (2 if fails else 0), result.output
    return result.output


def test_a_table_of_all_policies_beside_the_optimum(trace: str) -> None:
    output = run(trace, "--policy", "all", "--hot", "4,50%,100%", "--cold", "0,0,0")
    assert "6 requests, 24 prompt blocks, 8 different ones: at most 66.7% can be found" in output
    assert "4 blocks (50.00%)" in output and "8 blocks (100.00%)" in output
    lines = [line.split() for line in output.splitlines() if line.startswith("│")]
    rows = {line[1]: line for line in lines}
    assert set(rows) == {*POLICY_NAMES, "optimum"}
    assert rows["lru"][3::2] == ["0.0%", "66.7%"]
    # Of 4 places, one conversation's 3 first blocks and the others in turn: 4 of 8 at best.
    assert rows["optimum"][3::2] == ["33.3%", "66.7%"]


def test_two_tiers_as_json(trace: str) -> None:
    found = json.loads(run(trace, "--policy", "lru,arc", "--hot", "4", "--cold", "8", "--json"))
    assert (found["requests"], found["distinct_blocks"]) == (6, 8)
    lru, arc = found["replays"]
    assert (lru["policy"], arc["policy"]) == ("lru", "arc")
    assert lru["hot_hits"] == 0 and lru["cold_hits"] == lru["optimal_hits"] == 16
    assert lru["hit_rate"] == pytest.approx(2 / 3)


def test_two_tiers_as_a_table(trace: str) -> None:
    output = run(trace, "--policy", "lru", "--hot", "4", "--cold", "8")
    assert "+ 8 cold" in output and "66.7% (hot 0.0%)" in output


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--policy", "lfu"], "Unknown eviction policy"),
        (["--hot", "many"], "Not a size"),
        (["--hot", "inf%"], "Not a size"),
        (["--hot", "-1"], "negative room"),
        (["--hot", "1,2", "--cold", "1,2,3"], "--cold does not match --hot"),
    ],
)
def test_options_that_are_refused(trace: str, options: list[str], said: str) -> None:
    assert said in run(trace, *options, fails=True)


def test_a_trace_of_lengths_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "azure.csv"
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n")
    assert "lengths only" in run(str(file), fails=True)
    assert "cannot be replayed" in run(str(tmp_path / "absent.jsonl"), fails=True)
