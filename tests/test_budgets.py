"""Budgets, measured from outside: bytes of tensor storages and of files, at every layer of every forward."""

from __future__ import annotations

import collections
import gc
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import DIM, assert_close, audit, feed, locations, oracle, small, store_of, tiny, tokens
from torch.utils._python_dispatch import TorchDispatchMode

import tieredkv
from tieredkv.device import SimulatedAccelerator

HOT_TOKENS, WARM_TOKENS = 96, 64
CONTEXT = 16 * HOT_TOKENS
TOKEN_BYTES = 2 * 2 * 2 * DIM * 4  # layers, K and V, heads, dim, fp32


def storage_bytes(roots: Iterable[object], stop: Iterable[object] = ()) -> int:
    """Bytes of the distinct tensor storages that can be reached from some objects without passing through others."""
    seen = {id(thing) for thing in stop}
    storages: dict[int, int] = {}
    queue = collections.deque(roots)
    while queue:
        thing = queue.popleft()
        if id(thing) in seen or isinstance(thing, type | types.ModuleType | types.FunctionType):
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        else:
            queue.extend(gc.get_referents(thing))
    return sum(storages.values())


def file_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


class Meter:
    """Wraps a cache's `update` and measures before and after each layer."""

    def __init__(self, cache: tieredkv.TieredCache, cold: Path) -> None:
        self.hot: list[int] = []
        self.warm: list[int] = []
        self.cold: list[int] = []
        self._cache, self._folder = cache, cold
        self._update = cache.update
        cache.update = self._watched  # type: ignore[method-assign]

    def _watched(self, *arguments: Any, **keywords: Any) -> Any:
        result = self._update(*arguments, **keywords)
        self.measure()
        return result

    def measure(self) -> None:
        store = store_of(self._cache)
        stop = [store.device, store.mover]  # the mover knows the other tiers
        self.hot.append(storage_bytes([store.hot, store.prefetcher._buffers], stop=stop))
        self.warm.append(storage_bytes([store.warm], stop=[store.device]))
        self.cold.append(file_bytes(self._folder))


def test_the_measure_sees_what_there_is() -> None:
    one, two = torch.zeros(10), torch.zeros(5, dtype=torch.float64)
    holder = types.SimpleNamespace(a=[one, one[2:]], b={"x": (two.view(5, 1),)})
    assert storage_bytes([holder]) == 40 + 40
    assert storage_bytes([holder], stop=[holder.a]) == 40


@pytest.mark.parametrize("kind", ["cpu", "simulated"])
@pytest.mark.parametrize("codec", ["raw", "fp8"])
@pytest.mark.parametrize("way", ["blocks", "gather"])
def test_a_context_of_16_times_the_hot_budget(cold_dir: Path, way: str, codec: str, kind: str) -> None:
    model, ids = tiny(), tokens(CONTEXT)
    cap = 4 * CONTEXT * TOKEN_BYTES
    device = SimulatedAccelerator(max_delay_seconds=0.0005) if kind == "simulated" else None
    cache = small(
        model if way == "blocks" else model.config,
        tieredkv.ColdSettings(cold_dir, cap=cap, free_floor=0),
        hot=HOT_TOKENS * TOKEN_BYTES,
        warm=WARM_TOKENS * TOKEN_BYTES,
        codec=codec,
        device=device,
    )
    with cache:
        meter = Meter(cache, cold_dir)
        logits = feed(model, ids, cache, [CONTEXT // 2, 1, 1, 1, CONTEXT // 4, *[1] * 4])
        meter.measure()
        wanted = oracle(ids)
        if codec == "raw":
            assert_close(logits, wanted)
        stats = cache.stats()
        assert stats.mode == way
        assert set(locations(cache)) == {"hot", "warm", "cold"}
        assert 0 < max(meter.hot) <= HOT_TOKENS * TOKEN_BYTES
        assert 0 < max(meter.warm) <= WARM_TOKENS * TOKEN_BYTES
        assert 0 < max(meter.cold) <= cap
        # What the cache says of itself is what is seen from outside.
        assert max(meter.hot) <= stats.hot.reserved_bytes <= HOT_TOKENS * TOKEN_BYTES
        assert stats.hot.peak_bytes <= stats.hot.reserved_bytes
        assert max(meter.warm) == stats.warm.reserved_bytes
        assert max(meter.cold) == stats.cold.reserved_bytes
        assert stats.cold.peak_bytes >= (CONTEXT - HOT_TOKENS - WARM_TOKENS * 8) * TOKEN_BYTES // 8
        audit(cache)
    assert file_bytes(cold_dir) == 0


class LargestTensor(TorchDispatchMode):
    """Notes the largest storage that an operation of this thread returned."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not any(isinstance(a, torch.nn.Parameter) for a in args):
            self.nbytes = max(self.nbytes, result.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("kind", ["cpu", "simulated"])
def test_attention_over_blocks_makes_nothing_as_large_as_the_context(cold_dir: Path, kind: str) -> None:
    """Gather's transient is one layer's K and V, and is reported; blocks have none."""
    model, ids = tiny(), tokens(CONTEXT + 8)
    layer_bytes = CONTEXT * TOKEN_BYTES // 2
    largest = {}
    for way in ("blocks", "gather"):
        device = SimulatedAccelerator() if kind == "simulated" else None
        with small(model, cold_dir, device=device) as cache:
            if way == "gather":
                model.set_attn_implementation("sdpa")
            feed(model, ids[:, :CONTEXT], cache)
            before = cache.stats().gather_peak_bytes
            with LargestTensor() as mode:
                feed(model, ids[:, CONTEXT:], cache, [1] * 8)
            largest[way] = mode.nbytes
            gathered = cache.stats().gather_peak_bytes
            assert gathered == before == 0 if way == "blocks" else gathered >= layer_bytes
    assert largest["gather"] >= layer_bytes // 2
    assert largest["blocks"] <= max(HOT_TOKENS * TOKEN_BYTES, layer_bytes // 8)


def test_sizes_in_tokens_are_for_each_row(cold_dir: Path) -> None:
    model = tiny()
    for rows in (1, 3):
        with small(model, cold_dir) as cache:
            feed(model, tokens(20, rows=rows), cache)
            stats = cache.stats()
            assert stats.hot.budget_bytes == 96 * TOKEN_BYTES * rows
            assert stats.warm.budget_bytes == 32 * TOKEN_BYTES * rows


def test_a_capped_cold_tier_keeps_its_files_below_the_cap(cold_dir: Path) -> None:
    model, ids = tiny(), tokens(300)
    with small(model, tieredkv.ColdSettings(cold_dir, cap="320 tokens", free_floor=0)) as cache:
        assert_close(feed(model, ids, cache, [200, 1, 1]), oracle(ids))
        budget = cache.stats().cold.budget_bytes
        assert budget is not None
        assert file_bytes(cold_dir) <= budget


def test_defaults_fit_the_machine() -> None:
    model, ids = tiny(), tokens(40)
    with tieredkv.TieredCache(model) as cache:
        assert_close(feed(model, ids, cache, [30, 1]), oracle(ids))
        stats = cache.stats()
        device = store_of(cache).device
        assert stats.hot.budget_bytes is not None and stats.warm.budget_bytes is not None
        assert 0 < stats.hot.budget_bytes <= device.total_bytes() // 2
        assert 0 < stats.warm.budget_bytes <= device.total_bytes() // 4
        assert stats.cold.budget_bytes == 0
        assert stats.window_tokens == 2048
