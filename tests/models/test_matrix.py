"""A slice of the model matrix, and that docs/models.md says what is found; `make models` runs all of it."""

from __future__ import annotations

import os
import time

import pytest
import transformers
from models.families import FAMILIES, KINDS, every_model_type
from models.matrix import SENSITIVE, Outcome, examine
from models.pool import examine_all
from models.report import PAGE, page

import tieredkv


def rows_of_the_page() -> dict[str, list[str]]:
    """By model type: class, layers, result and note, as docs/models.md has them."""
    rows = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if len(cells) == 5 and cells[0] not in ("model type", "---"):
            rows[cells[0].strip("*")] = cells[1:]
    return rows


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", [*FAMILIES, *KINDS])
def test_a_class_is_as_the_page_says(model_type: str) -> None:
    outcome = examine(model_type)
    assert outcome.verdict == rows_of_the_page()[model_type][2], (outcome.stock, outcome.runs)
    if model_type in FAMILIES:
        assert outcome.verdict in ("blocks", "gather")
        assert outcome.sensitivity > SENSITIVE


def test_the_page_has_every_class_and_none_is_wrong() -> None:
    rows = rows_of_the_page()
    if f"transformers {transformers.__version__}," in PAGE.read_text(encoding="utf-8"):
        assert list(rows) == every_model_type()
    assert not [name for name, row in rows.items() if row[2] in ("wrong", "error")]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("broken", ["reorder_cache", "crop"])
def test_a_cache_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    monkeypatch.setattr(tieredkv.TieredCache, broken, lambda *_: None)
    assert examine("llama").verdict in ("wrong", "error")


def behave(name: str) -> Outcome:
    """What stands for a class in the tests of the pool."""
    if name == "hangs":
        time.sleep(600)
    if name == "crashes":
        os._exit(3)
    return Outcome(name, name="Fine")


def test_a_class_that_hangs_or_crashes_costs_its_own_row_only() -> None:
    outcomes = {
        outcome.model_type: outcome
        for outcome in examine_all(["hangs", "a", "crashes", "b"], limit_seconds=20, function=behave)
    }
    assert "longer" in outcomes["hangs"].failure
    assert "code 3" in outcomes["crashes"].failure
    assert outcomes["a"].name == outcomes["b"].name == "Fine"


def test_the_page_counts_what_it_lists() -> None:
    built = Outcome("llama", name="LlamaForCausalLM", stock={"prefill": 0.0, "decode": 0.0}, sensitivity=1.0)
    text = page([built, Outcome("mistral", failure="no | memory")])
    assert "| exact with transformers' `DynamicCache` | 1 |" in text
    assert "no \\| memory" in text
