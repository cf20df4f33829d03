"""What is a prefix that is known already worth: after a restart, for beams, for many requests?

Run: python -m benchmarks.prefix [--quick].

A restart is a restart: each first token is timed in a process of its own, from the loaded model on, without warm-up.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from benchmarks import harness, page_cache, shapes
from benchmarks.harness import Row
from tieredkv import KVStore, TieredCache
from tieredkv.cli.model import load
from tieredkv.cli.prompt import build
from tieredkv.durable import DurableSettings

BLOCK = 128
QUESTION_TOKENS = 16
HOT = "8192 tokens"


# ---- a restart


def prompt(tokenizer: Any, tokens: int) -> torch.Tensor:
    """Ids [1, tokens + question] of prose."""
    return build(tokenizer, None, None, tokens + 200).input_ids[:, : tokens + QUESTION_TOKENS]


def answer(model: Any, ids: torch.Tensor, cache: Any) -> int:
    """The first token."""
    out = model.generate(ids, cache=cache, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False)
    return int(out[0, -1])


def child(kind: str, folder: str, tokens: int) -> None:
    """One start: load the model, then time the way to the first token; prints JSON."""
    loaded = load(None, torch.float32, "cpu")
    ids = prompt(loaded.tokenizer, tokens)
    started = time.perf_counter()
    told: dict[str, Any] = {}
    if kind == "scratch":
        token = answer(loaded.model, ids, DynamicCache(config=loaded.model.config))
    else:
        settings = DurableSettings(folder, free_floor=0)
        with KVStore(loaded.model, hot=HOT, block_size=BLOCK, durable=settings) as store:
            cache = store.cache(ids)
            told = {"cache_seconds": time.perf_counter() - started, "attached": cache.get_seq_length()}
            token = answer(loaded.model, ids, cache)
            told["seconds"] = time.perf_counter() - started
            if kind == "publish":
                store.publish(cache)
            durable = store.stats().durable
            told["read_bytes"] = 0 if durable is None else durable.read_bytes
    told = {"seconds": time.perf_counter() - started, **told, "token": token}
    sys.stdout.write(json.dumps(told) + "\n")


def start(kind: str, folder: Path, tokens: int) -> dict[str, Any]:
    """`child` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.prefix", "--child", kind, str(folder), str(tokens)]
    out = subprocess.run(command, check=True, capture_output=True, text=True)
    told: dict[str, Any] = json.loads(out.stdout.splitlines()[-1])
    return told


def plain_read(files: Sequence[Path]) -> float:
    """Seconds of reading the files one after the other."""
    buffer = bytearray(8 * 2**20)
    started = time.perf_counter()
    for file in files:
        with open(file, "rb", buffering=0) as raw:
            while raw.readinto(buffer):
                pass
    return time.perf_counter() - started


def restarts(tokens: int, rounds: int) -> list[Row]:
    """First token in a new process, restored over computed, and how fast the files are read."""
    with tempfile.TemporaryDirectory(prefix="tieredkv-prefix-") as name:
        folder = Path(name)
        first = start("publish", folder, tokens)
        files = sorted(folder.rglob("*.safetensors"))
        total_bytes = sum(file.stat().st_size for file in files)
        scratch, warm, cold, plain, held = [], [], [], [], []
        for _ in range(rounds):
            scratch.append(start("scratch", folder, tokens))
            plain_read(files)
            warm.append(start("restore", folder, tokens))
            page_cache.drop(files)
            plain.append(plain_read(files))
            page_cache.drop(files)
            held.append(page_cache.held_share(files))
            cold.append(start("restore", folder, tokens))
        tokens_seen = {each["token"] for each in (first, *scratch, *warm, *cold)}
    if len(tokens_seen) != 1 or min(each["attached"] for each in warm + cold) < tokens // BLOCK * BLOCK:
        raise RuntimeError(f"not restored, or another token: {first} {warm} {cold} {scratch}")
    base, fast, slow = (statistics.median(e["seconds"] for e in each) for each in (scratch, warm, cold))
    bandwidth = total_bytes / statistics.median(each["cache_seconds"] for each in cold)
    sequential = total_bytes / statistics.median(plain)
    detail = {"scratch": scratch, "warm": warm, "cold": cold, "plain_seconds": plain, "bytes": total_bytes}
    detail |= {"share_held_when_dropped": held}
    what = f"to the first token in a new process, {tokens} tokens restored, over a prefill"
    return [
        Row(f"{what}, page cache warm", base / fast, "x", ">= 15 (aim 40)", base / fast >= 15, detail),
        Row(f"{what}, page cache dropped", base / slow, "x"),
        Row(
            "restore bandwidth over a plain read of the files, page cache dropped",
            bandwidth / sequential,
            "",
            ">= 0.6 (aim 0.85)",
            bandwidth / sequential >= 0.6,
            {"restore": bandwidth, "plain": sequential},
        ),
    ]


# ---- beams


def fill_rows(cache: Any, config: Any, tokens: int, rows: int) -> None:
    """K and V of one random sequence in each of some rows."""
    for layer in range(config.num_hidden_layers):
        generator = torch.Generator().manual_seed(layer)
        shape = (1, config.num_key_value_heads, tokens, config.head_dim)
        k, v = (torch.randn(shape, generator=generator).expand(rows, -1, -1, -1) for _ in "kv")
        cache.update(k, v, layer)


def token_bytes(config: Any) -> int:
    """Bytes of one token's K and V in fp32."""
    return int(config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * 4)


def used_bytes(cache: TieredCache) -> int:
    """Bytes of the blocks that a cache's store holds."""
    store = cache.parts().store
    return 0 if store is None else sum(tier.used_bytes for tier in store.tiers.values())


def beams(tokens: int, rounds: int) -> list[Row]:
    """Bytes and step time of four beams over a long prompt."""
    config = shapes.smollm2_config()
    model = shapes.model_of(config, torch.float32)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (4, 1), generator=generator)

    def step(cache: Any) -> None:
        cache.reorder_cache(torch.randint(4, (4,), generator=generator))
        model(ids, cache=cache)

    with torch.no_grad(), TieredCache(model.config, hot=f"{tokens + 1024} tokens", warm=0, block_size=BLOCK) as one:
        model.set_attn_implementation("tieredkv")
        fill_rows(one, config, tokens, 1)
        for _ in range(3 + rounds):
            model(ids[:1], cache=one)
        alone = used_bytes(one)
    stock = DynamicCache(config=config)
    fill_rows(stock, config, tokens, 4)
    with torch.no_grad(), TieredCache(model.config, hot=f"{tokens + 1024} tokens", warm=0, block_size=BLOCK) as ours:
        fill_rows(ours, config, tokens, 4)
        for _ in range(3):
            step(ours)
        times: dict[str, list[float]] = {"stock": [], "ours": []}
        for _ in range(rounds):
            for name, cache, implementation in (("stock", stock, "sdpa"), ("ours", ours, "tieredkv")):
                model.set_attn_implementation(implementation)
                started = time.perf_counter()
                step(cache)
                times[name].append(time.perf_counter() - started)
        together, mode = used_bytes(ours), ours.mode
    ratio = statistics.median(times["stock"]) / statistics.median(times["ours"])
    detail = {name: vars(harness.timing(seconds)) for name, seconds in times.items()} | {"mode": mode}
    what = f"4 beams over {tokens} tokens"
    return [
        Row(f"{what}: KV bytes over those of one sequence", together / alone, "", "<= 1.10", together / alone <= 1.1),
        Row(f"{what}: time per step, DynamicCache over ours", ratio, "x", ">= 2 (aim 4)", ratio >= 2, detail),
    ]


# ---- requests


def requests(tokens: int, count: int) -> list[Row]:
    """Bytes of many requests with one beginning."""
    config = shapes.smollm2_config()
    model = shapes.model_of(config, torch.float32)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(config.vocab_size, (1, tokens), generator=generator)
    with KVStore(model, hot=f"{tokens + count * BLOCK + 1024} tokens", warm=0, block_size=BLOCK) as store:
        with torch.no_grad(), store.cache(ids) as cache:
            model(ids, cache=cache)
            store.publish(cache)
            alone = used_bytes(cache)
        caches, tails = [], 0
        for _ in range(count):
            own = torch.cat([ids, torch.randint(config.vocab_size, (1, 8), generator=generator)], 1)
            cache = store.cache(own)
            with torch.no_grad():
                model(own[:, cache.get_seq_length() :], cache=cache)
            caches.append(cache)
            tails += 1
        together = used_bytes(caches[0])
        for cache in caches:
            cache.close()
    ratio = (together - tails * BLOCK * token_bytes(config)) / alone
    detail = {"with_tails": together / alone, "tails": tails}
    what = f"{count} requests sharing {tokens} tokens: KV bytes over those of one, tails aside"
    return [Row(what, ratio, "", "<= 1.2", ratio <= 1.2, detail)]


def main() -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short texts and few rounds")
    parser.add_argument("--child", nargs=3, metavar=("KIND", "FOLDER", "TOKENS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child[0], arguments.child[1], int(arguments.child[2]))
        return
    quick, started = arguments.quick, time.perf_counter()
    rows = requests(512 if quick else 2048, 16)
    rows += beams(1024 if quick else 4096, 4 if quick else 16)
    rows += restarts(512 if quick else 4096, 1 if quick else 3)
    harness.conclude("prefix", rows, started=started, keep=not quick)


if __name__ == "__main__":
    main()
