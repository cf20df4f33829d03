"""How much host memory there is, and pinned memory that may not be had."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tieredkv.device import CpuDevice, SimulatedAccelerator
from tieredkv.device.memory import Ledger, PinnedMemory, host_memory, normal_empty, pinned_size

MEMINFO = "MemTotal:  1000 kB\nMemFree: 100 kB\nMemAvailable:  700 kB\n"


def tree(root: Path, files: dict[str, object]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(str(text))
    return root


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({}, (700 * 1024, 1000 * 1024)),
        (
            {
                "proc/self/cgroup": "0::/user/job\n",
                "sys/fs/cgroup/user/memory.max": 500 * 1024,
                "sys/fs/cgroup/user/memory.current": 300 * 1024,
                "sys/fs/cgroup/user/memory.stat": "file 9\ninactive_file 1024\n",
                "sys/fs/cgroup/user/job/memory.max": "max\n",
                "sys/fs/cgroup/user/job/memory.current": 0,
            },
            (201 * 1024, 500 * 1024),
        ),
        (
            {
                "proc/self/cgroup": "5:freezer:/\n4:cpu,memory:/docker/abc\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": 400 * 1024,
                "sys/fs/cgroup/memory/memory.usage_in_bytes": 500 * 1024,
            },
            (0, 400 * 1024),
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": 2**63 - 4096,
                "sys/fs/cgroup/memory/memory.usage_in_bytes": 0,
            },
            (700 * 1024, 1000 * 1024),
        ),
    ],
    ids=["no groups", "version 2", "version 1 in a container", "version 1 without a limit"],
)
def test_host_memory_is_the_smallest_of_what_limits_it(
    tmp_path: Path, files: dict[str, object], wanted: tuple[int, int]
) -> None:
    assert host_memory(tree(tmp_path, {"proc/meminfo": MEMINFO, **files})) == wanted


def test_host_memory_without_proc_is_the_machine(tmp_path: Path) -> None:
    free, total = host_memory(tmp_path)
    assert free == total >= host_memory()[1] > 0


def test_the_cpu_offers_what_the_host_has() -> None:
    with CpuDevice() as device:
        assert 0 < device.free_bytes() <= device.total_bytes() == host_memory()[1]
        assert 0 < device.host_free_bytes() <= device.total_bytes()
        assert (device.pinned_bytes, device.pin_failures) == (0, ())


@pytest.mark.parametrize(("nbytes", "taken"), [(0, 0), (1, 1), (2, 2), (3, 4), (1024, 1024), (1025, 2048)])
def test_pinned_memory_comes_in_powers_of_two(nbytes: int, taken: int) -> None:
    assert pinned_size(nbytes) == taken


def test_bytes_count_until_the_last_view_is_gone() -> None:
    ledger = Ledger()
    view = ledger.add(torch.empty(10), 40)[2:]
    gc.collect()
    assert ledger.live_bytes == 40
    del view
    assert ledger.live_bytes == 0


def test_memory_that_cannot_be_pinned_is_pageable_with_the_reason() -> None:
    def refuse(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        raise RuntimeError("out of locked pages")

    pinned = PinnedMemory(1 << 20, refuse)
    tensor = pinned.empty((4, 3), torch.float16)
    assert (tensor.shape, tensor.dtype, pinned.pinned_bytes) == ((4, 3), torch.float16, 0)
    assert pinned.failures == ["pinning 32 bytes failed: out of locked pages"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="pinning works here")
def test_pinning_without_an_accelerator_falls_back() -> None:
    pinned = PinnedMemory(1 << 20)
    assert pinned.empty((8,), torch.float32).shape == (8,)
    assert len(pinned.failures) == 1


def test_a_size_that_was_refused_is_not_asked_for_again_nor_a_larger_one() -> None:
    asked: list[int] = []

    def refuse_large(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        asked.append(shape[0])
        if shape[0] > 64:
            raise RuntimeError("no more")
        return normal_empty(shape, dtype, "cpu")

    pinned = PinnedMemory(1 << 20, refuse_large)
    kept = [pinned.empty((count,), torch.uint8) for count in (64, 256, 256, 512, 32, 128)]
    assert asked == [64, 256, 32, 128]
    assert [pinned.holds(tensor) for tensor in kept] == [True, False, False, False, True, False]
    assert len(pinned.failures) == 4 and "had been refused" in pinned.failures[1]


def test_pinning_leaves_a_share_of_the_memory_free() -> None:
    free = [1000]

    def take(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        free[0] -= shape[0]
        return normal_empty(shape, dtype, "cpu")

    pinned = PinnedMemory(10_000, take, lambda: (free[0], 1600))
    kept = [pinned.empty((512,), torch.uint8), pinned.empty((512,), torch.uint8), pinned.empty((256,), torch.uint8)]
    assert [pinned.holds(tensor) for tensor in kept] == [True, False, True]
    assert "100 of 488 free bytes" in pinned.failures[0]


def test_pinned_memory_stops_at_its_limit_and_comes_back() -> None:
    pinned = PinnedMemory(100, lambda shape, dtype: normal_empty(shape, dtype, "cpu"))
    first = pinned.empty((64,), torch.uint8)
    second = pinned.empty((33,), torch.uint8)
    assert pinned.pinned_bytes == 64 and len(pinned.failures) == 1
    assert "limit of 100" in pinned.failures[0]
    del first
    third = pinned.empty((33,), torch.uint8)
    assert pinned.pinned_bytes == 64 and len(pinned.failures) == 1
    del second, third
    assert pinned.pinned_bytes == 0
    assert PinnedMemory().limit_bytes == host_memory()[1] // 2


def test_the_simulated_accelerator_pins_and_runs_out() -> None:
    with SimulatedAccelerator(memory_bytes=1000, pin_limit_bytes=64) as device:
        host = device.host_empty((15,), torch.float32)
        assert device.pinned_bytes == pinned_size(60) == 64
        device.host_empty((1,), torch.float32)
        assert len(device.pin_failures) == 1
        first = device.empty((200,), torch.float32)
        assert first.isnan().all() and host.isnan().all()
        assert (device.free_bytes(), device.total_bytes()) == (200, 1000)
        with pytest.raises(torch.OutOfMemoryError, match="200 of 1000"):
            device.empty((51,), torch.float32)
        del first
        assert device.free_bytes() == 1000
