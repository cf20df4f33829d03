"""Batch rows that are reordered, repeated, dropped and refused, in models that keep more than tiered layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models.shrink import SMALL, tiny_config, tiny_model
from support import MODELS, assert_close, audit, feed, small, tiny, tokens

from tieredkv.errors import MismatchError
from tieredkv.hf.others import OtherLayers

ROUGH = 3e-4  # linear attention in pieces rounds otherwise


def model_of(name: str) -> Any:
    """One of the support's models, or of transformers' model types."""
    return tiny(name) if name in MODELS else tiny_model(tiny_config(name, SMALL))


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Without a cache."""
    return model(ids, use_cache=False).logits


NAMES = ["llama", "gemma3", "mistral", "qwen3next", "falcon_h1", "deepseek_v32"]


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_every_kind_of_layer_go_together(cold_dir: Path, name: str) -> None:
    model, ids, more = model_of(name), tokens(60, rows=2), tokens(5, rows=2, seed=5)
    with small(model, cold_dir) as cache:
        feed(model, ids, cache)
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([3, 0, 1, 2]))
        cache.batch_select_indices(torch.tensor([True, False, False, True]))
        cache.batch_select_indices(torch.tensor([-2, -1]))
        whole = torch.cat([ids[[1, 1]], more], 1)
        assert_close(feed(model, more, cache, [1]), logits(model, whole)[:, 60:], tolerance=ROUGH)
        audit(cache)


@pytest.mark.parametrize("name", NAMES)
def test_after_a_reset_there_may_be_another_number_of_rows(cold_dir: Path, name: str) -> None:
    model, ids = model_of(name), tokens(40, rows=3)
    with small(model, cold_dir) as cache:
        for rows in (2, 1, 3):
            assert_close(feed(model, ids[:rows], cache, [30, 1]), logits(model, ids[:rows]), tolerance=ROUGH)
            cache.reset()


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3next"])
@pytest.mark.parametrize(
    "use",
    [
        lambda cache: cache.batch_select_indices(torch.tensor([], dtype=torch.long)),
        lambda cache: cache.batch_select_indices(torch.tensor([False, False])),
        lambda cache: cache.batch_select_indices(torch.tensor([True, False, True])),
        lambda cache: cache.batch_repeat_interleave(0),
        lambda cache: cache.reorder_cache(torch.tensor([0, 5])),
        lambda cache: cache.reorder_cache(torch.tensor([0, -3])),
    ],
    ids=["none", "masked", "mask too long", "zero times", "above", "below"],
)
def test_rows_that_are_not_there_are_refused_and_nothing_changes(
    cold_dir: Path, name: str, use: Callable[[Any], None]
) -> None:
    model, ids = tiny(name), tokens(50, rows=2)
    with small(model, cold_dir) as cache:
        use(cache)  # an empty cache has no rows, as in transformers
        feed(model, ids[:, :45], cache)
        with pytest.raises(MismatchError, match="rows 0 to 1"):
            use(cache)
        if name != "mistral":
            audit(cache)
        assert_close(feed(model, ids[:, 45:], cache, [1]), logits(model, ids)[:, 45:], tolerance=ROUGH)


def test_layers_that_cannot_follow_leave_the_cache_as_it_was(cold_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("gemma3", layer_types=["sliding_attention"] * 2 + ["full_attention"], num_hidden_layers=3)
    ids = tokens(50, rows=2)
    with small(model, cold_dir) as cache:
        feed(model, ids[:, :45], cache)
        others: OtherLayers = cache._others

        def fails(rows: torch.Tensor) -> None:
            raise MemoryError

        monkeypatch.setattr(others.layers[1], "reorder_cache", fails)
        with pytest.raises(MemoryError):
            cache.reorder_cache(torch.tensor([1, 0]))
        assert_close(feed(model, ids[:, 45:], cache, [1]), logits(model, ids)[:, 45:])
        audit(cache)
