"""The serving example: its client streams an answer, its unit starts a command that exists."""

from __future__ import annotations

import importlib.util
import re
import shlex
import types
from pathlib import Path
from typing import Any

import pytest
import typer

import tieredkv
from tieredkv.cli import app
from tieredkv.serving import Engine, EngineSettings

FOLDER = Path(__file__).parents[2] / "integrations" / "serving"
PACKAGES = ("fastapi", "openai", "prometheus_client", "uvicorn")


@pytest.fixture
def client_example() -> Any:
    if any(importlib.util.find_spec(name) is None for name in PACKAGES):
        pytest.skip("needs pip install 'tieredkv[serve]'")
    spec = importlib.util.spec_from_file_location("example_client", FOLDER / "client.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
def test_the_client_prints_what_the_server_says(
    client_example: types.ModuleType, model: Any, byte_tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    import openai
    from fastapi.testclient import TestClient

    from tieredkv.serving.endpoint import EndpointSettings, build
    from tieredkv.serving.metrics import EngineMetrics

    with (
        tieredkv.KVStore(model, hot="1024 tokens", warm=0, block_size=16) as store,
        Engine(model, store, EngineSettings(max_model_len=256)) as engine,
        TestClient(build(engine, model, byte_tokenizer, EndpointSettings("tiny"), EngineMetrics())) as http,
    ):
        client = openai.OpenAI(base_url="http://testserver/v1", api_key="none", http_client=http)
        client_example.main(["hello", "--new-tokens", "12"], client)
        messages: Any = [{"role": "user", "content": "hello"}]
        whole = client.chat.completions.create(model="tiny", messages=messages, max_tokens=12)
    said = whole.choices[0].message.content or ""
    assert capsys.readouterr().out.strip() == said.rstrip("\N{REPLACEMENT CHARACTER}").strip() != ""


def options() -> set[str]:
    """The options of `tieredkv serve`."""
    command: Any = typer.main.get_command(app)
    return {name for parameter in command.commands["serve"].params for name in parameter.opts}


def test_the_unit_starts_a_command_that_exists() -> None:
    unit = (FOLDER / "tieredkv.service").read_text(encoding="utf-8")
    (command,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    words = shlex.split(command)
    assert words[0].endswith("/tieredkv") and words[1] == "serve"
    assert {word for word in words if word.startswith("--")} <= options()
    drain = float(words[words.index("--drain-seconds") + 1])
    (stop,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert float(stop) > drain


@pytest.mark.parametrize("page", [FOLDER / "README.md", FOLDER.parents[1] / "docs" / "guides" / "serving.md"])
def test_every_option_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))
    assert len(named) > 8
    assert named <= options()
