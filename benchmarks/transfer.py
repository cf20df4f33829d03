"""What does moving blocks cost, and what is hidden of it? Run: python -m benchmarks.transfer [--quick]

Bytes down and up against the least possible, overlap on a simulated accelerator of chosen speed, checksums, the cost of
a move beyond its copy, and what decides who stays hot.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from typing import Any

import torch

from benchmarks import harness, shapes
from benchmarks.harness import Row
from benchmarks.plots import Chart
from benchmarks.shapes import step_of, two_models
from benchmarks.traffic import STREAM, attention_step, padded, store_of, traffic
from tieredkv import CacheSettings, TieredCache
from tieredkv.block import Block
from tieredkv.checksum import Checksummer
from tieredkv.device import SimulatedAccelerator
from tieredkv.tiers import NativeMoves

BLOCK = 128


# ---- overlap


def simulated(
    steps: int, *, copy_seconds: float, chunk_tokens: int, compute_seconds: dict[str, float]
) -> tuple[float, float, float, float]:
    """(step, compute, transfer, stall) seconds of decode on an accelerator of chosen speed.

    `copy_seconds` is for 256 tokens of one layer.
    """
    config = shapes.smollm2_config(layers=4)
    token_bytes = 2 * config.num_key_value_heads * config.head_dim * 4  # of one layer
    rate = 256 * token_bytes / copy_seconds
    device = SimulatedAccelerator(bytes_per_second=rate, compute_seconds=compute_seconds)
    with (
        TieredCache(
            config,
            hot=16 * chunk_tokens * token_bytes + 1024 * token_bytes * config.num_hidden_layers,  # two staging buffers
            warm="8192 tokens",
            window=128,
            settings=CacheSettings(chunk_tokens=chunk_tokens),
            device=device,
        ) as cache,
        torch.inference_mode(),
    ):
        shapes.fill(cache, config, 2048, torch.float32)
        cache.demote("warm")
        step = attention_step(cache, config)
        step()
        step()
        store, holder = store_of(cache), cache.parts().holder
        if holder is None or holder.plan is None:
            raise LookupError("no open forward")
        chunks = holder.plan.chunks
        times = {"attend chunk": len(chunks) * config.num_hidden_layers, "write new": config.num_hidden_layers}
        streamed = sum(len(chunk.blocks) for chunk in chunks) * sum(store.mover.row_bytes)
        stalled, started = cache.stats().decode.stall_seconds, time.perf_counter()
        for _ in range(steps):
            step()
        seconds = (time.perf_counter() - started) / steps
        stall = (cache.stats().decode.stall_seconds - stalled) / steps
    compute = sum(times[name] * each for name, each in compute_seconds.items())
    return seconds, compute, streamed / rate, stall


def overlap(steps: int) -> list[Row]:
    """Compute-bound and transfer-bound steps, with the compute in attention or between the layers."""
    rows = []
    for name, chunk_tokens, compute in (
        ("compute in attention", 256, {"attend chunk": 0.0044}),
        ("compute between layers, a layer a chunk", 2048, {"write new": 0.0352}),
        ("compute between layers, an eighth of a layer a chunk, two of them ahead", 256, {"write new": 0.0352}),
    ):
        step, busy, transfer, stall = simulated(
            steps, copy_seconds=0.004, chunk_tokens=chunk_tokens, compute_seconds=compute
        )
        efficiency = 1 - stall / transfer
        detail = {"step_seconds": step, "compute_seconds": busy, "transfer_seconds": transfer, "stall_seconds": stall}
        if "two of them ahead" in name:
            rows.append(Row(f"overlap efficiency, simulated, {name}", efficiency, "", detail=detail))
            continue
        rows.append(
            Row(f"overlap efficiency, simulated, {name}", efficiency, "", ">= 0.90", efficiency >= 0.90, detail)
        )
    for name, chunk_tokens, compute in (
        ("compute in attention", 256, {"attend chunk": 0.003}),
        ("compute between layers, a layer a chunk", 2048, {"write new": 0.024}),
    ):
        step, busy, transfer, stall = simulated(
            steps, copy_seconds=0.006, chunk_tokens=chunk_tokens, compute_seconds=compute
        )
        ratio = step / max(busy, transfer)
        detail = {"step_seconds": step, "compute_seconds": busy, "transfer_seconds": transfer, "stall_seconds": stall}
        rows.append(
            Row(
                f"step over max(compute, transfer), simulated, transfer-bound, {name}",
                ratio,
                "",
                "<= 1.15",
                ratio <= 1.15,
                detail,
            )
        )
    return rows


# ---- checksums


def checksum_speed(rounds: int) -> Row:
    """Bytes a second of one core, over a chunk as it arrives and over many."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        summer = Checksummer()
        chunks = {
            "8 blocks of 3 heads of 64, fp32": tuple(torch.randn(3, 8, BLOCK, 64) for _ in range(2)),
            "8 blocks of 8 heads of 128, bf16": tuple(torch.randn(8, 8, BLOCK, 128).bfloat16() for _ in range(2)),
            "64 blocks of 8 heads of 128, bf16": tuple(torch.randn(8, 64, BLOCK, 128).bfloat16() for _ in range(2)),
        }
        rates = {name: _rate(summer, planes, rounds) for name, planes in chunks.items()}
        slowest = min(rates.values())
        detail = {"gigabytes_per_second": rates, "why_not_native": summer.native_reason}
        return Row(
            "checksum, host, one core, the slowest of three sizes", slowest, "GB/s", ">= 5", slowest >= 5, detail
        )
    finally:
        torch.set_num_threads(threads)


def _rate(summer: Checksummer, planes: tuple[torch.Tensor, ...], rounds: int) -> float:
    """GB/s in time of this thread, so that what else runs on the machine does not count."""
    seconds = []
    for number in range(3 + 10 * rounds):
        started = time.thread_time()
        summer.checksum(planes)
        if number >= 3:
            seconds.append(time.thread_time() - started)
    return sum(plane.nbytes for plane in planes) / harness.timing(seconds).median_seconds / 1e9


def verify_cost(tokens: int, rounds: int) -> Row:
    """Slowdown of decode by verification, all outside the window streamed from cold at each step."""
    config = shapes.smollm2_config()
    _, model = two_models(config, torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        caches = {}
        for verify in ("off", "always"):
            settings = CacheSettings(read_in_place=False, verify=verify)  # type: ignore[arg-type]
            cache = TieredCache(
                model.config, hot=f"{512 + 8 * BLOCK} tokens", warm=0, cold=folder, window=512, settings=settings
            )
            shapes.fill(cache, config, tokens, torch.float32)
            caches[verify] = cache
        steps = {verify: step_of(model, cache) for verify, cache in caches.items()}
        times = harness.interleave(steps, rounds=rounds, warmup=3, inner=3)
        detail: dict[str, Any] = {verify: dataclasses.asdict(timing) for verify, timing in times.items()}
        for verify, cache in caches.items():
            stats = cache.stats()
            detail[verify] |= {
                "transfer_seconds_a_step": stats.decode.transfer_seconds / stats.decode.forwards,
                "stall_seconds_a_step": stats.decode.stall_seconds / stats.decode.forwards,
                "streamed_bytes_a_step": stats.decode.streamed_bytes / stats.decode.forwards,
                "verified_blocks": stats.verified_blocks,
                "mode": stats.mode,
            }
            cache.close()
    slowdown = 100 * (times["always"].median_seconds / times["off"].median_seconds - 1)
    measure = f"decode slowdown of verify always against off, streamed from cold, {tokens} tokens, window 512"
    return Row(measure, slowdown, "%", "<= 15", slowdown <= 15, detail)


# ---- one move


def move_cost(rounds: int) -> list[Row]:
    """What a move takes beyond its copies: of one block all the way down, and of a chunk up.

    It does not hang on how much is copied: of heads of 64 it is a fiftieth, and lost in what copies differ by.
    """
    config = shapes.smollm2_config()
    config.head_dim = 8
    rows = []
    with (
        TieredCache(config, hot="4096 tokens", warm="4096 tokens", settings=CacheSettings(verify="off")) as cache,
        torch.inference_mode(),
    ):
        shapes.fill(cache, config, 16 * BLOCK, torch.float32)
        cache.crop(0)  # ends the forward, so that its blocks are full
        store, holder = store_of(cache), cache.parts().holder
        if holder is None or store.warm is None:
            raise LookupError("the cache has no blocks, or no warm tier")
        blocks = holder.table.rows[0]
        slots = store.warm.slots.allocate_many(len(blocks))
        layers, native = len(store.layers), NativeMoves(store.mover.checksummer)
        for count in (1, 8):
            some, places = blocks[:count], slots[:count]
            first, last = some[0].hot or 0, (some[0].hot or 0) + count

            def move(some: list[Block] = some, places: list[int] = places) -> None:
                store.mover.demote(some, "hot", "warm", places, "benchmark").wait()

            def copies(first: int = first, last: int = last, places: list[int] = places) -> None:
                for layer in range(layers):
                    views = store.warm.run(layer, places[0], len(places)) if store.warm is not None else ()
                    for pool, view in zip(store.hot.planes[layer], views, strict=True):
                        view.copy_(pool[:, first:last])

            def at_once(first: int = first, last: int = last, places: list[int] = places) -> None:
                native.move(store.hot, range(first, last), store.tiers["warm"], places, summed=False)

            # Whichever is faster is the copying itself, where the move makes the second kind.
            bare = {"copies on a stream": copies, "copies at once on a stream": at_once}
            ways = {name: lambda work=work: store.device.down.submit(work).wait() for name, work in bare.items()}
            times = harness.interleave({"move": move, **ways}, rounds=rounds, warmup=5, inner=20)
            beyond = times["move"].median_seconds - min(times[name].median_seconds for name in bare)
            rows += _beyond(f"{count} block(s) hot to warm", beyond, count, layers, times)
        for block, slot in zip(blocks, slots, strict=True):
            block.warm = slot
        k_out, v_out = (torch.empty(3, 8, BLOCK, config.head_dim) for _ in range(2))

        def fetch() -> None:
            store.mover.arrived(store.mover.fetch(0, blocks[:8], k_out, v_out, None), lambda: 0.0)

        def plain() -> None:
            views = store.warm.run(0, slots[0], 8) if store.warm is not None else ()
            for out, view in zip((k_out, v_out), views, strict=True):
                out.copy_(view)

        times = harness.interleave({"move": fetch, "copies": plain}, rounds=rounds, warmup=5, inner=50)
        beyond = times["move"].median_seconds - times["copies"].median_seconds
        rows += _beyond("chunk of 8 blocks of one layer up from warm", beyond, 8, 1, times)
    return rows


def _beyond(what: str, seconds: float, blocks: int, layers: int, times: dict[str, harness.Timing]) -> list[Row]:
    """For each piece that is copied, a block's of one layer, and for whole blocks where those move."""
    detail = harness.plain(times)
    each, whole = 1e6 * seconds / blocks / layers, 1e6 * seconds / blocks
    measure = "a move beyond its copies, for each block"
    rows = [Row(f"{measure} and layer: {what}", each, "µs", "<= 20", each <= 20, detail)]
    if layers > 1:
        rows.append(Row(f"{measure} over its {layers} layers: {what}", whole, "µs", "<= 20", whole <= 20))
    return rows


# ---- who stays hot


def placements(lengths: list[int], steps: int) -> list[Row]:
    """Decode by the position window alone, by the watermark alone, and by both: one long context, and mixed ones."""
    config = shapes.smollm2_config(layers=4)
    _, model = two_models(config, torch.float32)
    policies: dict[str, dict[str, Any]] = {
        "position only": {
            "window": 512,
            "settings": CacheSettings(watermark=0.001, write_down_at=0, read_in_place=False),
        },
        "watermark only": {"window": 1, "settings": STREAM},
        "both": {"window": 512, "settings": STREAM},
    }
    rows = []
    for kind, some in (("long", lengths[-1:]), ("mixed", lengths)):
        for name, options in policies.items():
            seconds, up, down = 0.0, 0, 0
            for tokens in some:
                with TieredCache(model.config, hot="1536 tokens", warm="16384 tokens", **options) as cache:
                    shapes.fill(cache, config, tokens, torch.float32)
                    step = step_of(model, cache)
                    for _ in range(3):
                        step()
                    before, started = cache.stats(), time.perf_counter()
                    for _ in range(steps):
                        step()
                    seconds += time.perf_counter() - started
                    after = cache.stats()
                    up += after.decode.streamed_bytes - before.decode.streamed_bytes
                    down += after.decode.written_bytes
            count = steps * len(some)
            detail = {"lengths": some, "up_bytes_a_step": up / count, "down_bytes_a_step": down / count}
            measure = (
                f"placement, {kind} contexts, {name}: {up / count / 1e6:.2f} MB up and {down / count / 1e3:.0f} kB down"
            )
            rows.append(Row(f"{measure} a step", 1e3 * seconds / count, "ms a step", detail=detail))
    return rows


def figures(quick: bool) -> tuple[list[Row], list[Chart]]:
    """Every CPU figure of moving blocks."""
    rows: list[Row] = []
    for codec in ("raw", "int8"):
        rows += traffic(codec, 40 if quick else 600)
    rows.append(padded(4 if quick else 20))
    rows += overlap(3 if quick else 25)
    rows.append(checksum_speed(2 if quick else 20))
    rows.append(verify_cost(2048 if quick else 8192, 2 if quick else 10))
    rows += move_cost(2 if quick else 20)
    rows += placements([300, 1024] if quick else [300, 1500, 6000], 10 if quick else 150)
    return rows, []


def main() -> None:
    """Measure, print, write."""
    harness.answer("transfer", __doc__, figures)


if __name__ == "__main__":
    main()
