"""Copies of blocks between host memory and a device: pinned memory at once, other memory through a small ring.

A copy engine reads pinned memory only: from pageable memory it would be served by the driver, one copy at a time, with
the host waiting. Here the host fills one buffer while the engine empties the other.

Imports: device.event, device.memory.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator

import torch

from tieredkv.device.event import Event
from tieredkv.device.memory import PinnedMemory

BUFFERS = 2
BUFFER_BYTES = 1 << 20


class Bounce:
    """Copies in both directions, with a ring of pinned buffers for each. Thread-safe; pins nothing before it is needed.

    Args:
        pinned: where the buffers come from, and what says whether a tensor needs them.
        record: gives an event of the calling thread's current stream.
        begins: called before copies are asked for, for whoever takes their time.
    """

    def __init__(
        self, pinned: PinnedMemory, record: Callable[[], Event], begins: Callable[[], object] = lambda: None
    ) -> None:
        self._pinned, self._record, self._begins = pinned, record, begins
        self._rings = {True: _Ring(pinned), False: _Ring(pinned)}

    def copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False, *, to_device: bool) -> None:
        """Copy blocks, `[kv_heads, n, *inner]`, of equal shape and dtype.

        To the device, `target` is written in the order of the current stream, and `source` may be overwritten on
        return; with `non_blocking` only after the stream's work. From the device, `target` is whole on return. What
        goes to scattered memory is copied at once.
        """
        targets, sources = target.unbind(), source.unbind()  # one head's neighbouring slots are contiguous
        self._begins()
        if self._pinned.holds(source if to_device else target):
            # One after the other without the host in between, which would cost as much as the copies of small heads.
            torch._foreach_copy_(targets, sources, non_blocking=True)
            if not (to_device and non_blocking):
                self._record().join()
            return
        for head, its_source in zip(targets, sources, strict=True):
            self._copy(head, its_source, to_device)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, to_device: bool) -> None:
        """One contiguous stretch through the ring."""
        ring = self._rings[to_device]
        if not target.is_contiguous() or not target.numel():
            target.copy_(source)
            return
        source = source.contiguous()
        with ring.lock:
            if not ring.buffers():
                target.copy_(source)
                return
            to, came = target.view(-1).view(torch.uint8), source.view(-1).view(torch.uint8)
            if to_device:
                self._up(ring, to, came)
            else:
                self._down(ring, to, came)

    def _up(self, ring: _Ring, target: torch.Tensor, source: torch.Tensor) -> None:
        for part in _parts(len(source), ring.buffer_bytes):
            number = ring.take()
            buffer = ring.buffers()[number][: part.stop - part.start]
            buffer.copy_(source[part])
            target[part].copy_(buffer, non_blocking=True)
            ring.used[number] = self._record()

    def _down(self, ring: _Ring, target: torch.Tensor, source: torch.Tensor) -> None:
        arriving: tuple[Event, torch.Tensor, slice] | None = None
        for part in _parts(len(source), ring.buffer_bytes):
            buffer = ring.buffers()[ring.take()][: part.stop - part.start]
            buffer.copy_(source[part], non_blocking=True)
            event = self._record()
            if arriving is not None:
                _land(target, *arriving)
            arriving = (event, buffer, part)
        if arriving is not None:
            _land(target, *arriving)


def _parts(total: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


def _land(target: torch.Tensor, event: Event, buffer: torch.Tensor, part: slice) -> None:
    event.join()
    target[part].copy_(buffer)


class _Ring:
    """Buffers in turn, each with the event of the copy that last read it."""

    def __init__(self, pinned: PinnedMemory) -> None:
        self.lock = threading.Lock()
        self.buffer_bytes = BUFFER_BYTES
        self.used: list[Event | None] = [None] * BUFFERS
        self._pinned = pinned
        self._buffers: list[torch.Tensor] | None = None
        self._numbers = itertools.cycle(range(BUFFERS))

    def buffers(self) -> list[torch.Tensor]:
        """The buffers, uint8; none where they cannot be pinned either."""
        if self._buffers is None:
            made = [self._pinned.empty((self.buffer_bytes,), torch.uint8) for _ in range(BUFFERS)]
            self._buffers = made if all(self._pinned.holds(buffer) for buffer in made) else []
        return self._buffers

    def take(self) -> int:
        """The number of the next buffer, once the copy that read it is done."""
        number = next(self._numbers)
        event, self.used[number] = self.used[number], None
        if event is not None:
            event.join()
        return number
