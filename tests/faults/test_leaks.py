"""Caches that were made, used and closed, or dropped, leave nothing: no memory, threads, files or pinned bytes."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from support import generate, small, tiny, tokens

from tieredkv import ColdSettings
from tieredkv.device import LEDGER, SimulatedAccelerator
from tieredkv.errors import TieredKVError

KINDS = ("TieredCache", "BlockStore", "Holder", "Block", "Worker", "Event", "ClockedEvent", "Move", "SpillFiles")
LEFT_BYTES = 24 << 20
"""What an allocator may keep, over all cycles of the second half."""


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def census() -> Counter[str]:
    """How many of the package's objects, and of tensors, there are."""
    gc.collect()
    found: Counter[str] = Counter()
    for thing in gc.get_objects():
        kind = type(thing)
        if str(kind.__module__).startswith("tieredkv") and kind.__name__ in KINDS:
            found[kind.__name__] += 1
        elif kind is torch.Tensor:
            found["Tensor"] += 1
    return found


def our_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("tieredkv")]


class Cycles:
    """One model, used with one cache after the other."""

    def __init__(self, folder: Path) -> None:
        self.model, self.folder = tiny(), folder
        self.number = 0

    def go(self) -> None:
        """Make, generate, and close or drop; each way of ending has its turn."""
        number, self.number = self.number, self.number + 1
        device = SimulatedAccelerator(seed=number) if number % 5 == 4 else None
        target = self.model if number % 2 else self.model.config
        cold = ColdSettings(self.folder, free_floor=0)
        cache = small(target, cold, device=device, codec="int8" if number % 3 == 1 else "raw")
        generate(self.model, tokens(120, seed=number), cache, new=3)
        if number % 7 == 3:
            self.break_off(cache)
        if number % 4 == 2:
            cache.promote()
        if number % 3:
            cache.close()
        del cache
        if device is not None:
            assert device.clocks.races == 0
            if number % 25 == 4:
                gc.collect()
                assert device.pinned_bytes == 0

    def break_off(self, cache: object) -> None:
        """A forward that ends between two layers."""

        def stop(*_: object) -> None:
            raise InterruptedError

        hook = self.model.model.layers[1].register_forward_pre_hook(stop)
        with pytest.raises((InterruptedError, TieredKVError)), torch.no_grad():
            self.model(tokens(20), past_key_values=cache)
        hook.remove()


def run(cycles: Cycles, count: int) -> None:
    for _ in range(count // 2):
        cycles.go()
    before, files, promised = census(), descriptors(), LEDGER.promised_bytes("cpu")
    memory = resident_bytes()
    for _ in range(count - count // 2):
        cycles.go()
    after = census()
    grown = resident_bytes() - memory
    wait_for_threads()
    assert our_threads() == []
    assert descriptors() <= files
    assert LEDGER.promised_bytes("cpu") == promised
    assert list(cycles.folder.iterdir()) == []
    assert {kind: count for kind, count in after.items() if count > before[kind]} == {}
    assert grown < LEFT_BYTES, f"{grown} bytes more after {count - count // 2} caches"


def wait_for_threads() -> None:
    """A dropped cache's threads end by themselves."""
    stop = time.monotonic() + 5
    while our_threads() and time.monotonic() < stop:
        time.sleep(0.01)


def test_a_hundred_caches_leave_nothing(cold_dir: Path) -> None:
    run(Cycles(cold_dir), 100)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_thousand_caches_leave_nothing(cold_dir: Path) -> None:
    run(Cycles(cold_dir), 2000)
