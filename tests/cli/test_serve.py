"""`tieredkv serve`: which options are refused, and what is said of them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tieredkv.cli import app
from tieredkv.cli import serve as command
from tieredkv.cli.serve import Serving, tier_lines
from tieredkv.config import ColdSettings
from tieredkv.durable import DurableSettings
from tieredkv.serving import Room


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[Serving]:
    """What would have been served."""
    seen: list[Serving] = []
    monkeypatch.setattr(command, "run", lambda chosen, host, port, console: seen.append(chosen))
    return seen


def test_options_end_up_where_they_belong(chosen: list[Serving]) -> None:
    options = ["--gpu-memory-utilization", "0.5", "--max-num-seqs", "7", "--max-model-len", "99", "--codec", "fp8"]
    more = ["--cold", "/nvme/kv", "--cold-cap", "5GB", "--api-key", "a", "--api-key", "b", "--max-body", "1MB"]
    result = CliRunner().invoke(app, ["serve", "m", "--gguf-file", "f.gguf", *options, *more])
    assert result.exit_code == 0, result.output
    (found,) = chosen
    assert (found.model, found.gguf_file, found.utilization) == ("m", "f.gguf", 0.5)
    assert (found.engine.max_running, found.engine.max_model_len) == (7, 99)
    assert (found.endpoint.name, found.endpoint.api_keys) == ("m", ("a", "b"))
    assert found.endpoint.most_body_bytes == 10**6
    assert found.cache.codec == "fp8"
    assert found.cache.cold == ColdSettings(Path("/nvme/kv"), cap="5GB")
    assert found.durable == DurableSettings(Path("/nvme/kv"), cap="5GB")


def test_a_preset_is_filled_in_and_options_win(chosen: list[Serving]) -> None:
    for options in ([], ["--window", "64", "--codec", "raw"]):
        assert CliRunner().invoke(app, ["serve", "m", "--preset", "documents", *options]).exit_code == 0
    plain, changed = chosen
    assert (plain.cache.window, plain.cache.codec, plain.cache.placement) == (512, "int8", "window")
    assert (changed.cache.window, changed.cache.codec, changed.cache.placement) == (64, "raw", "window")
    assert plain.engine.prefill_tokens == 2048 and plain.engine.max_running == 64
    assert plain.durable is False


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--preset", "games"], "chat or documents"),
        (["--hot", "much"], "Not a size"),
        (["--block-size", "17"], "a multiple of 16"),
        (["--api-key", ""], "not empty"),
        (["--max-body", "0"], "limits of at least 1"),
        (["--cold-cap", "5GB"], "--cold FOLDER beside it"),
        (["--cold-cap", "no size"], "--cold FOLDER beside it"),
    ],
)
def test_an_option_that_cannot_be_is_refused(chosen: list[Serving], options: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["serve", "m", *options])
    assert result.exit_code == 2 and message in result.output
    assert not chosen


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def without(name: str, *rest: Any) -> Any:
        return None if name == "uvicorn" else find(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    result = CliRunner().invoke(app, ["serve", "m"])
    assert result.exit_code == 2
    assert "no uvicorn" in result.output and "pip install 'tieredkv[serve]'" in result.output


def test_a_model_that_is_not_there_is_told(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["serve", str(tmp_path / "absent"), "--port", "0"])
    assert result.exit_code == 2
    assert "The model cannot be loaded" in result.output or "Serving needs more packages" in result.output


def test_each_tier_has_a_line() -> None:
    room = Room(256, {"hot": 4096, "cold": None}, None)
    assert tier_lines(room) == ["hot        4,096 tokens", "cold       as many tokens as the disk holds"]
    assert room.sequences(1000) is None and Room(1, {}, 4096).sequences(1000) == 4
