"""Host memory: how much there is, and pinned tensors with what they really take.

Imports nothing of the package.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger("tieredkv")

Allocate = Callable[[Sequence[int], torch.dtype], torch.Tensor]


def host_memory(root: Path = Path("/")) -> tuple[int, int]:
    """(free, total) bytes of host memory for this process, a control group's limit included.

    Without /proc both are the size of the memory, which is then an upper bound.
    """
    meminfo = root / "proc/meminfo"
    if not meminfo.exists():
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total, total
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    total, free = (int(fields[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    for group_free, group_total in _group_memory(root):
        free, total = min(free, group_free), min(total, group_total)
    return max(0, free), total


def _group_memory(root: Path) -> list[tuple[int, int]]:
    """(free, total) of each control group around this process that has a limit, version 2 and version 1."""
    found = []
    membership = root / "proc/self/cgroup"
    lines = membership.read_text().splitlines() if membership.exists() else []
    for number, controllers, path in (line.split(":", 2) for line in lines):
        if number == "0":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        inner = base / path.lstrip("/")
        # A container sees its own group at the base, whatever path the kernel names.
        for folder in dict.fromkeys([inner, *inner.parents, base]):
            if folder.is_relative_to(base):
                found += _limit(folder, *names)
    return found


def _limit(folder: Path, limit_name: str, usage_name: str, cached_key: str) -> list[tuple[int, int]]:
    """The free and total bytes of one control group, or nothing when it has no limit."""
    limit, usage, stat = (folder / name for name in (limit_name, usage_name, "memory.stat"))
    if not (limit.exists() and usage.exists()) or (text := limit.read_text().strip()) == "max":
        return []
    lines = stat.read_text().splitlines() if stat.exists() else []
    # Files that the group read count as used, and are given up when memory is wanted.
    cached = sum(int(line.split()[1]) for line in lines if line.split()[0] == cached_key)
    return [(int(text) - int(usage.read_text()) + cached, int(text))]


class Ledger:
    """Bytes of tensors that are alive, counted down when the last view of each is gone."""

    def __init__(self) -> None:
        self.live_bytes = 0
        self._lock = threading.RLock()  # re-entrant: a tensor may be collected inside any allocation

    def add(self, tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
        """Count `nbytes` for as long as the tensor's memory is alive; returns the tensor."""
        with self._lock:
            self.live_bytes += nbytes
        weakref.finalize(tensor.untyped_storage(), self._give_back, nbytes).atexit = False
        return tensor

    def _give_back(self, nbytes: int) -> None:
        with self._lock:
            self.live_bytes -= nbytes


def normal_empty(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str, pin: bool = False
) -> torch.Tensor:
    """An uninitialised tensor that may be written in inference mode and out of it."""
    with torch.inference_mode(False):
        return torch.empty(tuple(shape), dtype=dtype, device=device, pin_memory=pin)


def sent(numbers: Sequence[Any], device: torch.device) -> torch.Tensor:
    """Whole numbers, nested as they come, as int64 on a device, without a wait for what the device has to do before.

    Made on the host first: made on the device, each would stop the host.
    """
    return torch.tensor(numbers, dtype=torch.int64, device="cpu").to(device, non_blocking=True)


def pin(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A pinned tensor from torch's allocator. Raises RuntimeError when there is none to be had."""
    return normal_empty(shape, dtype, "cpu", pin=True)


SPARED_SHARE = 16
"""One part in so many of the host's memory is left free: what is pinned cannot be swapped out for anybody."""


class PinnedMemory:
    """Gives pinned tensors while the limit and the machine allow, pageable ones afterwards.

    Careful with a machine that says no: a size that was refused once is not asked for again, nor is a larger one.

    Args:
        limit_bytes: the most to pin at one time, or None for half of the host's memory.
        allocate: takes the pinned memory of one tensor; RuntimeError means that there is none.
        memory: (free, total) bytes of the host.
    """

    def __init__(
        self,
        limit_bytes: int | None = None,
        allocate: Allocate = pin,
        memory: Callable[[], tuple[int, int]] = host_memory,
    ) -> None:
        self.limit_bytes = memory()[1] // 2 if limit_bytes is None else limit_bytes
        self.failures: list[str] = []
        self._allocate, self._memory = allocate, memory
        self._ledger = Ledger()
        self._refused_bytes: int | None = None
        self._ranges: dict[int, int] = {}  # address -> bytes

    @property
    def pinned_bytes(self) -> int:
        """Bytes pinned and alive, rounded up as the allocator does."""
        return self._ledger.live_bytes

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor `shape` of host memory; why it cannot be pinned goes to `failures`, and the first is told."""
        nbytes = pinned_size(math.prod(shape) * dtype.itemsize)
        reason = self._reason_against(nbytes)
        if reason is None:
            try:
                tensor = self._allocate(shape, dtype)
            except RuntimeError as error:
                self._refused_bytes = nbytes
                reason = f"pinning {nbytes} bytes failed: {error}"
            else:
                start = tensor.data_ptr()
                self._ranges[start] = tensor.nbytes
                weakref.finalize(tensor.untyped_storage(), self._ranges.pop, start, None).atexit = False
                return self._ledger.add(tensor, nbytes)
        if not self.failures:
            logger.warning("tieredkv: memory is pageable where pinned was wanted, and copies more slowly: %s", reason)
        self.failures.append(reason)
        return normal_empty(shape, dtype, "cpu")

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in memory that was pinned here."""
        at = tensor.data_ptr()
        return any(start <= at < start + size for start, size in tuple(self._ranges.items()))

    def _reason_against(self, nbytes: int) -> str | None:
        if self.pinned_bytes + nbytes > self.limit_bytes:
            return f"{nbytes} bytes more would pass the limit of {self.limit_bytes} pinned bytes"
        if self._refused_bytes is not None and nbytes >= self._refused_bytes:
            return f"{nbytes} bytes were not asked for, since {self._refused_bytes} had been refused"
        free, total = self._memory()
        if nbytes > free - total // SPARED_SHARE:
            return f"{nbytes} bytes more would leave less than {total // SPARED_SHARE} of {free} free bytes"
        return None


def pinned_size(nbytes: int) -> int:
    """What torch's allocator of pinned memory takes for `nbytes`: the next power of two."""
    return 1 << (nbytes - 1).bit_length() if nbytes > 0 else 0
