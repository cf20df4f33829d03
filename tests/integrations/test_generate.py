"""The example of `model.generate`: its tokens are those without a cache, and it uses all three tiers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support import tokens


def test_the_answer_is_that_without_a_cache(example: Callable[[str], ModuleType], model: Any, cold_dir: Path) -> None:
    ids = tokens(2000)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    got, stats = example("generate").answer(model, inputs, str(cold_dir))
    whole = torch.cat([ids, got], 1)
    with torch.no_grad():
        wanted = model(whole, use_cache=False).logits[:, 1999:-1].argmax(-1)
    assert got.tolist() == wanted.tolist()
    assert stats.mode == "blocks"
    assert min(stats.hot.peak_blocks, stats.warm.peak_blocks, stats.cold.peak_blocks) > 0
    assert stats.hot.peak_bytes <= stats.hot.budget_bytes
    assert model.config._attn_implementation != "tieredkv"


def test_it_prints_what_each_tier_held(
    example: Callable[[str], ModuleType], tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    example("generate").main(["--model", str(tiny_folder)])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[-3:]] == ["hot", "warm", "cold"]


@pytest.mark.slow
def test_it_answers_with_the_real_model(run_real: Callable[..., str]) -> None:
    assert "cold: at most" in run_real("generate")
