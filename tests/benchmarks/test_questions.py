"""Every benchmark runs once, small, and writes nothing: `make slow` runs those that take more than seconds."""

from __future__ import annotations

import ast
import importlib
import shutil
import sys
from pathlib import Path

import pytest
import torch
from emulated_cuda import EmulatedGpu, compiled_flex

from benchmarks import decode_cuda, harness
from tieredkv.attention import kernels

FILES = Path(harness.__file__).parent
QUICK = {"capacity", "block_size", "memory", "serving"}


def questions() -> list[str]:
    """The modules that `python -m benchmarks` runs."""
    for node in ast.parse((FILES / "__main__.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "QUESTIONS":
            return list(ast.literal_eval(node.value))
    raise LookupError("benchmarks/__main__.py has no QUESTIONS")


@pytest.mark.parametrize(
    "question", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in questions()]
)
@pytest.mark.filterwarnings("default")
def test_a_question_runs_small(
    question: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = set(harness.RESULTS.glob("*"))
    monkeypatch.setattr(sys, "argv", [question, "--quick"])
    grad = torch.is_grad_enabled()
    try:
        importlib.import_module(f"benchmarks.{question}").main()
    finally:
        torch.set_grad_enabled(grad)
    out = capsys.readouterr().out
    assert set(harness.RESULTS.glob("*")) == before
    if "is not installed" in out:
        pytest.skip(out)
    assert "reached: " in out


def test_every_question_is_run_by_make_bench() -> None:
    """A file with a command line is a question, and each question is in the list."""
    with_main = {
        path.stem
        for path in FILES.glob("*.py")
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in ast.parse(path.read_text()).body)
    }
    assert with_main - {"pages"} == set(questions())


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_what_is_measured_on_a_gpu_runs_on_an_emulated_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """No part fails, and what is exact there is exact here: a lent GPU is not for finding mistakes in the script."""
    monkeypatch.setattr(kernels, "_compile", compiled_flex)
    with torch.no_grad(), EmulatedGpu(eagerness=1.0):
        rows = decode_cuda.run("cuda", quick=True)
    failed = [row.measure for row in rows if row.measure.startswith("part")]
    assert not failed, failed[0]
    exact = [row for row in rows if "logits" in row.measure]
    assert len(exact) == 2 and all(row.reached for row in exact)
    assert any("share of the pinned bandwidth" in row.measure and row.value > 0 for row in rows)
