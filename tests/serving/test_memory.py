"""What a server takes where it is not told: a share of the device, whoever uses it."""

from __future__ import annotations

from typing import Any

import pytest

from tieredkv.config import CacheSettings
from tieredkv.errors import ConfigError
from tieredkv.serving.memory import fill_memory

GIB = 2**30


class Memory:
    """A device of 100 GiB, of which 40 are in use."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def total_bytes(self) -> int:
        return 100 * GIB

    def free_bytes(self) -> int:
        return 60 * GIB


def fill(kind: str, utilization: float = 0.9, **sizes: Any) -> CacheSettings:
    device: Any = Memory(kind)
    return fill_memory(CacheSettings(**sizes), device, utilization)


def test_a_device_is_filled_up_to_the_share() -> None:
    assert fill("cuda").hot == 50 * GIB and fill("cuda").warm is None
    assert fill("cuda", 0.5, warm="8GiB").hot == 10 * GIB


def test_on_a_cpu_hot_and_warm_share_what_is_left() -> None:
    found = fill("cpu")
    assert (found.hot, found.warm) == (50 * GIB - 50 * GIB // 3, 50 * GIB // 3)
    found = fill("cpu", warm="8GiB")
    assert (found.hot, found.warm) == (42 * GIB, "8GiB")


def test_a_size_that_was_given_is_kept() -> None:
    assert fill("cpu", hot="1GiB").hot == "1GiB"


@pytest.mark.parametrize(
    ("utilization", "sizes", "message"),
    [
        (0.4, {}, "No memory is left"),
        (0.9, {"warm": "50GiB"}, "No memory is left"),
        (0.0, {}, "Not a share"),
        (1.5, {"hot": "1GiB"}, "Not a share"),
    ],
)
def test_what_cannot_be_is_refused(utilization: float, sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fill("cpu", utilization, **sizes)
