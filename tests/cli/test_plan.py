"""`tieredkv plan` as a user runs it: tables, JSON, exit codes and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from transformers import LlamaConfig
from typer.testing import CliRunner

from tieredkv.cli.plan import plan


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer()
    app.command("plan")(plan)
    app.command("other")(lambda: None)  # a second command makes typer ask for the name of the first
    return app


@pytest.fixture
def model(tmp_path: Path) -> str:
    LlamaConfig(max_position_embeddings=4096, dtype="float16").save_pretrained(tmp_path)
    return str(tmp_path)


def test_plan_prints_sizes_tiers_cost_and_a_suggestion(app: typer.Typer, model: str) -> None:
    result = CliRunner().invoke(
        app,
        ["plan", model, "--context", "32768", "--batch", "8", "--device-memory", "24GiB"],
        env={"COLUMNS": "200"},
    )
    assert result.exit_code == 0, result.output
    for text in (
        "512 KiB per token, 128 GiB for 8 x 32,768 tokens in float16",
        "32 layers x 32 KV heads x 2 x 128 x 2 bytes",
        "left for keys and values │ 10.1 GiB",
        "int4  │ 162.1 KiB │ 31.7%",
        "hot 4 GiB",
        "cold 128 GiB",
        "too large 1 TiB",
        "per token",
        "77 times as long",
        'with TieredCache(model, hot="10300MiB", warm="65536MiB", cold="/path/on/nvme", block_size=128) as cache:',
        "model.generate(**inputs, past_key_values=cache, prefill_chunk_size=256)",
        "6,738,415,616 parameters = 12.6 GiB",
    ):
        assert text in result.output


def test_plan_as_json(app: typer.Typer, model: str) -> None:
    options = ["--context", "16384", "--device-memory", "24GiB", "--codec", "fp8", "--json"]
    result = CliRunner().invoke(app, ["plan", f"{model}/config.json", *options])
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found["kv_bytes_per_token"] == 512 * 1024
    assert found["spread"]["total_bytes"] == 8 * 2**30
    assert found["spread"]["tiers"][1]["codec"] == "fp8"
    assert found["fits"] is True


def test_rates_and_memory_are_taken(app: typer.Typer, model: str) -> None:
    options = ["--context", "32768", "--device-memory", "24GiB", "--host-memory", "1GiB", "--disk", "40GiB"]
    rates = ["--pcie-gbps", "20", "--nvme-gbps", "2", "--device-gbps", "500", "--dtype", "bf16", "--block-size", "64"]
    found = json.loads(CliRunner().invoke(app, ["plan", model, *options, *rates, "--json"]).output)
    assert found["rates"] == {
        "pcie_bytes_per_second": 20e9,
        "nvme_bytes_per_second": 2e9,
        "device_bytes_per_second": 500e9,
    }
    assert [tier["budget_bytes"] // 2**30 for tier in found["spread"]["tiers"]] == [10, 1, 40]
    assert (found["dtype"], found["block_size"]) == ("bfloat16", 64)


def test_exit_code_1_where_it_does_not_fit(app: typer.Typer, model: str) -> None:
    options = ["--context", "32768", "--host-memory", "1GiB", "--disk", "0"]
    result = CliRunner().invoke(app, ["plan", model, *options], env={"COLUMNS": "200"})
    assert result.exit_code == 1
    assert "warm is short of" in result.output and "suggestion" not in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device-memory", "much"], "Not a size"),
        (["--codec", "zip"], "Unknown codec"),
        (["--dtype", "int3"], "dtype is unknown"),
        (["--block-size", "40"], "multiple of 16"),
        (["--batch", "0"], "batch is too small"),
        (["--pcie-gbps", "0"], "pcie_bytes_per_second is not a speed"),
    ],
)
def test_bad_input_is_an_error_with_what_to_change(
    app: typer.Typer, model: str, arguments: list[str], message: str
) -> None:
    result = CliRunner().invoke(app, ["plan", model, *arguments])
    assert result.exit_code == 2
    assert message in result.stderr and "to change: " in result.stderr


def test_a_path_without_a_config(app: typer.Typer, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["plan", str(tmp_path / "absent")])
    assert result.exit_code == 2 and "no model config at the path" in result.stderr


def test_a_hub_id_that_cannot_be_reached(app: typer.Typer, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(name: str) -> None:
        raise OSError("We couldn't connect to the hub")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", unreachable)
    result = CliRunner().invoke(app, ["plan", "someone/something"])
    assert result.exit_code == 2 and "neither on this machine nor on the hub" in result.stderr
