"""Runs that publish and save, each killed (SIGKILL) at a random point; then what is left is looked at.

Usage: python kill_runs.py FOLDER FIRST_SEED RUNS, with OMP_NUM_THREADS=1 and the root and tests/ in PYTHONPATH. Prints
one JSON object. A process forks the runs, so that each costs milliseconds; one thread computes, which a fork survives.

Imports: tieredkv, torch, support.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from support import difference, feed, generate, oracle, tiny, tokens

import tieredkv
from tieredkv.durable import DurableSettings

TOKENS, BLOCK = 100, 16
SIZES: dict[str, Any] = {"hot": "256 tokens", "warm": 0, "block_size": BLOCK}


def make(model: Any, folder: Path) -> tieredkv.KVStore:
    return tieredkv.KVStore(model, **SIZES, durable=DurableSettings(folder / "kv", free_floor=0))


def run(model: Any, folder: Path, seed: int, said: int) -> None:
    """Publish and save prompt after prompt; tell what was acknowledged."""
    with make(model, folder) as store:
        for number in range(1000):
            ids = tokens(TOKENS, seed=1000 * seed + number)
            with store.cache(ids) as cache:
                feed(model, ids[:, cache.get_seq_length() :], cache)
                store.publish(cache)
                os.write(said, f"p {1000 * seed + number}\n".encode())
                cache.save(folder / "talk", model)
                os.write(said, f"s {1000 * seed + number}\n".encode())


def kill_one(model: Any, folder: Path, seed: int) -> list[str]:
    """One run; the lines that it wrote before it was killed, within 120 ms of its first."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reads)
            run(model, folder, seed, writes)
        finally:
            os._exit(1)
    os.close(writes)
    if seed % 3:  # else at any point from the start on
        select.select([reads], [], [], 60)
    time.sleep(random.Random(seed).random() * 0.12)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with open(reads) as file:
        return [line for line in file.read().splitlines() if line]


def look(model: Any, folder: Path, said: list[str]) -> dict[str, Any]:
    """What is left of everything that was acknowledged, used by `generate`."""
    published = [int(line[2:]) for line in said if line.startswith("p ")]
    full = TOKENS // BLOCK
    reused, worst = 0, 0.0
    with make(model, folder) as store:
        for seed in published:
            ids = tokens(TOKENS, seed=seed)
            with store.cache(ids) as cache:
                reused += cache.get_seq_length() // BLOCK
                out = generate(model, ids, cache, 2)
            wanted = oracle(out.sequences)[:, TOKENS - 1 : -1]
            worst = max(worst, difference(torch.stack(out.logits, 1), wanted))
        stats = store.stats().durable
    found: dict[str, Any] = {"published": full * len(published), "reused": reused, "worst": worst}
    found["set_aside"] = 0 if stats is None else stats.set_aside
    saved = [int(line[2:]) for line in said if line.startswith("s ")]
    found["saved"] = len(saved)
    if saved:
        with tieredkv.TieredCache.load(folder / "talk", model, **SIZES) as cache:
            found["loaded"] = cache.get_seq_length()
    found["left"] = sorted(path.name for path in folder.iterdir() if path.name not in ("kv", "talk"))
    return found


def main() -> None:
    folder, first, runs = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    model = tiny()
    feed(model, tokens(20), None)
    said: list[str] = []
    for seed in range(first, first + runs):
        said += kill_one(model, folder, seed)
    sys.stdout.write(json.dumps(look(model, folder, said)) + "\n")


if __name__ == "__main__":
    main()
