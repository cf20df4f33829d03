"""Pageable memory reaches a device through a small ring of pinned buffers, in both directions."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tieredkv.device import SimulatedAccelerator
from tieredkv.device.bounce import BUFFERS, Bounce
from tieredkv.device.event import Event, settled_event
from tieredkv.device.memory import PinnedMemory, normal_empty


def pinnable(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return normal_empty(shape, dtype, "cpu")


class Waits:
    """Events that say how often they were waited for."""

    def __init__(self) -> None:
        self.made: list[Event] = []
        self.joined: list[Event] = []

    def record(self) -> Event:
        waits = self

        class Watched(Event):
            def join(self) -> None:
                waits.joined.append(self)

        event = settled_event(Watched())
        self.made.append(event)
        return event


def bounce(waits: Waits, pinned: PinnedMemory | None = None) -> Bounce:
    return Bounce(pinned or PinnedMemory(1 << 20, pinnable), waits.record)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tieredkv.device.bounce.BUFFER_BYTES", 64)


@pytest.mark.parametrize("to_device", [True, False])
@pytest.mark.parametrize("count", [1, 16, 17, 64, 100])
def test_every_byte_arrives(to_device: bool, count: int) -> None:
    waits, source, target = Waits(), torch.randn(1, count), torch.zeros(1, count)
    ring = bounce(waits)
    for _ in range(3):
        ring.copy(target, source, to_device=to_device)
        assert torch.equal(target, source)
        source = torch.randn(1, count)
    assert len(waits.made) == 3 * -(-count * 4 // 64)


def test_a_buffer_is_filled_again_after_the_copy_that_read_it() -> None:
    waits = Waits()
    bounce(waits).copy(torch.zeros(1, 100), torch.randn(1, 100), to_device=True)
    assert waits.joined == waits.made[:-BUFFERS]


def test_what_comes_from_the_device_is_there_on_return() -> None:
    waits = Waits()
    bounce(waits).copy(torch.zeros(1, 100), torch.randn(1, 100), to_device=False)
    assert waits.joined == waits.made


def test_what_is_pinned_needs_no_ring() -> None:
    pinned, waits = PinnedMemory(1 << 20, pinnable), Waits()
    host, device = pinned.empty((4, 25), torch.float32), torch.randn(4, 25)
    host.zero_()
    assert pinned.holds(host[2:]) and not pinned.holds(device)
    ring = bounce(waits, pinned)
    ring.copy(host, device, to_device=False)
    ring.copy(torch.empty(4, 25), host, to_device=True)
    assert waits.joined == waits.made and len(waits.made) == 2  # whole on return, and free to be overwritten
    arrived = torch.empty(4, 25)
    ring.copy(arrived, host, non_blocking=True, to_device=True)
    assert torch.equal(arrived, device) and len(waits.made) == 2 and pinned.pinned_bytes == 512
    address = host.data_ptr()
    del host
    assert not any(start == address for start in pinned._ranges)


@pytest.mark.parametrize("to_device", [True, False])
def test_what_lies_scattered_or_finds_no_buffer_is_copied_all_the_same(to_device: bool) -> None:
    waits, wide = Waits(), torch.zeros(10, 20)
    source = torch.randn(10, 10)
    bounce(waits).copy(wide[:, ::2], source, to_device=to_device)
    assert torch.equal(wide[:, ::2], source)
    target = torch.zeros(10, 10)
    bounce(waits, PinnedMemory(100, pinnable)).copy(target, source, to_device=to_device)
    assert torch.equal(target, source) and not waits.made


def test_the_ring_is_taken_when_it_is_needed_and_counts() -> None:
    with SimulatedAccelerator(pin_limit_bytes=256) as device:
        assert device.bounce is not None and device.pinned_bytes == 0
        device.bounce.copy(torch.zeros(1, 40), torch.ones(1, 40), to_device=True)
        assert device.pinned_bytes == BUFFERS * 64
