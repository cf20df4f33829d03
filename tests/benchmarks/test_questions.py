"""Every benchmark runs once, small, and writes nothing: `make slow` runs those that take more than seconds."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import harness

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
