"""Computing devices behind one small interface: CPU, CUDA, and a simulated accelerator for tests.

The only package that names torch.cuda. `base` is the interface; `worker` is what all three share; the other modules
are one thing each. Imports: errors.
"""

from __future__ import annotations

import torch

from tieredkv.device.base import Device, Lock, Region, Stream, Took, holds
from tieredkv.device.bounce import Bounce
from tieredkv.device.cpu import CpuDevice
from tieredkv.device.cuda import CudaDevice, has_flash
from tieredkv.device.event import Event
from tieredkv.device.ledger import LEDGER, Ledger
from tieredkv.device.memory import sent
from tieredkv.device.simulated import SimulatedAccelerator, Traced
from tieredkv.errors import ConfigError

__all__ = [
    "LEDGER",
    "Bounce",
    "CpuDevice",
    "CudaDevice",
    "Device",
    "Event",
    "Ledger",
    "Lock",
    "Region",
    "SimulatedAccelerator",
    "Stream",
    "Took",
    "Traced",
    "device_for",
    "has_flash",
    "holds",
    "sent",
]


def device_for(torch_device: torch.device | str) -> Device:
    """The device behind a torch device. Raises ConfigError for one that the cache does not serve."""
    wanted = torch.device(torch_device)
    if wanted.type == "cpu":
        return CpuDevice()
    if wanted.type == "cuda" and torch.cuda.is_available():
        return CudaDevice(wanted)
    raise ConfigError(
        "The model's keys and values are on a device that the cache does not serve.",
        wanted="cpu, or cuda where torch finds it",
        got=str(wanted),
        change="move the model to the CPU or to an NVIDIA GPU",
    )
