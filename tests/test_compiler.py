"""C++ sources compiled once, found again, refused with a reason, and never from a folder that others can write."""

from __future__ import annotations

import gc
import subprocess
from pathlib import Path

import pytest

from tieredkv.compiler import Compiler

SOURCE = 'extern "C" int answer() { return ANSWER; }'


def test_compiled_once_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Compiler(tmp_path).load("answer", SOURCE, {"ANSWER": 41}).answer() == 41
    built = list(tmp_path.iterdir())
    assert len(built) == 1 and built[0].name.startswith("answer-")
    assert Compiler(tmp_path).load("answer", SOURCE, {"ANSWER": 42}).answer() == 42

    def refuse(*args: object, **kwargs: object) -> None:
        raise RuntimeError("nothing is to be compiled")

    monkeypatch.setattr(subprocess, "run", refuse)
    assert Compiler(tmp_path).load("answer", SOURCE, {"ANSWER": 41}).answer() == 41
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("compiler", ["nowhere", "failing"])
def test_the_reason_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str) -> None:
    failing = tmp_path / "cxx"
    failing.write_text("#!/bin/sh\necho broken header >&2\nexit 1\n")
    failing.chmod(0o700)
    monkeypatch.delenv("CXX", raising=False)
    if compiler == "nowhere":
        monkeypatch.setenv("PATH", "")
    unable = Compiler(tmp_path / "kernels", str(failing) if compiler == "failing" else None)
    with pytest.raises(OSError, match="no C\\+\\+ compiler" if compiler == "nowhere" else "broken header"):
        unable.load("answer", SOURCE, {"ANSWER": 1})
    assert not [path for path in tmp_path.rglob("*.so")]


def test_another_compiler_compiles_anew(tmp_path: Path) -> None:
    script = tmp_path / "cxx"
    for number in (1, 2):
        script.write_text(f'#!/bin/sh\nexec g++ "$@" # {number * 11}\n')
        script.chmod(0o700)
        Compiler(tmp_path / "kernels", str(script)).load("answer", SOURCE, {"ANSWER": 7})
    assert len(list((tmp_path / "kernels").iterdir())) == 2


def test_a_folder_that_others_can_write_is_not_trusted(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    compiler = Compiler(shared)
    assert compiler.load("answer", SOURCE, {"ANSWER": 3}).answer() == 3
    assert not list(shared.iterdir())
    own = compiler._folder
    assert own.exists()
    del compiler
    gc.collect()
    assert not own.exists()
