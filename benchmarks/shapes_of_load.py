"""Rows of unlike lengths, many pool sizes, and how many graphs are compiled: parts of the decode question.

Attention alone, through the engine that a cache uses, over blocks that lie where a pool in use would have them.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks import harness, shapes
from benchmarks.harness import Row
from tieredkv import CacheSettings, TieredCache
from tieredkv.attention.flex import FlexKernels, FlexTiles, TileRow
from tieredkv.attention.native import NativeKernels, NativePlan, NewTokens

BLOCK = 128
HEADS, KV_HEADS, DIM = 9, 3, 64
LAYERS = 4
"""Cycled through, so that no pool stays in a processor's cache."""


def scattered(lengths: Sequence[int], slots: int, seed: int) -> list[list[tuple[int, int, int]]]:
    """For each row stretches (pool 0, first token in it, tokens): its blocks in slots drawn at random."""
    drawn = random.Random(seed).sample(range(slots), sum(-(-tokens // BLOCK) for tokens in lengths))
    rows = []
    for tokens in lengths:
        count = -(-tokens // BLOCK)
        own, drawn = drawn[:count], drawn[count:]
        rows.append([(0, slot * BLOCK, min(BLOCK, tokens - index * BLOCK)) for index, slot in enumerate(own)])
    return rows


def ragged(rounds: int) -> Row:
    """GB/s of live K/V for 16 rows of 64 to 1,000 tokens, over the same for equal rows of as many tokens in all."""
    lengths = [int(x) for x in torch.linspace(64, 1000, 16)]
    random.Random(0).shuffle(lengths)
    equal = [sum(lengths) // 16] * 16
    live = max(sum(-(-tokens // BLOCK) for tokens in some) for some in (lengths, equal))
    slots = 16 * live
    pools = [[torch.randn(KV_HEADS, slots * BLOCK, DIM) for _ in range(2)] for _ in range(LAYERS)]
    q = torch.randn(16, HEADS, 1, DIM)
    native = NativeKernels()
    if not native.serves(q, DIM, DIM):
        return Row("ragged rows over equal rows, GB/s of live K/V: no C++ compiler", 0.0, "", ">= 0.6", None)

    def run(plan: NativePlan) -> None:
        for k, v in pools:
            native.attend(q, [(k, v)], plan, scale=DIM**-0.5)

    plans = {
        name: NativePlan(
            [NewTokens(row, 0, 1, each) for row, each in enumerate(scattered(some, slots, 1))],
            new=1,
            kv_heads=KV_HEADS,
            group=HEADS // KV_HEADS,
            threads=torch.get_num_threads(),
            causal=False,
        )
        for name, some in (("ragged", lengths), ("equal", equal))
    }
    times = harness.interleave({name: lambda p=plan: run(p) for name, plan in plans.items()}, rounds=rounds, inner=10)
    rate = {
        name: sum(some) * KV_HEADS * DIM * 2 * 4 * LAYERS / times[name].median_seconds
        for name, some in (("ragged", lengths), ("equal", equal))
    }
    ratio = rate["ragged"] / rate["equal"]
    measure = "ragged rows (64 to 1,000 tokens, 16 rows, pool 16 times the live blocks): GB/s over equal rows"
    return Row(measure, ratio, "x", ">= 0.6", ratio >= 0.6, {"bytes_per_second": rate, "pool_slots": slots})


def many_pools(sizes: int = 20, row_counts: int = 20) -> Row:
    """FlexAttention over 20 pool sizes times 20 row counts in one process: graphs stay bounded, none runs eagerly."""
    kernels = FlexKernels()
    worst = 0.0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for slots in range(24, 24 + sizes):
            k, v = (torch.randn(2, slots, 16, 32) for _ in range(2))
            for rows in range(1, row_counts + 1):
                tiles = FlexTiles(
                    kernels, kv_heads=2, pool_slots=slots, rows=rows, block_size=16, device=torch.device("cpu")
                )
                spec = [TileRow([(row + 3) % slots, row % slots], 17 + row % 16) for row in range(rows)]
                tiles.update(spec)
                q = torch.randn(rows, 4, 1, 32)
                out, _ = tiles.attend(q, k, v, scale=32**-0.5, lse=False)
                worst = max(worst, _error(out, q, k, v, spec))
    eager = sum("Compiling Flex" in str(w.message) or "called without torch.compile" in str(w.message) for w in caught)
    good = eager == 0 and kernels.graphs <= kernels.cap and worst < 1e-5
    detail = {"graphs": kernels.graphs, "cap": kernels.cap, "eager_calls": eager, "largest_error": worst}
    return Row(f"{sizes} pool sizes x {row_counts} row counts: graphs", kernels.graphs, "", "<= 16", good, detail)


def _error(out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Sequence[TileRow]) -> float:
    """Largest difference from float64 attention over the rows' blocks."""
    worst = 0.0
    for index, row in enumerate(rows):
        keys = k[:, list(row.slots)].flatten(1, 2)[:, : row.tokens].double()
        values = v[:, list(row.slots)].flatten(1, 2)[:, : row.tokens].double()
        mine = q[index].double().view(2, -1, 32)  # [kv_heads, group, dim]
        weights = torch.softmax(mine @ keys.transpose(1, 2) * 32**-0.5, -1)
        worst = max(worst, float((weights @ values - out[index].view(2, -1, 32)).abs().max()))
    return worst


def graphs_of_a_run(quick: bool) -> list[Row]:
    """Compiled graphs after a prefill, 200 steps and three context lengths: as it comes, and with flex forced."""
    config = shapes.smollm2_config(2)
    steps, lengths = (5, (256, 512, 768)) if quick else (200, (1024, 4096, 8192))
    rows = []
    for kernel in ("auto", "flex"):
        model: Any = shapes.model_of(config, torch.float32)
        settings = CacheSettings(kernel=kernel)
        most = 0
        with TieredCache(model, hot=f"{lengths[-1] + 1024} tokens", warm=0, settings=settings) as cache:
            for tokens in lengths:
                model(torch.randint(0, 49152, (1, tokens)), cache=cache, logits_to_keep=1)
                for _ in range(steps):
                    model(torch.zeros((1, 1), dtype=torch.int64), cache=cache)
                most = max(most, cache.stats().graphs)
                cache.reset()
        measure = f"compiled graphs after prefill, {steps} steps, three context lengths, kernel={kernel}"
        rows.append(Row(measure, most, "", "<= 6", most <= 6))
    return rows
