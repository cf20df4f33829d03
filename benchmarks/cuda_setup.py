"""What the decode question on a GPU measures with: sizes, time left, bandwidths, and models that are made once.

Imports: this package's shapes; tieredkv, torch, transformers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Iterator
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig

from benchmarks import shapes
from benchmarks.shapes import two_models, wait
from tieredkv import CacheSettings, TieredCache, sizing
from tieredkv.device import CudaDevice, Device
from tieredkv.device.memory import host_memory

BUDGET_SECONDS = 8 * 60
RESERVE_SECONDS = 20
WINDOWS = (512, 1024, 2048, 4096)
HOST_BYTES = 48 << 30
"""What the largest part takes of host memory, pinned, and some more."""


@dataclasses.dataclass(frozen=True)
class Scale:
    """Sizes of a run: the real ones, or small ones that only show that the code works.

    Args:
        device: to measure.
        dtype: of the models.
        configs: by name.
        contexts: tokens.
        longest: tokens of the longest one.
        windows: tokens that stay hot.
        beyond: tokens for which hot has room beside the window, staging included.
        rounds: of interleaved measurements.
    """

    device: torch.device
    dtype: torch.dtype
    configs: dict[str, LlamaConfig]
    contexts: tuple[int, ...]
    longest: int
    windows: tuple[int, ...]
    beyond: int
    rounds: int

    @classmethod
    def of(cls, device: str, quick: bool) -> Scale:
        """The sizes for a device."""
        if quick:
            tiny = shapes.llama3_8b_config(2)
            tiny.hidden_size, tiny.intermediate_size = 256, 512
            tiny.num_attention_heads, tiny.num_key_value_heads, tiny.head_dim = 4, 2, 64
            return cls(torch.device(device), torch.float32, {"tiny": tiny}, (1536,), 2048, (256,), 768, 2)
        # The larger one first: its figures say most, should the time run out.
        configs = {"8B": shapes.llama3_8b_config(32), "1.5B": shapes.qwen25_15b_config()}
        return cls(torch.device(device), torch.bfloat16, configs, (16384, 32768), 65536, WINDOWS, 3072, 5)


class Clock:
    """Says whether there is time for more."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    @property
    def left_seconds(self) -> float:
        """Until the budget ends."""
        return BUDGET_SECONDS - RESERVE_SECONDS - (time.monotonic() - self._started)


class Bench:
    """One run: its sizes, its clock, the bandwidths it measured, and the models of one config at a time.

    Args:
        scale: sizes.

    Attributes:
        pinned_bytes_per_second: from pinned host memory to the device, the best of several copies.
        device_bytes_per_second: inside the device's memory, read and written counted both.
    """

    def __init__(self, scale: Scale) -> None:
        self.scale, self.clock = scale, Clock()
        self.is_gpu = scale.device.type == "cuda"
        self.pinned_bytes_per_second = self.device_bytes_per_second = 1.0
        self._models: tuple[str, Any, Any] | None = None

    def device(self) -> Device | None:
        """For one cache, which closes it; None on a CPU."""
        # The machine's memory may grow as it is used: its size now says nothing about what can be pinned.
        return CudaDevice(self.scale.device, pin_limit_bytes=HOST_BYTES) if self.is_gpu else None

    def measure(self) -> None:
        """Take the bandwidths, both ways in one pass of several copies."""
        size = 2**30 if self.is_gpu else 2**26
        host = torch.empty(size, dtype=torch.uint8, pin_memory=self.is_gpu)
        there, beside = (torch.empty(size, dtype=torch.uint8, device=self.scale.device) for _ in range(2))
        up = inside = float("inf")
        for _ in range(5):
            up = min(up, self._seconds(there, host))
            inside = min(inside, self._seconds(beside, there))
        self.pinned_bytes_per_second, self.device_bytes_per_second = size / up, 2 * size / inside

    def _seconds(self, target: torch.Tensor, source: torch.Tensor) -> float:
        wait(self.scale.device)
        started = time.perf_counter()
        target.copy_(source, non_blocking=True)
        wait(self.scale.device)
        return time.perf_counter() - started

    def models(self, name: str) -> tuple[Any, Any]:
        """(SDPA, attention over blocks) over the same weights: made once for each run of parts of one config."""
        if self._models is None or self._models[0] != name:
            self._models = None  # before the next ones are made
            self._models = (name, *two_models(self.scale.configs[name], self.scale.dtype, self.scale.device))
        return self._models[1:]

    @contextlib.contextmanager
    def ours(self, name: str, tokens: int, **options: Any) -> Iterator[TieredCache]:
        """A filled cache of ours, which streams what is not hot on a CPU too."""
        settings = dataclasses.replace(options.pop("settings", CacheSettings()), read_in_place=False)
        with TieredCache(self.models(name)[1], device=self.device(), settings=settings, **options) as cache:
            self.fill(cache, name, tokens)
            yield cache

    def fill(self, cache: DynamicCache, name: str, tokens: int) -> None:
        """Random K and V of so many tokens."""
        shapes.fill(cache, self.scale.configs[name], tokens, self.scale.dtype, device=self.scale.device)

    def planned(self, name: str, tokens: int, hot_bytes: int, warm_bytes: int) -> sizing.Plan:
        """What `plan` says of a context on a device with so much room for keys and values, at these bandwidths."""
        predict = functools.partial(
            sizing.plan,
            self.scale.configs[name],
            tokens,
            1,
            host_memory_bytes=warm_bytes,
            disk_bytes=0,
            dtype=self.scale.dtype,
            block_size=CacheSettings().block_size,
            rates=sizing.Rates(self.pinned_bytes_per_second, device_bytes_per_second=self.device_bytes_per_second),
        )
        # Part of what a device keeps back grows with it: the room for keys and values is a line, found by two points.
        one, two = (predict(terabytes * 10**12).device.left_bytes for terabytes in (1, 2))
        return predict(10**12 + (hot_bytes - one) * 10**12 // (two - one))


def grow_host_memory() -> dict[str, int]:
    """Touch host memory where there seems to be little: some machines are given more only as they use it.

    Returns:
        free and total bytes before and after.
    """
    before, held = host_memory(), list[torch.Tensor]()
    while host_memory()[1] < HOST_BYTES and host_memory()[0] > 3 << 29 and len(held) < HOST_BYTES >> 29:
        held.append(torch.full((1 << 29,), 1, dtype=torch.uint8))
        time.sleep(0.01)
    after = host_memory()
    return {"free": before[0], "total": before[1], "free_after": after[0], "total_after": after[1]}
