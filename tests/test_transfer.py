"""Moves: neighbours are copied and checked together, and what copies keep alive is bounded and let go."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support import audit, config_of, small, store_of

import tieredkv
from tieredkv import transfer
from tieredkv.block import Planes
from tieredkv.checksum import Checksummer
from tieredkv.device import SimulatedAccelerator
from tieredkv.tiers import NativeMoves, WarmTier

BLOCK = 16


def append(cache: tieredkv.TieredCache, count: int) -> list[torch.Tensor]:
    """One forward of both layers; returns what the model made, which nothing else refers to."""
    made = []
    for layer in range(2):
        k, v = torch.randn(1, 2, count, 8), torch.randn(1, 2, count, 8)
        made += [k, v]
        cache.update(k, v, layer, kwargs={})
    return made


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often blocks are written to warm, and summed up."""
    found = {"writes": 0, "sums": 0}
    real_write, real_sum = WarmTier.write, Checksummer.checksum

    def write(self: WarmTier, layer: int, slots: Sequence[int], planes: Planes, **rest: Any) -> None:
        found["writes"] += 1
        real_write(self, layer, slots, planes, **rest)

    def checksum(self: Checksummer, planes: Planes) -> torch.Tensor:
        found["sums"] += 1
        return real_sum(self, planes)

    monkeypatch.setattr(WarmTier, "write", write)
    monkeypatch.setattr(Checksummer, "checksum", checksum)
    return found


def test_neighbours_are_copied_and_checked_together(calls: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NativeMoves, "move", lambda *_, **__: None)  # as where a tier is no CPU's memory
    with small(config_of("llama"), None, hot="512 tokens", warm="512 tokens") as cache:
        append(cache, 10 * BLOCK)
        assert cache.demote("warm") == 10
        # In each layer one copy, one checksum where the blocks are born and one where they arrive.
        assert calls == {"writes": 2, "sums": 4}
        audit(cache)


def test_what_copies_keep_alive_is_bounded_and_let_go(cold_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "MAX_HELD_BYTES", 100_000)
    device = SimulatedAccelerator(latency_seconds=0.01)
    with small(config_of("llama"), cold_dir, warm=0, device=device) as cache:
        references: list[weakref.ref[torch.UntypedStorage]] = []
        largest = 0
        for _ in range(4):
            made = append(cache, 20 * BLOCK)
            largest = max(largest, *(2 * tensor.nbytes for tensor in made))
            references += [weakref.ref(tensor.untyped_storage()) for tensor in made]
            del made
        mover = store_of(cache).mover
        assert largest < mover.peak_held_bytes <= 100_000 + largest
        assert mover.held_bytes <= 100_000
        cache.crop(0)  # ends the last forward, which waits for its copies
        assert mover.held_bytes == 0
        gc.collect()
        assert [reference for reference in references if reference() is not None] == []
        assert device.clocks.races == 0
