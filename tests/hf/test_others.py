"""What a cache keeps beside tiered K and V: linear states in any order of layers, and the keys of an indexer."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from models.shrink import SMALL, tiny_config, tiny_model
from support import assert_close, audit, feed, small, store_of, tiny, tokens

import tieredkv
from tieredkv.errors import MismatchError
from tieredkv.hf.layers import TieredLayerBeside

FULL, LINEAR = "full_attention", "linear_attention"
ROUGH = 3e-4  # linear attention in pieces rounds otherwise


class Stop(Exception):
    """Raised in the middle of a forward."""


def stops_at(place: torch.nn.Module) -> Any:
    """A hook that raises once the place in the model is reached."""

    def hook(*_: Any) -> None:
        raise Stop

    return place.register_forward_pre_hook(hook)


@pytest.mark.parametrize("layers", [[FULL, LINEAR] * 2, [LINEAR, FULL] * 2, [FULL, FULL, LINEAR, LINEAR]])
@pytest.mark.parametrize("way", ["blocks", "gather"])
def test_linear_and_full_layers_in_any_order(cold_dir: Path, layers: list[str], way: str) -> None:
    changes: dict[str, Any] = {"layer_types": layers, "num_hidden_layers": 4}
    model, ids = tiny("qwen3next", **changes), tokens(110)
    with torch.no_grad():
        wanted = model(ids, use_cache=False).logits
    with small(model if way == "blocks" else model.config, cold_dir) as cache:
        assert_close(feed(model, ids, cache, [90, 1, 1]), wanted, tolerance=ROUGH)
        assert cache.get_seq_length() == 110
        assert cache.mode == way
        audit(cache)


@pytest.mark.parametrize("layers", [[FULL, LINEAR] * 2, [LINEAR, FULL] * 2])
@pytest.mark.parametrize("place", [1, 2, 3])
@pytest.mark.parametrize("past", [0, 60])
def test_a_forward_that_broke_off_between_them(cold_dir: Path, layers: list[str], place: int, past: int) -> None:
    """Right, or refused until a reset: a linear state cannot go back."""
    model, ids = tiny("qwen3next", layer_types=layers, num_hidden_layers=4), tokens(110)
    with torch.no_grad():
        wanted = model(ids, use_cache=False).logits
    with small(model, cold_dir) as cache:
        feed(model, ids[:, :past], cache)
        hook = stops_at(model.model.layers[place])
        with pytest.raises(Stop):
            feed(model, ids[:, past : past + 20], cache)
        hook.remove()
        try:
            start = cache.get_seq_length()
            assert_close(feed(model, ids[:, start:], cache, [1]), wanted[:, start:], tolerance=ROUGH)
        except MismatchError as error:
            assert "reset" in error.change
        cache.reset()
        assert_close(feed(model, ids, cache, [90, 1]), wanted, tolerance=ROUGH)


@pytest.mark.parametrize(("name", "error"), [("gemma3", RuntimeError), ("qwen3next", MismatchError)])
def test_a_crop_that_one_layer_refuses_removes_nothing(cold_dir: Path, name: str, error: type[Exception]) -> None:
    """A window that has moved on, or a state: had the other layers gone back, the next logits would be wrong."""
    model, ids = tiny(name), tokens(110)
    with small(model, cold_dir) as cache:
        if name == "qwen3next":
            cache.activate_past_recording()
        cache.crop(0)
        feed(model, ids[:, :100], cache)
        with pytest.raises(error):
            cache.crop(-7)
        assert cache.get_seq_length() == 100
        with torch.no_grad():
            wanted = model(ids, use_cache=False).logits
        assert_close(feed(model, ids[:, 100:], cache, [1]), wanted[:, 100:], tolerance=ROUGH)


@pytest.mark.parametrize("model_type", ["falcon_h1", "zamba2"])
def test_a_layer_with_a_state_and_full_attention_is_tiered(cold_dir: Path, model_type: str) -> None:
    model, ids = tiny_model(tiny_config(model_type, SMALL)), tokens(110)
    with torch.no_grad():
        wanted = model(ids, use_cache=False).logits
    with small(model, cold_dir) as cache:
        assert_close(feed(model, ids, cache, [90, 1, 1]), wanted, tolerance=ROUGH)
        assert cache.mode == "blocks"
        assert cache.stats().moves["hot_to_warm"].blocks > 0
        assert store_of(cache).layers, "no layer is tiered"
        for twin in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
            more = tokens(9, seed=5)
            with torch.no_grad():
                longer = model(torch.cat([ids, more], 1), use_cache=False).logits
            assert_close(feed(model, more, twin, [1]), longer[:, 110:], tolerance=ROUGH)
            twin.close()


@pytest.fixture(scope="module")
def sparse() -> Any:
    """DeepSeek V3.2, whose indexer chooses 32 keys for each query."""
    model = tiny_model(tiny_config("deepseek_v32", SMALL))
    assert model.config.index_topk == 32
    return model


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Without a cache."""
    return model(ids, use_cache=False).logits


def test_the_keys_of_an_indexer_go_with_the_cache(cold_dir: Path, sparse: Any) -> None:
    ids = tokens(140, rows=2)
    with small(sparse, cold_dir) as cache:
        assert cache.fallback_reason is not None and "indexer" in cache.fallback_reason
        assert sparse.config._attn_implementation == "sdpa"
        assert_close(feed(sparse, ids, cache, [90, 1, 1]), logits(sparse, ids))
        cache.crop(-30)
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([3, 0]))
        rest = tokens(12, rows=2, seed=5)
        both = torch.cat([ids[[0, 1], :110], rest], 1)
        assert_close(feed(sparse, rest, cache, [1]), logits(sparse, both)[:, 110:])
        for twin in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
            more = tokens(5, rows=2, seed=6)
            assert_close(feed(sparse, more, twin, [1]), logits(sparse, torch.cat([both, more], 1))[:, 122:])
            twin.close()
        cache.reset()
        assert_close(feed(sparse, ids, cache, [90]), logits(sparse, ids))


@pytest.mark.parametrize("past", [0, 60])
@pytest.mark.parametrize("place", ["layers.0.mlp", "layers.1", "layers.1.mlp"])
def test_an_indexer_goes_back_with_an_interrupted_forward(cold_dir: Path, sparse: Any, place: str, past: int) -> None:
    ids = tokens(110)
    with small(sparse, cold_dir) as cache:
        feed(sparse, ids[:, :past], cache)
        for new in (30, 1):
            start = cache.get_seq_length()
            hook = stops_at(sparse.model.get_submodule(place))
            with pytest.raises(Stop):
                feed(sparse, ids[:, start : start + new], cache)
            hook.remove()
        start = cache.get_seq_length()
        assert_close(feed(sparse, ids[:, start:], cache, [1]), logits(sparse, ids)[:, start:])


def test_an_indexer_that_went_ahead_alone_is_found(cold_dir: Path, sparse: Any) -> None:
    """A forward may stop after an indexer and before the first update of a tiered layer."""
    ids = tokens(60)
    with small(sparse, cold_dir) as cache:
        feed(sparse, ids[:, :40], cache)
        cache.update_indexer(torch.zeros(1, 7, 16), 0)
        with pytest.raises(MismatchError, match="indexer_keys") as caught:
            feed(sparse, ids[:, 40:], cache)
        assert "reset" in caught.value.change
        cache.reset()
        assert_close(feed(sparse, ids, cache, [40, 1]), logits(sparse, ids))


def test_what_models_set_on_a_layer_reaches_the_one_beside(cold_dir: Path, sparse: Any) -> None:
    with small(sparse, cold_dir) as cache:
        layer = cache.layers[1]
        assert isinstance(layer, TieredLayerBeside)
        layer.indexer_position_ids = torch.zeros(3, 1, 4)
        assert layer.beside.indexer_position_ids.shape == (3, 1, 4)
        assert layer.indexer_position_ids is layer.beside.indexer_position_ids
        with pytest.raises(AttributeError):
            _ = layer.nothing_of_the_kind


def test_sparse_attention_by_our_name_is_refused_and_not_dense(sparse: Any) -> None:
    """Without a cache too: the choice of keys would be ignored."""
    model = copy.deepcopy(sparse)
    model.set_attn_implementation("tieredkv")
    with pytest.raises(tieredkv.UnsupportedModelError, match="leaves work"):
        logits(model, tokens(40))


def test_a_model_without_layers_of_its_own_is_refused() -> None:
    class Config:
        """Says nothing of layers."""

        def get_text_config(self, decoder: bool = True) -> Any:
            return self

        @property
        def per_layer_config(self) -> Any:
            raise AttributeError("num_hidden_layers")

    with pytest.raises(tieredkv.UnsupportedModelError, match="which layers"):
        tieredkv.TieredCache(Config())
