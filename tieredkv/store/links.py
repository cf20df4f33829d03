"""What the device's memory and its link to the host give, measured: what a run's rates are held against.

Imports: blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from tieredkv.store.blocks import BlockStore

LEAST_SECONDS = 0.05
"""For each measurement; the first time it is done does not count."""


def measure_links(store: BlockStore) -> dict[str, float]:
    """Bytes per second: reading hot ("hot"), and copies between a staging buffer and the host, both ways.

    Takes about a quarter of a second, and host memory for one staging buffer. Nothing of what the caches hold is
    touched. A hot tier or a buffer of few MB fits a processor's caches, and looks faster than memory is. Disks are
    not measured: a file that was just written is read from memory.
    """
    device = store.device
    with store.lock:
        planes = [plane.flatten().view(torch.uint8) for pair in store.hot.planes for plane in pair]
        words = [plane[: plane.numel() // 8 * 8].view(torch.int64) for plane in planes]
        nbytes = sum(word.nbytes for word in words)
        found = {"hot": _rate(store, lambda: [word.sum() for word in words], nbytes)}
        if store.prefetcher.chunk_blocks:
            with store.prefetcher.lend() as there:
                here = device.host_empty(tuple(there.shape), torch.uint8)
                found["warm_to_hot"] = _rate(store, lambda: there.copy_(here, non_blocking=True), there.nbytes)
                found["hot_to_warm"] = _rate(store, lambda: here.copy_(there, non_blocking=True), there.nbytes)
        store.counters.link_bytes_per_second.update(found)
        return found


def _rate(store: BlockStore, work: Callable[[], object], nbytes: int) -> float:
    device = store.device
    device.run(work, name="measure")
    device.record().wait()
    started, times = time.perf_counter(), 0
    while (seconds := time.perf_counter() - started) < LEAST_SECONDS:
        device.run(work, name="measure")
        device.record().wait()
        times += 1
    return times * nbytes / seconds
