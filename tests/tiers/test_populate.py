"""Pages taken ahead of a write: there when they are needed, and nothing in them changed."""

from __future__ import annotations

import mmap
import sys
import threading

import pytest
import torch

from tieredkv.tiers import Populating

MIB = 2**20


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone takes pages on request")
def test_pages_are_there_before_the_write() -> None:
    memory = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    view = torch.frombuffer(memory, dtype=torch.uint8).view(2, 32, -1)
    before = resident_bytes()
    populating = Populating([view[:, 4:20]])
    thread = next(each for each in threading.enumerate() if each.name == "tieredkv-populate")
    thread.join(20)
    taken = resident_bytes() - before
    populating.end()
    assert 28 * MIB <= taken <= 40 * MIB, "the 32 MiB that were named, and not the rest"
    assert not view.any()


def test_what_is_written_stays_and_the_end_may_come_at_once() -> None:
    view = torch.arange(3 * 5 * 1000).view(3, 5, 1000)
    wanted = view.clone()
    for blocks in (slice(0, 5), slice(1, 2)):
        Populating([view[:, blocks]]).end()
    assert torch.equal(view, wanted)
    Populating([torch.empty(0, 3)]).end()
    Populating([torch.empty(2, 3, device="meta")]).end()
