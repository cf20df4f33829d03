"""Forwards that do not go as usual: interrupted ones, unclaimed handles, other attention, several caches in turn."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import (
    DIM,
    UNSERVED_DIM,
    WAYS,
    assert_close,
    audit,
    feed,
    of,
    oracle,
    small,
    tiny,
    tokens,
)

import tieredkv
from tieredkv.attention import engine
from tieredkv.attention.native import NativeKernels
from tieredkv.device import CpuDevice, SimulatedAccelerator
from tieredkv.errors import HandleError


class Stop(Exception):
    """Raised in the middle of a forward."""


@pytest.fixture(params=[Stop, KeyboardInterrupt])
def stop(request: pytest.FixtureRequest) -> type[BaseException]:
    kind: type[BaseException] = request.param
    return kind


def stops_at(place: torch.nn.Module, kind: type[BaseException]) -> Any:
    """A hook that raises once the place in the model is reached."""

    def hook(*_: Any) -> None:
        raise kind("stop here")

    return place.register_forward_pre_hook(hook)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("past", [0, 50, 140])
@pytest.mark.parametrize("place", ["layers.0.mlp", "layers.1", "layers.1.mlp", "norm"])
def test_a_forward_that_was_interrupted(
    cold_dir: Path, place: str, past: int, way: str, stop: type[BaseException]
) -> None:
    """Whether it counts or not, the cache says its length, and goes on from there with right logits."""
    model, ids = tiny(), tokens(220)
    with small(of(model, way), cold_dir) as cache:
        feed(model, ids[:, :past], cache, [past // 2, 1])
        for new in (30, 1):
            start = cache.get_seq_length()
            hook = stops_at(model.model.get_submodule(place), stop)
            with pytest.raises(stop):
                feed(model, ids[:, start : start + new], cache)
            hook.remove()
            counts = place in ("layers.1.mlp", "norm")  # every layer had its tokens
            assert cache.get_seq_length() == start + (new if counts else 0)
        start = cache.get_seq_length()
        assert_close(feed(model, ids[:, start:], cache, [1, 20]), oracle(ids)[:, start:])
        audit(cache)


@pytest.mark.parametrize("name", ["gemma3", "qwen3next"])
@pytest.mark.parametrize("past", [0, 3, 30])
def test_an_interrupted_hybrid_model_is_right_or_refuses(cold_dir: Path, name: str, past: int) -> None:
    """Layers that are not tiered went ahead, and some of them cannot go back."""
    model, ids = tiny(name), tokens(100)
    wanted, tolerance = oracle(ids, name), 1e-5 if name == "gemma3" else 1e-4  # linear attention in pieces is rougher
    with small(model, cold_dir) as cache:
        feed(model, ids[:, :past], cache)
        hook = stops_at(model.model.layers[1], Stop)
        with pytest.raises(Stop):
            feed(model, ids[:, past : past + 20], cache)
        hook.remove()
        try:
            start = cache.get_seq_length()
            assert_close(feed(model, ids[:, start:], cache, [1, 20]), wanted[:, start:], tolerance=tolerance)
        except tieredkv.MismatchError as error:
            assert "reset" in error.change
            assert name == "qwen3next", "only a linear state cannot go back"
        cache.reset()
        assert_close(feed(model, ids, cache, [50, 1]), wanted, tolerance=tolerance)


@pytest.mark.parametrize("within", ["plan_reads", "_append_blocks", "_own_tails"])
def test_an_interrupt_inside_of_planning(
    cold_dir: Path, within: str, monkeypatch: pytest.MonkeyPatch, stop: type[BaseException]
) -> None:
    """Control-C may strike between any two lines; the worst case is after slots were taken."""
    from tieredkv.store import planner

    model, ids = tiny(), tokens(220)
    original = getattr(planner, within)

    def interrupted(*arguments: Any) -> Any:
        original(*arguments)
        raise stop

    with small(model, cold_dir) as cache:
        feed(model, ids[:, :150], cache, [70])
        for new in (1, 40):
            monkeypatch.setattr(planner, within, interrupted)
            with pytest.raises(stop):
                feed(model, ids[:, 150 : 150 + new], cache)
            monkeypatch.setattr(planner, within, original)
            assert cache.get_seq_length() == 150
        assert_close(feed(model, ids[:, 150:], cache, [1, 20]), oracle(ids)[:, 150:])
        audit(cache)


@pytest.mark.parametrize("dim", [DIM, UNSERVED_DIM], ids=["native", "partials"])
@pytest.mark.parametrize("kind", ["cpu", "simulated"])
def test_an_interrupt_while_a_chunk_is_attended(
    cold_dir: Path, kind: str, dim: int, monkeypatch: pytest.MonkeyPatch, stop: type[BaseException]
) -> None:
    model, ids = tiny(head_dim=dim), tokens(220)
    place: Any = (NativeKernels, "attend") if dim == DIM else (engine, "_add_run")
    device = SimulatedAccelerator(max_delay_seconds=0.002) if kind == "simulated" else CpuDevice()
    settings = tieredkv.CacheSettings(read_in_place=False)
    original = getattr(*place)
    with small(model, cold_dir, device=device, settings=settings) as cache:
        feed(model, ids[:, :180], cache, [150])
        for after in (1, 2, 3) if dim == DIM else range(1, 12, 3):
            calls = iter(range(after))

            def interrupted(*arguments: Any, calls: Iterator[int] = calls, **keywords: Any) -> Any:
                done = original(*arguments, **keywords)
                if next(calls, None) is None:
                    raise stop
                return done

            monkeypatch.setattr(*place, interrupted)
            with pytest.raises(stop):
                feed(model, ids[:, 180:181], cache)
            monkeypatch.setattr(*place, original)
        start = cache.get_seq_length()
        assert_close(feed(model, ids[:, start:], cache, [1, 20]), oracle(ids, head_dim=dim)[:, start:])
        audit(cache)


# ---- handles and implementations


def test_a_handle_that_nobody_claims_raises(cold_dir: Path) -> None:
    model, ids = tiny(), tokens(60)
    with small(model, cold_dir) as cache:
        feed(model, ids, cache)
        new = torch.randn(1, 2, 1, DIM)
        key, _ = cache.update(new, new.clone(), 0, kwargs={})
        assert key.shape[2] == 1, "new keys alone"
        with pytest.raises(HandleError, match="reset"):
            cache.update(new.clone(), new.clone(), 1, kwargs={})
        assert cache.get_seq_length() == 60
        cache.reset()
        assert_close(feed(model, ids, cache, [40, 1]), oracle(ids))


@pytest.mark.parametrize("new", [1, 3])
def test_a_handle_that_nobody_claims_in_the_last_layer_raises_in_that_forward(cold_dir: Path, new: int) -> None:
    model, ids = tiny(), tokens(60)
    with small(model, cold_dir) as cache:
        feed(model, ids[:, :50], cache)
        ours = model.model.layers[1].self_attn.config
        model.model.layers[1].self_attn.config = copy.deepcopy(model.config)
        model.model.layers[1].self_attn.config._attn_implementation = "eager"
        with pytest.raises(HandleError):
            feed(model, ids[:, 50 : 50 + new], cache)
        model.model.layers[1].self_attn.config = ours
        assert_close(feed(model, ids[:, 50:], cache, [1]), oracle(ids)[:, 50:])


@pytest.mark.parametrize("start", ["tieredkv", "sdpa"])
def test_the_attention_implementation_is_switched_in_mid_conversation(cold_dir: Path, start: str) -> None:
    model, ids = tiny(), tokens(240)
    names = ["tieredkv", "sdpa", "eager", "tieredkv", "sdpa", "tieredkv"]
    with small(model.config, cold_dir) as cache:
        got = []
        model.set_attn_implementation(start)
        got.append(feed(model, ids[:, :60], cache, [30]))
        for number, name in enumerate(names):
            model.set_attn_implementation(name)
            part = ids[:, 60 + 30 * number : 90 + 30 * number]
            got.append(feed(model, part, cache, [1, 1, 10]))
        assert_close(torch.cat(got, 1), oracle(ids))


def test_the_model_gets_its_implementation_back() -> None:
    model = tiny()
    for name in ("sdpa", "eager"):
        model.set_attn_implementation(name)
        with small(model, None) as cache:
            assert model.config._attn_implementation == "tieredkv"
            feed(model, tokens(20), cache)
        assert model.config._attn_implementation == name
        cache.close()
        assert model.config._attn_implementation == name


def test_a_choice_of_the_user_after_the_cache_was_made_stays() -> None:
    model = tiny()
    with small(model, None):
        model.set_attn_implementation("eager")
    assert model.config._attn_implementation == "eager"


def test_a_config_leaves_the_choice_to_the_user() -> None:
    model = tiny()
    with small(model.config, None) as cache:
        assert model.config._attn_implementation == "sdpa"
        feed(model, tokens(20), cache)
        assert cache.mode == "gather"
        assert cache.fallback_reason is not None and "tieredkv" in cache.fallback_reason


@pytest.mark.parametrize("first_closed", [0, 1])
def test_two_caches_take_turns_on_one_model(cold_dir: Path, first_closed: int) -> None:
    model, ids = tiny(), [tokens(150, seed=1), tokens(150, seed=2)]
    caches = [small(model, cold_dir), small(model, cold_dir)]
    got: list[list[torch.Tensor]] = [[], []]
    for start, stop_at in [(0, 70), (70, 71), (71, 100), (100, 101)]:
        for some, cache, logits in zip(ids, caches, got, strict=True):
            logits.append(feed(model, some[:, start:stop_at], cache))
    caches[first_closed].close()
    other = 1 - first_closed
    got[other].append(feed(model, ids[other][:, 101:], caches[other], [1, 20]))
    caches[other].close()
    assert_close(torch.cat(got[other], 1), oracle(ids[other]))
    assert_close(torch.cat(got[first_closed], 1), oracle(ids[first_closed])[:, :101])
    assert model.config._attn_implementation == "sdpa"


def test_a_forward_without_a_cache_between_two_steps(cold_dir: Path) -> None:
    model, ids = tiny(), tokens(100)
    with small(model, cold_dir) as cache, torch.no_grad():
        feed(model, ids[:, :60], cache)
        other = tokens(30, rows=2, seed=4)
        assert_close(model(other, use_cache=False).logits, oracle(other))
        assert_close(feed(model, ids[:, 60:], cache, [1, 20]), oracle(ids)[:, 60:])
