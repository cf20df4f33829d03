"""The CPU as computing device: copies on worker threads, computing inline on the calling thread.

Imports: device.base, device.event, device.memory, device.worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from tieredkv.device.base import Region
from tieredkv.device.event import Event, settled_event
from tieredkv.device.memory import host_memory, normal_empty
from tieredkv.device.worker import WorkerDevice, WorkerStream

T = TypeVar("T")


class CpuDevice(WorkerDevice):
    """Device memory is host memory, nothing is pinned, and what `run` returned is computed."""

    copies_aside = False

    def __init__(self) -> None:
        super().__init__(WorkerStream("up"), WorkerStream("down"), WorkerStream("disk"))
        self.kind = "cpu"
        self.torch_device = torch.device("cpu")
        self.addresses_host = True

    def run(
        self,
        work: Callable[[], T],
        *,
        name: str = "",
        reads: Sequence[Region] = (),
        writes: Sequence[Region] = (),
        after: Sequence[Event] = (),
    ) -> T:
        for event in after:
            event.wait()
        return work()

    def record(self) -> Event:
        return settled_event(Event("record"))

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return normal_empty(shape, dtype, "cpu")

    def host_empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return normal_empty(shape, dtype, "cpu")

    def free_bytes(self) -> int:
        return host_memory()[0]

    def total_bytes(self) -> int:
        return host_memory()[1]
