"""The decode question on a GPU: python -m benchmarks.decode --device cuda. Within 8 minutes, models from configs.

Exactness is asserted first. Each part that fails leaves its error in the report, and the report is written anew after
every part and when the run is ended from outside, so that an interruption loses nothing but the row it met. `--device
cuda-code-on-cpu` walks the same code over tiny shapes, and tests walk it on an emulated GPU.
"""

from __future__ import annotations

import copy
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import DynamicCache

from benchmarks import harness, shapes
from benchmarks.cuda_setup import Bench, Scale, grow_host_memory
from benchmarks.harness import Row
from benchmarks.shapes import step_of
from tieredkv import CacheSettings, CacheStats, TieredCache
from tieredkv.cli.stock import cache_keyword


class OutOfTimeError(Exception):
    """The time of the run is over, before a row or from outside."""


def streamed_cache(bench: Bench, model: Any) -> TieredCache:
    """A cache of which most blocks come from below hot."""
    settings = CacheSettings(read_in_place=False)
    options: dict[str, Any] = {"warm": "4096 tokens", "window": 256, "device": bench.device(), "settings": settings}
    return TieredCache(model, hot=f"{256 + 8 * 128} tokens", **options)


def logits_of(model: Any, cache: DynamicCache, ids: torch.Tensor) -> torch.Tensor:
    """Of a prompt's last token, and of twenty steps after it."""
    parts, given = (ids[:, :-20], *ids[:, -20:].split(1, 1)), {cache_keyword(model): cache}
    return torch.cat([model(part, logits_to_keep=1, **given).logits for part in parts], 1)


def streamed_logits(bench: Bench, model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, CacheStats]:
    """Ours, and the statistics that show that blocks were attended, streamed and compared."""
    with streamed_cache(bench, model) as cache:
        logits = logits_of(model, cache, ids)
        stats = cache.stats()
    if stats.mode != "blocks" or not stats.decode.streamed_bytes or not stats.verified_blocks:
        raise RuntimeError(f"the cache did not do what is measured here: {stats}")
    return logits, stats


def exactness(bench: Bench) -> Iterator[Row]:
    """A prompt, and steps after it, with most blocks below hot: logits against DynamicCache in fp32."""
    config = copy.deepcopy(next(iter(bench.scale.configs.values())))
    config.num_hidden_layers = 2
    with bench.scale.device:
        model: Any = shapes.model_of(config, torch.float32)
    ids = torch.randint(0, config.vocab_size, (1, 1500), device=bench.scale.device)
    exact = logits_of(model, DynamicCache(config=model.config), ids)
    logits, stats = streamed_logits(bench, model, ids)
    error = harness.difference(logits, exact)
    detail = {"mode": stats.mode, "verified_blocks": stats.verified_blocks, "graphs": stats.graphs}
    measure = "logits against DynamicCache, fp32, streamed: largest difference"
    yield Row(measure, error, "", "<= 1e-4", error <= 1e-4, detail)
    if error > 1e-4:
        raise RuntimeError(f"not exact: {error}; no figure below would mean anything")
    yield from exact_in_half(bench, model, ids, exact)


def exact_in_half(bench: Bench, model: Any, ids: torch.Tensor, exact: torch.Tensor) -> Iterator[Row]:
    """The same in half precision, which other kernels serve: both caches' distance from the fp32 logits."""
    dtype = torch.bfloat16 if bench.scale.dtype == torch.float32 else bench.scale.dtype
    half = copy.deepcopy(model).to(dtype)
    ours = harness.difference(streamed_logits(bench, half, ids)[0], exact)
    half.set_attn_implementation("sdpa")
    stock = harness.difference(logits_of(half, DynamicCache(config=half.config), ids), exact)
    ratio, detail = ours / max(stock, 1e-9), {"ours": ours, "stock": stock}
    name = str(dtype).removeprefix("torch.")
    yield Row(f"error of logits in {name}, streamed: ours over DynamicCache's", ratio, "x", "<= 2", ratio <= 2, detail)
    if ratio > 2 and ours > 1e-4:
        raise RuntimeError(f"not exact: {detail}; no figure below would mean anything")


def windows(bench: Bench, name: str, tokens: int) -> Iterator[Row]:
    """Window sizes at one context, beside everything hot."""
    scale = bench.scale
    stock_model, our_model = bench.models(name)
    flash = CacheSettings(kernel="flash")
    with bench.ours(name, tokens, hot=f"{tokens + 2048} tokens", warm=0) as everything:
        step = step_of(our_model, everything, scale.device)
        stock = DynamicCache(config=scale.configs[name])
        bench.fill(stock, name, tokens)
        with bench.ours(name, tokens, hot=f"{tokens + 2048} tokens", warm=0, settings=flash) as by_flash:
            steps = {
                "stock": step_of(stock_model, stock, scale.device),
                "hot": step,
                "hot, flash operator": step_of(our_model, by_flash, scale.device),
            }
            times = harness.interleave(steps, rounds=scale.rounds, warmup=3, inner=3)
        del stock, steps
        ratio = times["stock"].median_seconds / times["hot"].median_seconds
        measure = f"{name}, {tokens} tokens, everything hot: DynamicCache + SDPA over ours"
        yield Row(measure, ratio, "x", detail=harness.plain(times))
        for window in (each for each in scale.windows if each < tokens):
            if bench.clock.left_seconds < 0:
                raise OutOfTimeError(f"before window {window}")
            yield from _window(bench, name, tokens, window, step)


def _window(bench: Bench, name: str, tokens: int, window: int, hot_step: Callable[[], Any]) -> Iterator[Row]:
    """A step over the larger of compute and transfer, whichever bounds it; each beside what was planned."""
    options = {"hot": f"{window + bench.scale.beyond} tokens", "warm": f"{tokens + 2048} tokens", "window": window}
    with bench.ours(name, tokens, **options) as part:
        steps = {"hot": hot_step, "window": step_of(bench.models(name)[1], part, bench.scale.device)}
        before = part.stats().decode
        times = harness.interleave(steps, rounds=bench.scale.rounds, warmup=3, inner=2)
        stats = part.stats()
    forwards = stats.decode.forwards - before.forwards
    streamed = (stats.decode.streamed_bytes - before.streamed_bytes) / max(forwards, 1)
    copying_seconds = (stats.decode.transfer_seconds - before.transfer_seconds) / max(forwards, 1)
    hot_seconds, seconds = (times[each].median_seconds for each in ("hot", "window"))
    plan = bench.planned(name, tokens, stats.hot.budget_bytes or 0, stats.warm.budget_bytes or 0)
    detail = {
        **harness.plain(times),
        "streamed_bytes_a_step": streamed,
        "planned_streamed_bytes": plan.cost.streamed_bytes,
        "stall_seconds_a_step": (stats.decode.stall_seconds - before.stall_seconds) / max(forwards, 1),
        "copy_seconds_a_step": copying_seconds,
        "mode": stats.mode,
        "pinned_bytes": stats.pinned_bytes,
        "pin_failures": stats.pin_failures,
        "allocated_bytes": torch.cuda.memory_allocated() if bench.is_gpu else 0,
    }
    bound = max(hot_seconds, streamed / bench.pinned_bytes_per_second)
    valid = stats.mode == "blocks" and streamed > 0 and not stats.pin_failures
    label, ratio = f"{name}, {tokens} tokens, window {window}", seconds / bound
    measure = f"{label}: step over max(all hot, streamed bytes ÷ pinned bandwidth)"
    yield Row(measure, ratio, "x", "<= 1.15", valid and ratio <= 1.15, detail)
    share = streamed / max(copying_seconds, 1e-9) / bench.pinned_bytes_per_second
    yield Row(f"{label}: copies, share of the pinned bandwidth", share, "", ">= 0.80", valid and share >= 0.8)
    slower = 100 * (seconds / hot_seconds - 1)
    planned = 100 * (plan.cost.seconds / max(plan.cost.compute_seconds, 1e-9) - 1)
    yield Row(f"{label}: slower than everything hot; plan said {planned:.0f} %", slower, "%")
    planned_bytes = plan.spread.tiers[0].used_bytes + plan.spread.staging_bytes
    measure = f"{label}: device bytes of the cache; plan said {harness.number(planned_bytes)}"
    yield Row(measure, stats.hot.peak_bytes, "bytes", "", None, {"reserved_bytes": stats.hot.reserved_bytes})


def offloaded(bench: Bench, name: str, tokens: int) -> Iterator[Row]:
    """Tokens a second over transformers' offloaded cache, a window of 2,048 hot; and with blocks below hot in int8."""
    scale, window = bench.scale, min(2048, tokens // 4)
    peer = DynamicCache(config=scale.configs[name], offloading=bench.is_gpu)
    bench.fill(peer, name, tokens)
    stock_model, our_model = bench.models(name)
    options = {"hot": f"{window + bench.scale.beyond} tokens", "warm": f"{tokens + 2048} tokens", "window": window}
    with (
        bench.ours(name, tokens, **options) as ours,
        bench.ours(name, tokens, codec="int8", **options) as lossy,
    ):
        steps = {
            "offloaded": step_of(stock_model, peer, scale.device),
            "ours": step_of(our_model, ours, scale.device),
            "int8": step_of(our_model, lossy, scale.device),
        }
        times = harness.interleave(steps, rounds=scale.rounds, warmup=2)
        streamed = ours.stats().decode.streamed_bytes
    for ours_name, what, must in (("ours", "", ">= 3"), ("int8", ", ours in int8 below hot (lossy)", "")):
        ratio = times["offloaded"].median_seconds / times[ours_name].median_seconds
        measure = f"{name}, {tokens} tokens: tokens per second over the offloaded cache{what}"
        reached = (ratio >= 3 and streamed > 0) if must else None
        yield Row(measure, ratio, "x", must, reached, harness.plain(times))


def verification(bench: Bench, name: str, tokens: int) -> Iterator[Row]:
    """What verify="always" costs where everything outside the window is streamed from warm."""
    window = bench.scale.windows[0]
    options = {
        "hot": f"{window + bench.scale.beyond} tokens",
        "warm": f"{tokens + 2048} tokens",
        "window": window,
    }
    with (
        bench.ours(name, tokens, settings=CacheSettings(verify="off"), **options) as unlooked,
        bench.ours(name, tokens, settings=CacheSettings(verify="always"), **options) as looked,
    ):
        caches = {"off": unlooked, "always": looked}
        model = bench.models(name)[1]
        steps = {verify: step_of(model, cache, bench.scale.device) for verify, cache in caches.items()}
        times = harness.interleave(steps, rounds=2 * bench.scale.rounds, warmup=3, inner=2)
        streamed = looked.stats().decode.streamed_bytes
    slower = 100 * (times["always"].median_seconds / times["off"].median_seconds - 1)
    measure = f"{name}, {tokens} tokens from warm: verify always over off"
    yield Row(measure, slower, "%", "<= 5", slower <= 5 and streamed > 0, harness.plain(times))


def longest(bench: Bench, name: str) -> Iterator[Row]:
    """Device bytes at the longest context."""
    tokens, window = bench.scale.longest, bench.scale.windows[0]
    options = {"hot": f"{window + bench.scale.beyond} tokens", "warm": f"{tokens + 2048} tokens", "window": window}
    with bench.ours(name, tokens, **options) as cache:
        step = step_of(bench.models(name)[1], cache, bench.scale.device)
        seconds = harness.interleave({"x": step}, rounds=bench.scale.rounds, warmup=1)["x"].median_seconds
        stats = cache.stats()
    good = stats.hot.peak_bytes <= (stats.hot.budget_bytes or 0)
    measure = f"{name}, {tokens} tokens: hot peak within budget, bytes"
    yield Row(measure, stats.hot.peak_bytes, "", f"<= {stats.hot.budget_bytes}", good, {"step_seconds": seconds})


def bandwidths(bench: Bench) -> Iterator[Row]:
    """Of the link and of the device's memory, in this run; and how much host memory there is."""
    memory = grow_host_memory() if bench.is_gpu else {}
    bench.measure()
    yield Row("pinned host memory to device", bench.pinned_bytes_per_second / 1e9, "GB/s", detail=memory)
    yield Row("device memory, a copy's reading and writing", bench.device_bytes_per_second / 1e9, "GB/s")


def parts(bench: Bench) -> Iterator[Callable[[], Iterator[Row]]]:
    """Every part, the most telling first."""
    yield lambda: bandwidths(bench)
    yield lambda: exactness(bench)
    scale = bench.scale
    for name in scale.configs:
        for number, tokens in enumerate(scale.contexts):
            yield lambda name=name, tokens=tokens: windows(bench, name, tokens)
            if number == 0:
                yield lambda name=name: offloaded(bench, name, scale.contexts[-1])
                yield lambda name=name: verification(bench, name, scale.contexts[0])
        yield lambda name=name: longest(bench, name)


def run(device: str, quick: bool) -> list[Row]:
    """Measure part after part while there is time; a report exists after each (not when quick)."""
    rows = list[Row]()
    if not quick and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _end)  # what `timeout` sends
    bench = Bench(Scale.of(device, quick))
    for number, part in enumerate(parts(bench)):
        if bench.clock.left_seconds < 0:
            rows.append(Row(f"part {number}: no time left", 0.0, "", "", None))
            break
        try:
            for row in part():
                rows.append(row)
                print(row.measure, harness.number(row.value), row.unit, row.reached, flush=True)
        except Exception as error:
            rows.append(Row(f"part {number}: {error!r}", 0.0, "", "", False, {"trace": traceback.format_exc()}))
            if number < 2 or isinstance(error, OutOfTimeError):  # without bandwidths or exactness nothing counts
                break
        finally:
            if not quick:
                harness.write("decode", rows)
            if bench.is_gpu:
                torch.cuda.empty_cache()
    return rows


def _end(number: int, frame: Any) -> None:
    raise OutOfTimeError(f"signal {number}")
