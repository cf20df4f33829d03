"""How much memory a server takes where it is not told.

Imports: config, device, errors.
"""

from __future__ import annotations

import dataclasses

from tieredkv.config import CacheSettings, Size
from tieredkv.device import Device
from tieredkv.errors import ConfigError

WARM_SHARE = 3
"""On a CPU, where device and host memory are one, warm takes one part in so many."""


def fill_memory(settings: CacheSettings, device: Device, utilization: float) -> CacheSettings:
    """The settings with a hot size that was left open, after the weights are loaded.

    Args:
        settings: of the store.
        device: the computing device.
        utilization: share of the device's memory that may be used in all, whoever uses it. On a CPU hot and warm
            take what is left of it together.

    Raises:
        ConfigError: not a share, or it is used up already.
    """
    if not 0 < utilization <= 1:
        raise ConfigError(
            "Not a share of the memory.", wanted="above 0, at most 1", got=utilization, change="--memory-utilization"
        )
    if settings.hot is not None:
        return settings
    total, free = device.total_bytes(), device.free_bytes()
    room = int(utilization * total) - (total - free)
    warm = settings.warm
    if device.kind == "cpu":
        warm = max(room, 0) // WARM_SHARE if warm is None else warm
        room -= Size.parse(warm).bytes_ or 0
    if room <= 0:
        raise ConfigError(
            "No memory is left for the hot tier.",
            wanted=f"less than {utilization:g} of {total} bytes in use",
            got=f"{total - free} bytes in use",
            change="raise --memory-utilization, give --hot, or a smaller --warm",
        )
    return dataclasses.replace(settings, hot=room, warm=warm)
