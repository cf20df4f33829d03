"""What attention tells the device that it reads: the simulated accelerator finds races in what it is told alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import store_of, tiny, tokens

import tieredkv
from tieredkv.device import SimulatedAccelerator
from tieredkv.hf.step import Member, StepCache

pytestmark = pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")

KERNELS = [("native", 16), ("flash", 16), ("flex", 16), ("flash", 8)]
"""Each with the dims of a model that it serves."""


class Told:
    """The regions of each operation of attention, in order."""

    def __init__(self, device: SimulatedAccelerator, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reads: list[tuple[str, set[Any]]] = []
        run = device.run

        def listening(work: Any, *, name: str = "", reads: Any = (), **rest: Any) -> Any:
            if name.startswith(("attend", "flex")):
                self.reads.append((name, set(reads)))
            return run(work, name=name, reads=reads, **rest)

        monkeypatch.setattr(device, "run", listening)

    def take(self) -> set[Any]:
        """Every region since the last call."""
        regions = {region for _, each in self.reads for region in each}
        self.reads.clear()
        return regions


@pytest.fixture
def device() -> Iterator[SimulatedAccelerator]:
    with SimulatedAccelerator(seed=0) as made:
        yield made


@pytest.mark.parametrize(("kernel", "dim"), KERNELS)
def test_every_hot_block_and_every_chunk(
    device: SimulatedAccelerator, monkeypatch: pytest.MonkeyPatch, cold_dir: Path, kernel: Any, dim: int
) -> None:
    model, told = tiny(head_dim=dim), Told(device, monkeypatch)
    settings = tieredkv.CacheSettings(kernel=kernel)
    with (
        torch.no_grad(),
        tieredkv.TieredCache(
            model,
            hot="128 tokens",
            warm="32 tokens",
            cold=cold_dir,
            block_size=16,
            window=32,
            device=device,
            settings=settings,
        ) as cache,
    ):
        so_far = 0
        for new in (100, 30, 1, 1):
            before = {block.id for row in _rows(cache) for block in row if block.hot is not None}
            model(tokens(new), past_key_values=cache)
            hot = {("hot", block.hot) for row in _rows(cache) for block in row if block.id in before}
            if new == 1:
                hot |= {("hot", block.hot) for row in _rows(cache) for block in row[-1:]}
            operations = {name for name, _ in told.reads}
            assert all(each for name, each in told.reads if name != "attend pools" or before)
            regions = told.take()
            assert {(role, slot) for role, slot in hot if slot is not None} <= regions
            streamed, so_far = so_far, cache.stats().decode.streamed_bytes + cache.stats().prefill.streamed_bytes
            assert any(region[0] == "stage" for region in regions) == (so_far > streamed)
            assert ("attend pools" in operations) == (kernel == "native")
        assert cache.stats().decode.streamed_bytes > 0 and cache.stats().prefill.streamed_bytes > 0


@pytest.mark.parametrize(("kernel", "dim"), KERNELS)
def test_every_cache_of_a_step(
    device: SimulatedAccelerator, monkeypatch: pytest.MonkeyPatch, kernel: Any, dim: int
) -> None:
    model, told = tiny(head_dim=dim), Told(device, monkeypatch)
    settings = tieredkv.CacheSettings(kernel=kernel)
    options: dict[str, Any] = {"hot": "1024 tokens", "warm": 0, "block_size": 16, "durable": False}
    with torch.no_grad(), tieredkv.KVStore(model, device=device, settings=settings, **options) as store:
        caches = [store.cache(tokens(count, seed=count)) for count in (70, 40, 20)]
        for cache, count in zip(caches, (70, 40, 20), strict=True):
            model(tokens(count, seed=count), past_key_values=cache)
        told.take()
        step = StepCache(model.config)
        for news in ((7, 1, 1), (1, 1, 1)):
            given = step.begin([Member(cache, tokens(new)[0]) for cache, new in zip(caches, news, strict=True)])
            past = {("hot", block.hot) for cache in caches for row in _rows(cache) for block in row if block.tokens}
            model(given.ids, position_ids=given.positions, past_key_values=step)
            step.end()
            assert past - told.take() == set()


def _rows(cache: Any) -> Any:
    """The blocks of each row, now."""
    store = cache.parts().store
    if store is None:
        return []
    with store_of(cache).lock:
        return [list(row) for row in cache.parts().holder.table]
