"""Every command tells an error in its parts, and shows a path as it is, whatever is in its name."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import typer
from click.testing import Result
from durable_support import chain, files, opened, publish
from loadtest.fake_server import ServerThread
from transformers import LlamaConfig
from typer.testing import CliRunner

from tieredkv.cli import app
from tieredkv.cli.telling import errors_told
from tieredkv.errors import ConfigError

ODD = "/none/[bold]missing[/x]/:bug:"
"""Read as markup, it has a style that is opened, another that is closed, and a picture."""


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "300"})


REFUSED = {
    "demo": ["demo", "--json", f"{ODD}/file.json"],
    "demo, a model": ["demo", "--model", ODD],
    "plan": ["plan", f"{ODD}/config.json"],
    "replay": ["replay", f"{ODD}/trace.jsonl"],
    "doctor": ["doctor", f"{ODD}/stats.json"],
    "serve": ["serve", "m", "--preset", ODD],
    "serve, a model": ["serve", ODD, "--port", "0"],
    "stress": ["stress", "--url", "http://127.0.0.1:1", "--trace", f"{ODD}/trace.csv"],
    "stress, a report": ["stress", "--url", "http://127.0.0.1:1", "--compare", f"{ODD}/report.json"],
    "ls": ["ls", ODD],
    "verify": ["verify", ODD],
    "prune": ["prune", ODD],
}


@pytest.mark.parametrize("arguments", REFUSED.values(), ids=REFUSED.keys())
def test_an_error_has_the_path_as_it_is(arguments: list[str]) -> None:
    if arguments[:2] == ["serve", ODD] and importlib.util.find_spec("uvicorn") is None:
        pytest.skip("pip install 'tieredkv[serve]'")
    result = run(*arguments)
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit), result.output
    assert result.stderr.lstrip().startswith("error ") and result.stdout == ""
    for part in (ODD, "  wanted: ", "  got: ", "  to change: "):
        assert part in result.stderr


def test_every_command_is_among_them() -> None:
    assert {name.split(",")[0] for name in REFUSED} == {command.name for command in app.registered_commands}


def test_an_interrupt_is_told_without_a_traceback() -> None:
    one = typer.Typer()

    @one.command()
    @errors_told("stopped; all is well")
    def command() -> None:
        raise KeyboardInterrupt

    result = CliRunner().invoke(one)
    assert result.exit_code == 130 and result.stderr.strip() == "stopped; all is well"


def test_an_exit_code_goes_through() -> None:
    with pytest.raises(typer.Exit) as caught, errors_told():
        raise typer.Exit(1)
    assert caught.value.exit_code == 1


def test_a_part_of_an_error_may_hold_anything(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), errors_told():
        raise ConfigError("[/a] is none.", wanted="[b]", got=["[/c]"], change="[/d] \\")
    said = capsys.readouterr().err
    assert said == "error [/a] is none.\n  wanted: [b]\n  got: ['[/c]']\n  to change: [/d] \\\n"


# ---- what is said where all is well


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    folder = tmp_path / "[bold]" / "[" / "x] :bug:"  # [/x] between them
    folder.mkdir(parents=True)
    return folder


def test_published_files_in_a_folder_with_an_odd_name(odd: Path) -> None:
    publish(opened(odd), chain("a", 3))
    assert f"published in {odd}" in run("ls", odd).output
    (path,) = files(odd)
    with path.open("r+b") as file:
        file.truncate(5000)
    found = run("verify", odd)
    assert found.exit_code == 1 and "1 damaged" in found.output and str(path) in found.output
    assert f"deleted from {odd}" in run("prune", odd).output


def test_a_model_in_a_folder_with_an_odd_name(odd: Path) -> None:
    LlamaConfig(max_position_embeddings=4096, dtype="float16").save_pretrained(odd)
    result = run("plan", odd)
    assert result.exit_code == 0, result.output
    assert not [line for line in json.loads(run("plan", odd, "--json").output)["how"] if line not in result.output]


def test_a_report_of_a_load_goes_into_a_folder_with_an_odd_name(odd: Path) -> None:
    with ServerThread() as server:
        asked = ["stress", "--url", server.url, "--shape", "40:5", "--requests", "2", "--out", odd]
        result = run(*asked, "--model", "[/m]")
        assert result.exit_code == 0, result.output
        assert f"written: {odd / 'report.json'}" in result.output and "by [/m]" in result.output
        earlier = json.loads((odd / "report.json").read_text())
        earlier["date"] = "[/then]"
        old = odd / "old.json"
        old.write_text(json.dumps(earlier))
        assert "beside [/then]" in run(*asked, "--compare", old).output
