"""The decode question on a GPU: python -m benchmarks.decode --device cuda. Within 8 minutes, models from configs.

Exactness is asserted first. Each part that fails leaves its error in the report, and the report is written anew after
every part, so that an interruption loses nothing but the part it met. `--device cpu --quick` walks the same code over
tiny shapes, which is how it is tested without a GPU.
"""

from __future__ import annotations

import copy
import dataclasses
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig

from benchmarks import harness, shapes
from benchmarks.harness import Row
from benchmarks.shapes import step_of, two_models, wait
from tieredkv import CacheSettings, TieredCache

BUDGET_SECONDS = 8 * 60
RESERVE_SECONDS = 20
WINDOWS = (512, 1024, 2048, 4096)


@dataclasses.dataclass(frozen=True)
class Scale:
    """Sizes of a run: the real ones, or small ones that only show that the code works."""

    device: torch.device
    dtype: torch.dtype
    configs: dict[str, LlamaConfig]
    contexts: tuple[int, ...]
    longest: int
    windows: tuple[int, ...]
    rounds: int

    @classmethod
    def of(cls, device: str, quick: bool) -> Scale:
        """The sizes for a device."""
        if quick:
            tiny = shapes.llama3_8b_config(2)
            tiny.hidden_size, tiny.intermediate_size = 256, 512
            tiny.num_attention_heads, tiny.num_key_value_heads, tiny.head_dim = 4, 2, 64
            return cls(torch.device(device), torch.float32, {"tiny": tiny}, (4096,), 6144, (256,), 2)
        configs = {"1.5B": shapes.qwen25_15b_config(), "8B": shapes.llama3_8b_config(32)}
        return cls(torch.device(device), torch.bfloat16, configs, (16384, 32768), 65536, WINDOWS, 5)


class Clock:
    """Says whether there is time for another part."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    @property
    def left_seconds(self) -> float:
        """Until the budget ends."""
        return BUDGET_SECONDS - RESERVE_SECONDS - (time.monotonic() - self._started)


def streamed_cache(model: Any) -> TieredCache:
    """A cache of which most blocks come from below hot."""
    return TieredCache(model, hot=f"{256 + 8 * 128} tokens", warm="4096 tokens", window=256)


def logits_of(model: Any, cache: DynamicCache, ids: torch.Tensor) -> torch.Tensor:
    """Of a prompt's last token, and of twenty steps after it."""
    parts = (ids[:, :-20], *ids[:, -20:].split(1, 1))
    return torch.cat([model(part, cache=cache, logits_to_keep=1).logits for part in parts], 1)


def exactness(scale: Scale) -> Iterator[Row]:
    """A prompt, and steps after it, with most blocks below hot: logits against DynamicCache in fp32."""
    config = next(iter(scale.configs.values()))
    config = copy.deepcopy(config)
    config.num_hidden_layers = 2
    with scale.device:
        model: Any = shapes.model_of(config, torch.float32)
    ids = torch.randint(0, config.vocab_size, (1, 1500), device=scale.device)
    exact = logits_of(model, DynamicCache(config=model.config), ids)
    with streamed_cache(model) as ours:
        error = harness.difference(logits_of(model, ours, ids), exact)
        stats = ours.stats()
    detail = {"mode": stats.mode, "verified_blocks": stats.verified_blocks, "graphs": stats.graphs}
    yield Row(
        "logits against DynamicCache, fp32, streamed: largest difference", error, "", "<= 1e-4", error <= 1e-4, detail
    )
    if error > 1e-4:
        raise RuntimeError(f"not exact: {error}; no figure below would mean anything")
    yield from exact_in_half(scale, model, ids, exact)


def exact_in_half(scale: Scale, model: Any, ids: torch.Tensor, exact: torch.Tensor) -> Iterator[Row]:
    """The same in half precision, which other kernels serve: both caches' distance from the fp32 logits."""
    dtype = torch.bfloat16 if scale.dtype == torch.float32 else scale.dtype
    half = copy.deepcopy(model).to(dtype)
    with streamed_cache(half) as cache:
        ours = harness.difference(logits_of(half, cache, ids), exact)
    half.set_attn_implementation("sdpa")
    stock = harness.difference(logits_of(half, DynamicCache(config=half.config), ids), exact)
    ratio, detail = ours / max(stock, 1e-9), {"ours": ours, "stock": stock}
    name = str(dtype).removeprefix("torch.")
    yield Row(f"error of logits in {name}, streamed: ours over DynamicCache's", ratio, "x", "<= 2", ratio <= 2, detail)
    if ratio > 2 and ours > 1e-4:
        raise RuntimeError(f"not exact: {detail}; no figure below would mean anything")


def pinned_bandwidth(scale: Scale) -> float:
    """Bytes a second from pinned host memory to the device, the best of several copies."""
    size = 2**30 if scale.device.type == "cuda" else 2**26
    host = torch.empty(size, dtype=torch.uint8, pin_memory=scale.device.type == "cuda")
    there = torch.empty(size, dtype=torch.uint8, device=scale.device)
    best = 0.0
    for _ in range(5):
        wait(scale.device)
        started = time.perf_counter()
        there.copy_(host, non_blocking=True)
        wait(scale.device)
        best = max(best, size / (time.perf_counter() - started))
    return best


def windows(scale: Scale, name: str, tokens: int, bandwidth: float) -> Iterator[Row]:
    """Window sizes at one context: step over the larger of compute and transfer, whichever bounds it."""
    config = scale.configs[name]
    stock_model, our_model = two_models(config, scale.dtype, scale.device)
    token_bytes = 2 * config.num_key_value_heads * config.head_dim * scale.dtype.itemsize * config.num_hidden_layers
    stock = DynamicCache(config=config)
    shapes.fill(stock, config, tokens, scale.dtype, device=scale.device)
    with TieredCache(our_model, hot=f"{tokens + 2048} tokens", warm=0) as everything:
        shapes.fill(everything, config, tokens, scale.dtype, device=scale.device)
        steps = {
            "stock": step_of(stock_model, stock, scale.device),
            "hot": step_of(our_model, everything, scale.device),
        }
        times = harness.interleave(steps, rounds=scale.rounds, warmup=3, inner=3)
        hot_seconds = times["hot"].median_seconds
        ratio = times["stock"].median_seconds / hot_seconds
        yield Row(
            f"{name}, {tokens} tokens, everything hot: DynamicCache + SDPA over ours", ratio, "x", detail=_plain(times)
        )
    del stock
    for window in scale.windows:
        if window >= tokens:
            continue
        hot = f"{window + 8 * 128 + 2 * 1024} tokens"
        with TieredCache(our_model, hot=hot, warm=f"{tokens + 2048} tokens", window=window) as part:
            shapes.fill(part, config, tokens, scale.dtype, device=scale.device)
            step = step_of(our_model, part, scale.device)
            before = part.stats().decode
            seconds = harness.interleave({"window": step}, rounds=scale.rounds, warmup=3, inner=2)[
                "window"
            ].median_seconds
            stats = part.stats()
        forwards = stats.decode.forwards - before.forwards
        streamed = (stats.decode.streamed_bytes - before.streamed_bytes) / max(forwards, 1)
        bound = max(hot_seconds, streamed / bandwidth)
        detail = {
            "step_seconds": seconds,
            "slowdown": seconds / hot_seconds - 1,
            "streamed_bytes_a_step": streamed,
            "predicted_seconds": max(hot_seconds, (tokens - window) * token_bytes / bandwidth),
            "hot_bytes": stats.hot.peak_bytes,
            "reserved_bytes": stats.hot.reserved_bytes,
            "mode": stats.mode,
            "stall_seconds_a_step": (stats.decode.stall_seconds - before.stall_seconds) / max(forwards, 1),
            "copy_seconds_a_step": (stats.decode.transfer_seconds - before.transfer_seconds) / max(forwards, 1),
        }
        measure = f"{name}, {tokens} tokens, window {window}: step over max(all hot, streamed bytes ÷ pinned bandwidth)"
        yield Row(measure, seconds / bound, "x", "<= 1.15", seconds / bound <= 1.15, detail)
        if streamed:
            share = streamed / max(detail["copy_seconds_a_step"], 1e-9) / bandwidth
            measure = f"{name}, {tokens} tokens, window {window}: copies, share of the pinned bandwidth"
            yield Row(measure, share, "", ">= 0.80", share >= 0.8)


def offloaded(scale: Scale, name: str, tokens: int) -> Iterator[Row]:
    """Tokens a second over transformers' offloaded cache, a window of 2,048 hot."""
    config = scale.configs[name]
    stock_model, our_model = two_models(config, scale.dtype, scale.device)
    peer = DynamicCache(config=config, offloading=scale.device.type == "cuda")
    shapes.fill(peer, config, tokens, scale.dtype, device=scale.device)
    window = min(2048, tokens // 2)
    with TieredCache(our_model, hot=f"{window + 3072} tokens", warm=f"{tokens + 2048} tokens", window=window) as ours:
        shapes.fill(ours, config, tokens, scale.dtype, device=scale.device)
        steps = {
            "offloaded": step_of(stock_model, peer, scale.device),
            "ours": step_of(our_model, ours, scale.device),
        }
        times = harness.interleave(steps, rounds=max(scale.rounds // 2, 2), warmup=1)
    ratio = times["offloaded"].median_seconds / times["ours"].median_seconds
    yield Row(
        f"{name}, {tokens} tokens: tokens per second over the offloaded cache",
        ratio,
        "x",
        ">= 3",
        ratio >= 3,
        _plain(times),
    )


def verification(scale: Scale, name: str, tokens: int) -> Iterator[Row]:
    """What verify="always" costs where everything outside the window is streamed from warm."""
    config = scale.configs[name]
    _, model = two_models(config, scale.dtype, scale.device)
    seconds = {}
    for verify in ("off", "always"):
        settings = CacheSettings(verify=verify, read_in_place=False)
        with TieredCache(
            model, hot="5120 tokens", warm=f"{tokens + 2048} tokens", window=512, settings=settings
        ) as cache:
            shapes.fill(cache, config, tokens, scale.dtype, device=scale.device)
            step = step_of(model, cache, scale.device)
            seconds[verify] = harness.interleave({"x": step}, rounds=scale.rounds, warmup=2)["x"].median_seconds
    slower = 100 * (seconds["always"] / seconds["off"] - 1)
    yield Row(f"{name}, {tokens} tokens from warm: verify always over off", slower, "%", "<= 5", slower <= 5, seconds)


def longest(scale: Scale, name: str) -> Iterator[Row]:
    """Device bytes at the longest context with a window of 1,024."""
    config = scale.configs[name]
    _, model = two_models(config, scale.dtype, scale.device)
    with TieredCache(model, hot="5120 tokens", warm=f"{scale.longest + 2048} tokens", window=1024) as cache:
        shapes.fill(cache, config, scale.longest, scale.dtype, device=scale.device)
        step = step_of(model, cache, scale.device)
        seconds = harness.interleave({"x": step}, rounds=2, warmup=1)["x"].median_seconds
        stats = cache.stats()
    good = stats.hot.peak_bytes <= (stats.hot.budget_bytes or 0)
    measure = f"{name}, {scale.longest} tokens: hot peak within budget, bytes"
    yield Row(measure, stats.hot.peak_bytes, "", f"<= {stats.hot.budget_bytes}", good, {"step_seconds": seconds})


def _plain(times: dict[str, harness.Timing]) -> dict[str, Any]:
    return {name: dataclasses.asdict(t) for name, t in times.items()}


def parts(scale: Scale, bandwidth: float) -> Iterator[Callable[[], Iterator[Row]]]:
    """Every part, the most telling first."""
    yield lambda: exactness(scale)
    for name in scale.configs:
        for tokens in scale.contexts:
            yield lambda name=name, tokens=tokens: windows(scale, name, tokens, bandwidth)
        yield lambda name=name: offloaded(scale, name, scale.contexts[-1])
        yield lambda name=name: verification(scale, name, scale.contexts[0])
        yield lambda name=name: longest(scale, name)


def run(device: str, quick: bool) -> list[Row]:
    """Measure part after part while there is time; a report exists after each (not when quick)."""
    clock, rows = Clock(), list[Row]()
    scale = Scale.of(device, quick)
    bandwidth = pinned_bandwidth(scale)
    rows.append(Row("pinned host memory to device", bandwidth / 1e9, "GB/s"))
    for number, part in enumerate(parts(scale, bandwidth)):
        if clock.left_seconds < 0:
            rows.append(Row(f"part {number}: no time left", 0.0, "", "", None))
            break
        try:
            rows.extend(part())
        except Exception as error:
            rows.append(Row(f"part {number}: {error!r}", 0.0, "", "", False, {"trace": traceback.format_exc()}))
            if number == 0:
                break
        finally:
            if not quick:
                harness.write("decode", rows)
            if scale.device.type == "cuda":
                torch.cuda.empty_cache()
    return rows
