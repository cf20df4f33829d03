"""The life of a cache: threads, processes, closing, and being dropped."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support import (
    DIM,
    WAYS,
    assert_close,
    audit,
    feed,
    of,
    oracle,
    small,
    store_of,
    tiny,
    tokens,
)

import tieredkv
from tieredkv.device import LEDGER, SimulatedAccelerator
from tieredkv.errors import ClosedError


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("tieredkv")}


def eventually(holds: Callable[[], bool], seconds: float = 5.0) -> bool:
    """Whether something becomes true within a time; workers end by themselves, a little later."""
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    return holds()


@pytest.mark.parametrize("kind", ["cpu", "simulated"])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_two_caches_in_two_threads(cold_dir: Path, way: str, shared: bool, kind: str) -> None:
    """Of their own stores, or of one that they share after a deep copy."""
    model, start = tiny(), tokens(90)
    device = SimulatedAccelerator(max_delay_seconds=0.001) if kind == "simulated" else None
    first = small(of(model, way), cold_dir, device=device)
    feed(model, start, first)
    second = copy.deepcopy(first) if shared else small(model.config, cold_dir)
    if not shared:
        feed(model, start, second)
    results: dict[int, torch.Tensor] = {}
    failures: list[BaseException] = []

    def work(number: int, cache: tieredkv.TieredCache) -> None:
        try:
            results[number] = feed(model, tokens(120, seed=30 + number), cache, [1] * 60 + [20])
        except BaseException as failure:
            failures.append(failure)

    workers = [threading.Thread(target=work, args=pair) for pair in enumerate((first, second))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures, failures[0]
    for number, logits in results.items():
        wanted = oracle(torch.cat([start, tokens(120, seed=30 + number)], 1))[:, 90:]
        assert_close(logits, wanted, f"thread {number}")
    audit(first, second)
    first.close()
    second.close()


def test_a_cache_that_is_dropped_takes_its_threads_and_its_folder_along(cold_dir: Path) -> None:
    model, before = tiny(), threads()
    cache = small(model.config, cold_dir)
    feed(model, tokens(300), cache)
    assert threads() - before and list(cold_dir.iterdir())
    gc.disable()
    try:
        del cache
        assert eventually(lambda: not list(cold_dir.iterdir())), "not without the cycle collector"
        assert eventually(lambda: threads() <= before)
    finally:
        gc.enable()


@pytest.mark.parametrize("use", ["update", "crop", "reset", "reorder", "demote", "promote", "deepcopy", "pickle"])
def test_a_closed_cache_refuses(cold_dir: Path, use: str) -> None:
    model = tiny()
    cache = small(model.config, cold_dir)
    feed(model, tokens(40), cache)
    cache.close()
    cache.close()
    uses: dict[str, Callable[[], object]] = {
        "update": lambda: feed(model, tokens(1), cache),
        "crop": lambda: cache.crop(-1),
        "reset": cache.reset,
        "reorder": lambda: cache.reorder_cache(torch.tensor([0])),
        "demote": cache.demote,
        "promote": cache.promote,
        "deepcopy": lambda: copy.deepcopy(cache),
        "pickle": lambda: pickle.dumps(cache),
    }
    with pytest.raises(ClosedError):
        uses[use]()
    assert repr(cache)


def test_a_cache_that_was_closed_before_its_first_forward_makes_no_store() -> None:
    model = tiny()
    cache, promised = small(model.config, None, warm="200 tokens"), LEDGER.promised_bytes("cpu")
    cache.close()
    with pytest.raises(ClosedError, match="The cache is closed"):
        feed(model, tokens(10), cache)
    assert cache.parts().store is None and LEDGER.promised_bytes("cpu") == promised


def test_closing_frees_memory_and_files(cold_dir: Path) -> None:
    model, before = tiny(), threads()
    with small(model, cold_dir) as cache:
        feed(model, tokens(300), cache)
        pool = weakref.ref(store_of(cache).hot.planes[0][0])
    assert threads() <= before
    assert not list(cold_dir.iterdir())
    assert pool() is None


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_is_refused_and_the_parent_goes_on(cold_dir: Path) -> None:
    model, ids = tiny(), tokens(150)
    with small(model, cold_dir) as cache:
        feed(model, ids[:, :120], cache)
        child = os.fork()
        if not child:
            code = 1
            try:
                cache.update(torch.zeros(1, 2, 1, DIM), torch.zeros(1, 2, 1, DIM), 0)
            except ClosedError:
                code = 0
            finally:
                del cache
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert_close(feed(model, ids[:, 120:], cache, [1]), oracle(ids)[:, 120:])


@pytest.mark.parametrize("way", WAYS)
def test_a_cache_is_used_again_after_reset(cold_dir: Path, way: str) -> None:
    model = tiny()
    with small(of(model, way), cold_dir) as cache:
        for seed in range(4):
            ids = tokens(60 + 70 * seed, rows=1 + seed % 3, seed=seed)
            if seed % 3 == 2 and way == "gather":
                cache.reset()
            assert_close(feed(model, ids, cache, [40, 1]), oracle(ids), f"round {seed}")
            cache.reset()
            assert cache.get_seq_length() == 0
            assert cache.block_table() == []
            audit(cache)
