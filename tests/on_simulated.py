"""The tests on the simulated accelerator, with `make simulated`: every cache that was given no device gets one.

Its copies come late and in an order of their own, and at the end of each test no two accesses were without an order.

Imports tieredkv only when it is used, so that the tests decide themselves when the package is imported.
"""

from __future__ import annotations

import contextlib
import os
import random
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch

    from tieredkv.device import Device
    from tieredkv.device.clocks import Clocks

IS_ASKED_FOR = os.environ.get("TIEREDKV_TEST_DEVICE") == "simulated"

MAX_DELAY_SECONDS = 0.0005

OF_THE_CPU = {
    "test_bad_input.py::test_caches_on_one_device_together_never_exceed_it": "its memory, which all caches share",
    "test_budgets.py::test_defaults_fit_the_machine": "the sizes are a share of its memory",
    "test_cache.py::test_kernels_and_reading_in_place[True": "it attends what lies in warm without a copy",
    "test_arrival.py::test_what_arrives_as_other_bytes_is_written_once_more[0-True": "there a block goes in one write",
    "test_arrival.py::test_what_arrives_as_other_bytes_is_written_once_more[1-True": "there a block goes in one write",
    "benchmarks/test_streamed.py": "elsewhere a step reads ahead for the next one, and its bytes cannot be told apart",
    "cli/demo/test_demo.py::test_names_and_answers": "an eighth of so short a text is no room for more staging buffers",
    "faults/test_interrupts.py::test_a_read_by_the_computing_cores": "no other thread is ever interrupted by Ctrl-C",
    "faults/test_disks.py::test_a_block_that_is_wrong_in_one_tier_comes_from_the_other": "it writes a slot by hand",
}
"""Tests that no simulated accelerator can pass, by the beginning of their names in tests/: why."""


def skip_what_is_of_the_cpu(item: pytest.Item) -> None:
    """Skip a test that is about the CPU as a device."""
    for name, why in OF_THE_CPU.items():
        if item.nodeid.startswith(f"tests/{name}"):
            pytest.skip(f"on a CPU only: {why}")


@contextlib.contextmanager
def standing_in() -> Iterator[None]:
    """Inside, a cache on a CPU is on a simulated accelerator; afterwards each is closed, and none saw a race."""
    from tieredkv.device import SimulatedAccelerator, device_for
    from tieredkv.hf import tenancy

    rng = random.Random(0)
    made: list[tuple[weakref.ref[Device], Clocks]] = []

    def simulated_for(torch_device: torch.device | str) -> Device:
        if str(torch_device) != "cpu":
            return device_for(torch_device)
        device = SimulatedAccelerator(seed=rng.getrandbits(32), max_delay_seconds=MAX_DELAY_SECONDS)
        made.append((weakref.ref(device), device.clocks))  # tests hold that a cache is collected, device and all
        return device

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tenancy, "device_for", simulated_for)
        yield
    for reference, _ in made:
        if (device := reference()) is not None:
            device.close()
    assert [clocks.races for _, clocks in made] == [0] * len(made)
