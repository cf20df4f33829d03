"""`tieredkv ls`, `verify` and `prune` as a user runs them."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest
from durable_support import IDENTITY, LAYERS, chain, files, opened, publish, quarantined
from typer.testing import CliRunner, Result

from tieredkv.cli import app
from tieredkv.durable import Identity, salt_digest

OTHER = Identity("f00d" * 16, LAYERS, 16, "int8")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})


@pytest.fixture
def directory(cold_dir: Path) -> Path:
    store = opened(cold_dir)
    publish(store, chain("a", 3))
    publish(store, chain("b", 2, salt=salt_digest("alice")))
    publish(opened(cold_dir, OTHER), chain("c", 4, identity=OTHER))
    return cold_dir


def damage(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))


def test_ls_shows_models_and_salts(directory: Path) -> None:
    result = run("ls", directory)
    assert result.exit_code == 0, result.output
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.output.splitlines() if "│" in line]
    assert sorted(line[:7] for line in lines) == [
        ["f00df00df00d", "int8", "16", "none", "1", "4", "64"],
        ["model-1", "raw", "16", salt_digest("alice")[:12], "1", "2", "32"],
        ["model-1", "raw", "16", "none", "1", "3", "48"],
    ]
    assert "3 files" in result.output


def test_verify_finds_a_changed_byte_and_sets_the_file_aside_when_asked(directory: Path) -> None:
    assert run("verify", directory).exit_code == 0
    path = next(path for path in files(directory) if chain("a", 3)[2].hash in path.name)
    damage(path)
    for _ in range(2):
        result = run("verify", directory)
        assert result.exit_code == 1
        assert "1 damaged" in result.output and "block 2, layer 1" in result.output
        assert path.exists()
    assert run("verify", "--set-aside", directory).exit_code == 1
    assert not path.exists() and len(quarantined(directory)) == 1
    assert run("verify", directory).exit_code == 0
    assert "quarantine" in run("ls", directory).output


def test_verify_finds_a_cut_file(directory: Path) -> None:
    os.truncate(files(directory)[0], 5000)
    result = run("verify", directory)
    assert result.exit_code == 1 and "instead of" in result.output


def test_verify_leaves_a_file_that_cannot_be_opened_where_it_is(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real = files(directory)[0], os.open

    def refused(name: str | Path, *args: int, **kwargs: int) -> int:
        if str(name) == str(path):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(name, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refused)
        result = run("verify", "--set-aside", directory)
        assert "unreadable" in run("ls", directory).output
        assert run("prune", directory).exit_code == 0
    assert result.exit_code == 1, result.output
    assert "0 damaged, 1 unreadable" in result.output
    assert path.exists() and run("verify", directory).exit_code == 0


def test_prune_by_itself_deletes_only_what_is_of_no_use(directory: Path) -> None:
    opened(directory).set_aside(chain("a", 3)[0].hash, "test")
    left = directory / "durable" / IDENTITY.digest()[:16] / "tmp" / "1-0"
    left.touch()
    result = run("prune", directory)
    assert result.exit_code == 0, result.output
    assert quarantined(directory) == [] and not left.exists()
    assert len(files(directory)) == 2


@pytest.mark.parametrize("salt", ["alice", salt_digest("alice"), salt_digest("alice")[:12]])
def test_prune_by_salt(directory: Path, salt: str) -> None:
    assert run("prune", "--salt", salt, directory).exit_code == 0
    assert len(files(directory)) == 2
    assert salt_digest("alice")[:12] not in run("ls", directory).output
    assert opened(directory).stats().blocks == 3


def test_prune_by_age(directory: Path) -> None:
    for path, days in zip(files(directory), (1, 8, 9), strict=True):
        then = time.time() - days * 86400
        os.utime(path, (time.time(), then))
    assert run("prune", "--older-than", "10d", directory).exit_code == 0
    assert len(files(directory)) == 3
    assert run("prune", "--older-than", "1w", "--salt", "bob", directory).exit_code == 0
    assert len(files(directory)) == 3
    result = run("prune", "--older-than", "1w", directory)
    assert result.exit_code == 0 and len(files(directory)) == 1


@pytest.mark.parametrize("age", ["soon", "7", "-1d"])
def test_prune_refuses_an_age_that_is_none(directory: Path, age: str) -> None:
    result = run("prune", f"--older-than={age}", directory)
    assert result.exit_code == 2
    assert len(files(directory)) == 3


@pytest.mark.parametrize("command", ["ls", "verify", "prune"])
def test_a_directory_without_published_blocks_is_an_error(tmp_path: Path, command: str) -> None:
    result = run(command, tmp_path)
    assert result.exit_code == 2 and "no published blocks" in result.output
