"""What does the size of a block cost and bring? Run: python -m benchmarks.block_size [--quick]

Speed: a decode step and a prefill over SmolLM2's shape, with everything hot, and with a window hot and the rest copied.
Waste: bytes behind the last token of each sequence, over the requests of a recorded chat trace. Table: seconds to fork
and free the block table of a long sequence, and bytes of its records.
"""

from __future__ import annotations

import dataclasses
import sys
from contextlib import ExitStack
from typing import Any

import torch

from benchmarks import harness, shapes
from benchmarks.capacity import CHAT, Length, lengths
from benchmarks.harness import Row
from benchmarks.plots import Chart
from benchmarks.shapes import step_of, two_models
from tieredkv import CacheSettings, TieredCache
from tieredkv.block import Block
from tieredkv.block_table import BlockTable
from tieredkv.sizing import DEFAULT_BLOCK_SIZE
from tieredkv.tiers.slots import SlotPool

SIZES = (16, 32, 64, 128, 256)
WINDOW = 512


def steps(
    tokens: int, sizes: tuple[int, ...], rounds: int, *, stream: bool, layers: int = 30
) -> dict[int, harness.Timing]:
    """A decode step for each block size, interleaved: everything hot, or `WINDOW` hot and all else copied each time."""
    config = shapes.smollm2_config(layers)
    _, model = two_models(config, torch.float32)
    with ExitStack() as stack:
        contestants = {}
        for size in sizes:
            tiers: dict[str, Any] = {"hot": f"{tokens + 2048} tokens", "warm": 0}
            if stream:
                tiers = {
                    "hot": f"{WINDOW + 1024} tokens",
                    "warm": f"{tokens + 2048} tokens",
                    "window": WINDOW,
                    "settings": CacheSettings(read_in_place=False),
                }
            cache = stack.enter_context(TieredCache(model.config, block_size=size, **tiers))
            shapes.fill(cache, config, tokens, torch.float32)
            contestants[str(size)] = step_of(model, cache)
        times = harness.interleave(contestants, rounds=rounds, warmup=2, inner=3)
    return {int(name): each for name, each in times.items()}


def prefills(tokens: int, sizes: tuple[int, ...], rounds: int, layers: int = 30) -> dict[int, harness.Timing]:
    """A prefill in one call for each block size, interleaved, everything hot."""
    config = shapes.smollm2_config(layers)
    _, model = two_models(config, torch.float32)
    ids = torch.randint(0, config.vocab_size, (1, tokens))

    def run(size: int) -> None:
        with TieredCache(model.config, hot=f"{tokens + 512} tokens", warm=0, block_size=size) as cache:
            model(ids, cache=cache, logits_to_keep=1)

    times = harness.interleave({str(size): lambda s=size: run(s) for size in sizes}, rounds=rounds, warmup=1)
    return {int(name): each for name, each in times.items()}


def waste(requests: list[Length], size: int) -> float:
    """Share of the bytes held that is behind the last token, mean over the requests at their ends."""
    held = sum(-(-each.total // size) * size for each in requests)
    return 1 - sum(each.total for each in requests) / held


def table_costs(tokens: int, size: int, layers: int, rounds: int) -> tuple[float, float]:
    """(seconds to make, fork and free a sequence's table; bytes of its records with checksums for each layer)."""
    count = -(-tokens // size)
    pool = SlotPool(count + 1)

    def release(block: Block) -> None:
        if block.hot is not None:
            pool.release(block.hot)

    def once() -> BlockTable:
        table = BlockTable(size, release)
        table.rows.append([])
        for number, slot in enumerate(pool.allocate_many(count)):
            table.append(0, Block(number, tokens=size, sealed=True, hot=slot, checksums=[0] * layers))
        twin = table.fork()
        twin.clear()
        return table

    def and_free() -> None:
        once().clear()

    seconds = harness.interleave({"table": and_free}, rounds=rounds)["table"].median_seconds
    table = once()
    checksum_bytes = sys.getsizeof(2**63)
    per_block = [
        sys.getsizeof(b) + sys.getsizeof(b.checksums) + layers * checksum_bytes + 8 for row in table for b in row
    ]
    return seconds, float(sum(per_block))


def speed_rows(what: str, times: dict[int, harness.Timing]) -> list[Row]:
    """Seconds for each size, over the default's."""
    base = times[DEFAULT_BLOCK_SIZE].median_seconds
    return [
        Row(
            f"blocks of {size}: {what}, over blocks of {DEFAULT_BLOCK_SIZE}",
            each.median_seconds / base,
            "x",
            detail=dataclasses.asdict(each),
        )
        for size, each in times.items()
    ]


def figures(quick: bool) -> tuple[list[Row], list[Chart]]:
    """Speed, waste and table cost of each size, and whether the default is within 5 % of the fastest step."""
    sizes = (32, DEFAULT_BLOCK_SIZE) if quick else SIZES
    tokens, rounds, layers = (2048, 1, 2) if quick else (8192, 5, 30)
    hot = steps(tokens, sizes, rounds, stream=False, layers=layers)
    streamed = steps(tokens, sizes, rounds, stream=True, layers=layers)
    prefill = prefills(tokens // 4, sizes, 1 if quick else 3, layers)
    rows = speed_rows(f"decode step at {tokens:,}, all hot", hot)
    rows += speed_rows(f"decode step at {tokens:,}, {WINDOW} hot and the rest streamed from warm", streamed)
    rows += speed_rows("prefill", prefill)
    source, requests = lengths(CHAT)
    wasted = {size: waste(requests, size) for size in sizes}
    rows += [
        Row(f"blocks of {size}: behind the last token ({source})", 100 * share, "% of what is held")
        for size, share in wasted.items()
    ]
    for size in sizes:
        seconds, nbytes = table_costs(32768, size, 32, 5)
        what = "table of 32,768 tokens in 32 layers"
        rows.append(Row(f"blocks of {size}: {what}: make, fork, free", 1e3 * seconds, "ms"))
        rows.append(Row(f"blocks of {size}: {what}: records", nbytes / 2**10, "KiB"))
    rows += verdicts(hot, streamed, wasted, quick)
    return rows, charts_of({"step, all hot": hot, "step, streamed": streamed, "prefill": prefill}, source, wasted)


def charts_of(times: dict[str, dict[int, harness.Timing]], source: str, wasted: dict[int, float]) -> list[Chart]:
    """Time and waste over the size of a block."""
    over = {
        name: [(float(n), t.median_seconds / each[DEFAULT_BLOCK_SIZE].median_seconds) for n, t in each.items()]
        for name, each in times.items()
    }
    shares = {source: [(float(size), 100 * share) for size, share in wasted.items()]}
    speed = f"Time over that with blocks of {DEFAULT_BLOCK_SIZE}"
    x = "tokens of a block"
    return [
        Chart("speed", speed, x, "x", over, log_x=True),
        Chart("waste", "Bytes behind the last token", x, "% of what is held", shares, log_x=True),
    ]


def verdicts(
    hot: dict[int, harness.Timing], streamed: dict[int, harness.Timing], wasted: dict[int, float], quick: bool
) -> list[Row]:
    """Why the default is what it is: near the fastest, and little waste."""
    rows = []
    for name, times in (("all hot", hot), ("streamed", streamed)):
        fastest = min(times.values(), key=lambda each: each.median_seconds)
        over = times[DEFAULT_BLOCK_SIZE].median_seconds / fastest.median_seconds
        must, reached = ("", None) if quick else ("<= 1.05", over <= 1.05)
        title = f"default of {DEFAULT_BLOCK_SIZE}: step, {name}, over that of the fastest size"
        rows.append(Row(title, over, "x", must, reached))
    share = 100 * wasted[DEFAULT_BLOCK_SIZE]
    title = f"default of {DEFAULT_BLOCK_SIZE}: behind the last token on the chat trace"
    return [*rows, Row(title, share, "%", "<= 10", share <= 10)]


def main() -> None:
    """Measure, print, write."""
    harness.answer("block_size", __doc__, figures)


if __name__ == "__main__":
    main()
