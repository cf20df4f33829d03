"""`tieredkv stress` as a user runs it: the table, files, a comparison, exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from loadtest.fake_server import Answer, FakeServer, ServerThread
from typer.testing import CliRunner

from tieredkv.cli import app


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["stress", *arguments], env={"COLUMNS": "200", "OPENAI_API_KEY": ""})
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture
def server() -> Any:
    with ServerThread() as server:
        yield server


def test_a_load_is_sent_and_reported(server: FakeServer, tmp_path: Path) -> None:
    out = tmp_path / "first"
    said = run("--url", server.url, "--shape", "40:5", "--requests", "6", "--concurrency", "2", "--out", str(out))
    assert "6 of 6 requests answered" in said and "lengths 40:5, 2 at once" in said
    assert "time to first token, s" in said and f"written: {out / 'report.md'}" in said
    assert len(server.seen) == 8 and "authorization" not in server.seen[0].headers
    report = json.loads((out / "report.json").read_text())
    assert report["whole"]["answer_tokens"] == 30
    again = run(
        *("--url", f"{server.url}/v1", "--shape", "40:5", "--requests", "6", "--concurrency", "2", "--seed", "1"),
        *("--compare", str(out / "report.json"), "--out", str(tmp_path / "second"), "--api-key", "k", "--completions"),
        *("--extra", '{"ignore_eos": true}', "--model", "another"),
    )
    assert f"beside {report['date']}" in again and "now / then" in again
    assert "not the same model: a-model then, another now" in again and "seed: 0 then, 1 now" in again
    assert f"## Beside {report['date']}" in (tmp_path / "second" / "report.md").read_text()
    last = server.seen[-1]
    assert (last.path, last.headers["authorization"]) == ("/v1/completions", "Bearer k")
    assert last.body["ignore_eos"] is True and last.body["model"] == "another"


def test_a_trace_is_replayed(server: FakeServer, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:15:0{at}.0,{30 + at},{2 + at}" for at in range(4)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    said = run("--url", server.url, "--trace", str(trace), "--scale", "0.001", "--longest", "35")
    assert "2 of 2 requests answered" in said and "lengths of trace.csv up to 35 tokens at its times x 0.001" in said
    # Both are sent within a millisecond, and may arrive in any order.
    assert sorted(seen.body["max_tokens"] for seen in server.seen[2:]) == [2, 3]


def test_nothing_was_answered() -> None:
    with ServerThread(lambda number, seen: Answer(status=500)) as server:
        said = run("--url", server.url, "--requests", "3", "--concurrency", "3", code=1)
    assert "0 of 3 requests answered" in said and "failed 3 x http 500" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--shape", "long"], "Not a load"),
        (["--rate", "1", "--ramp"], "open loop"),
        (["--extra", "[1]"], "--extra"),
        (["--extra", "{"], "--extra"),
        (["--trace", "absent.csv"], "absent.csv"),
        (["--compare", "absent.json"], "no report"),
        ([], "which models"),
    ],
)
def test_what_cannot_be_sent(options: list[str], said: str) -> None:
    assert said in run("--url", "http://127.0.0.1:1", *options, code=2)
