"""Forwards that break off anywhere, or in which a method of the cache is called: what follows is right or refused."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models.shrink import SMALL, WIDE, tiny_config, tiny_model
from support import MODELS, SIZES, assert_close, feed, small, tiny, tokens

import tieredkv
from tieredkv.errors import HandleError, MismatchError, PositionError

ROUGH = 3e-4  # linear attention in pieces rounds otherwise
PAST, WHOLE = 20, 26
FULL, LINEAR, SLIDING = "full_attention", "linear_attention", "sliding_attention"

ORDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "state last": ("qwen3next", {"layer_types": [FULL, LINEAR]}),
    "states on both sides": ("qwen3next", {"layer_types": [LINEAR, FULL, LINEAR], "num_hidden_layers": 3}),
    "convolution last": ("lfm2", {"layer_types": ["conv", FULL, "conv"], "num_hidden_layers": 3}),
    "window last": ("gemma3", {"layer_types": [SLIDING, FULL, SLIDING], "num_hidden_layers": 3}),
}
STATES = [
    "jamba",
    "granitemoehybrid",
    "nemotron_h",
    "falcon_h1",
    "state last",
    "states on both sides",
    "convolution last",
]
"""Models whose states cannot go back."""


class Stop(Exception):
    """Raised in the middle of a forward."""


@functools.lru_cache(maxsize=2)
def model_of(name: str) -> Any:
    name, changes = ORDERS.get(name, (name, {}))
    if name in MODELS:
        return tiny(name, **changes)
    changes = {"sliding_window": 8} if name == "starcoder2" else changes
    try:
        return tiny_model(tiny_config(name, WIDE | changes))
    except Exception:
        return tiny_model(tiny_config(name, SMALL | changes))


@functools.lru_cache(maxsize=4)
def wanted_of(name: str) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model_of(name)(tokens(WHOLE), use_cache=False).logits
    return logits


def places(model: Any) -> Iterator[torch.nn.Module]:
    """Every part of the model that has no parts."""
    return (module for module in model.modules() if not list(module.children()))


def stop(*_: Any) -> None:
    raise Stop


def break_off(model: Any, place: torch.nn.Module, ids: torch.Tensor, cache: Any) -> bool:
    """Whether a forward broke off there; its attention may not need the place."""
    hook = place.register_forward_pre_hook(stop)
    try:
        feed(model, ids, cache)
    except Stop:
        return True
    finally:
        hook.remove()
    return False


def goes_on_right(name: str, cache: Any, to: int = WHOLE) -> None:
    """From where it says that it is."""
    length = cache.get_seq_length()
    pieces = [1] * 3 if length else [PAST, 1, 1]  # some models' prefills are exact in one piece alone
    logits = feed(model_of(name), tokens(WHOLE)[:, length : min(to, length + sum(pieces))], cache, pieces)
    to = length + logits.shape[1]
    assert_close(logits, wanted_of(name)[:, length:to], f"from {length} on", ROUGH)


CASES = [(name, past, new) for name in (*ORDERS, "llama", "mistral") for past, new in ((0, 5), (PAST, 1), (PAST, 5))]
CASES += [(name, PAST, 1) for name in (*STATES[:-3], "gptoss", "starcoder2")]


@pytest.mark.parametrize(("name", "past", "new"), CASES)
def test_after_a_break_the_next_forward_is_right_or_refused(cold_dir: Path, name: str, past: int, new: int) -> None:
    model, ids = model_of(name), tokens(WHOLE)
    broke = refused = 0
    for place in places(model):
        with small(model, None) as cache:
            feed(model, ids[:, : max(past - 1, 0)], cache)
            feed(model, ids[:, max(past - 1, 0) : past], cache)
            broke += break_off(model, place, ids[:, past : past + new], cache)
            try:
                goes_on_right(name, cache)
            except MismatchError as error:
                assert "reset" in error.change
                refused += 1
                cache.reset()
                goes_on_right(name, cache)
    assert broke > 5
    assert bool(refused) == (name in STATES and (past > 0 or refused > 0))


def through_file(cache: Any, folder: Path) -> Any:
    cache.save(folder / "session")
    return tieredkv.TieredCache.load(folder / "session", cache._attachment.model(), **SIZES)


EXPORTS: dict[str, Callable[[Any, Path], Any]] = {
    "deepcopy": lambda cache, _: copy.deepcopy(cache),
    "pickle": lambda cache, _: pickle.loads(pickle.dumps(cache)),
    "save": through_file,
    "to_dynamic": lambda cache, _: cache.to_dynamic(),
}


@pytest.mark.parametrize("how", EXPORTS)
@pytest.mark.parametrize("past", [0, PAST])
@pytest.mark.parametrize("name", ["states on both sides", "convolution last", "mistral"])
def test_what_is_handed_out_after_a_break_is_right_or_refused(tmp_path: Path, name: str, past: int, how: str) -> None:
    model, ids = model_of(name), tokens(WHOLE)
    for place in places(model):
        with small(model, None) as cache:
            feed(model, ids[:, :past], cache)
            break_off(model, place, ids[:, past : past + 1 if past else 5], cache)
            try:
                twin = EXPORTS[how](cache, tmp_path)
            except MismatchError as error:
                assert "reset" in error.change
                assert name in STATES
                continue
            goes_on_right(name, twin)
            goes_on_right(name, cache)
            if how != "to_dynamic":
                twin.close()


@pytest.mark.parametrize("call", ["deepcopy", "demote", "reset"])
@pytest.mark.parametrize(("past", "new"), [(0, 3), (PAST, 1)])
@pytest.mark.parametrize("name", [*ORDERS, "llama", "gptoss", "mistral"])
def test_a_method_that_is_called_while_a_forward_runs(name: str, past: int, new: int, call: str) -> None:
    """The forward ends as it would have, or is refused; and so is what comes after it."""
    model, ids = model_of(name), tokens(WHOLE)
    calls: dict[str, Callable[[Any], object]] = {
        "deepcopy": lambda cache: copy.deepcopy(cache).close(),
        "demote": lambda cache: cache.demote(),
        "reset": lambda cache: cache.reset(),
    }
    for place in places(model):
        with small(model, None) as cache:
            feed(model, ids[:, :past], cache)

            def use(*_: Any, cache: Any = cache) -> None:
                calls[call](cache)

            hook = place.register_forward_hook(use)
            try:
                got = feed(model, ids[:, past : past + new], cache)
                if call != "reset":  # what it sees is gone
                    assert_close(got, wanted_of(name)[:, past : past + new], "the forward itself", ROUGH)
            except (MismatchError, HandleError, PositionError):
                pass
            except RuntimeError:
                assert call == "reset"  # the mask is of the tokens that there were
            finally:
                hook.remove()
            if call == "reset" and cache.get_seq_length() == new:
                cache.reset()  # it came before the forward's first update
            for _ in range(2):
                try:
                    goes_on_right(name, cache, cache.get_seq_length() + new)
                except (MismatchError, PositionError) as error:
                    assert "reset" in error.change or "again" in error.change
                    cache.reset()
            goes_on_right(name, cache)


def test_a_model_with_states_outside_of_the_cache_goes_on() -> None:
    """RecurrentGemma keeps its states in its modules, and tells the cache of its windows alone."""
    model, wanted = model_of("recurrent_gemma"), wanted_of("recurrent_gemma")
    with small(model, None) as cache:
        assert_close(feed(model, tokens(WHOLE), cache, [PAST, 1, 1, 1, 1, 1]), wanted, tolerance=ROUGH)


@torch.no_grad()
def test_a_model_with_states_alone_is_right_until_a_break_and_then_refused() -> None:
    model, ids, wanted = model_of("mamba"), tokens(WHOLE), wanted_of("mamba")

    def feed_on(cache: Any, first: int, last: int) -> None:
        assert_close(model(ids[:, first:last], cache=cache).logits, wanted[:, first:last], tolerance=ROUGH)

    with small(model, None) as cache:
        for _ in range(2):
            feed_on(cache, 0, PAST)
            feed_on(cache, PAST, PAST + 1)
            feed_on(cache, PAST + 1, PAST + 2)
            hook = model.backbone.layers[1].mixer.register_forward_pre_hook(stop)
            with pytest.raises(Stop):
                feed_on(cache, PAST + 2, PAST + 3)
            hook.remove()
            with pytest.raises(MismatchError, match="broke off"):
                copy.deepcopy(cache)
            with pytest.raises(MismatchError, match="broke off"):
                feed_on(cache, PAST + 2, PAST + 3)
            cache.reset()


def test_a_state_that_an_earlier_forward_did_not_come_to_is_refused() -> None:
    model, ids = model_of("state last"), tokens(WHOLE)
    with small(model, None) as cache:
        feed(model, ids[:, :PAST], cache)
        cache._others.reset()
        with pytest.raises(MismatchError, match="did not come to"):
            feed(model, ids[:, PAST:], cache)
