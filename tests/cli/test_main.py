"""The command line as a whole: its commands, its help, its version, and its two ways in."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

from typer.testing import CliRunner

import tieredkv
from tieredkv.cli import app, main


def test_help_names_the_commands() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert "demo" in result.output and "plan" in result.output


def test_without_a_command_it_shows_help() -> None:
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 2
    assert "Usage" in result.output


def test_an_unknown_command_is_a_usage_error() -> None:
    assert CliRunner().invoke(app, ["serve"]).exit_code == 2


def test_the_version_is_printed() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output.strip() == f"tieredkv {tieredkv.__version__}"


def test_the_console_script_is_main() -> None:
    (script,) = (e for e in importlib.metadata.entry_points(group="console_scripts") if e.name == "tieredkv")
    assert script.load() is main


def test_the_module_runs_and_leaves_with_the_exit_code() -> None:
    command = [sys.executable, "-m", "tieredkv.cli", "demo", "--codec", "zip"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "Unknown codec" in done.stderr and "Traceback" not in done.stderr
