"""How fast is attention over blocks, against transformers' own cache?

Run: python -m benchmarks.decode [--quick] [--device cuda].

Both caches in one run, the same weights and the same contents, interleaved rounds, every layer cycled through.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from benchmarks import decode_cuda, harness, shapes, shapes_of_load, streamed
from benchmarks.harness import Row
from benchmarks.shapes import BLOCK, Attention, step_of, two_models
from tieredkv import TieredCache
from tieredkv.attention.native import NativeKernels, NativePlan, NewTokens
from tieredkv.hf import seam


def compare_steps(tokens: int, dtype: torch.dtype, rounds: int) -> tuple[float, dict[str, Any]]:
    """Step time of DynamicCache + SDPA over ours, everything hot."""
    config = shapes.smollm2_config()
    stock_model, our_model = two_models(config, dtype)
    stock = DynamicCache(config=config)
    shapes.fill(stock, config, tokens, dtype)
    with TieredCache(our_model.config, hot=f"{tokens + 2048} tokens", warm=0) as ours:
        shapes.fill(ours, config, tokens, dtype)
        for _ in range(2):  # the first step after a fill by hand gathers, and finds out that blocks serve
            exact, got = step_of(stock_model, stock)().logits, step_of(our_model, ours)().logits
            error = harness.difference(got, exact)
        times = harness.interleave(
            {"stock": step_of(stock_model, stock), "ours": step_of(our_model, ours)}, rounds=rounds, inner=5
        )
        detail = harness.plain(times)
        detail |= {"mode": ours.mode, "logit_error": error}
    return times["stock"].median_seconds / times["ours"].median_seconds, detail


def attention_alone(
    config: Any, tokens: int, dtype: torch.dtype, rounds: int
) -> tuple[float, float, float, dict[str, Any]]:
    """(stock over ours, seconds a layer of ours, kernel seconds a layer) of cache and attention without the model."""
    layers, heads, kv_heads, dim = (
        config.num_hidden_layers,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
    )
    config._attn_implementation = "tieredkv"
    module = Attention(heads // kv_heads, config).eval()
    q = torch.randn(1, heads, 1, dim, dtype=dtype)
    stock = DynamicCache(config=config)
    shapes.fill(stock, config, tokens, dtype)
    with TieredCache(config, hot=f"{tokens + 2048} tokens", warm=0) as ours, torch.inference_mode():
        shapes.fill(ours, config, tokens, dtype)
        new = [torch.randn(1, kv_heads, 1, dim, dtype=dtype) for _ in range(2)]

        def run(cache: DynamicCache, attend: Callable[..., Any]) -> None:
            for layer in range(layers):
                keywords: dict[str, Any] = {}
                k, v = cache.update(new[0].clone(), new[1].clone(), layer, kwargs=keywords)
                attend(module, q, k, v, None, scaling=dim**-0.5, **keywords)

        store, table = ours.parts().store, ours.parts().holder.table
        native = NativeKernels()
        native.serves(q, dim, dim)

        def kernels() -> None:
            blocks = table.rows[0]
            keys = (0, blocks[0].hot * BLOCK, blocks[-1].tokens + (len(blocks) - 1) * BLOCK)
            plan = NativePlan(
                [NewTokens(0, 0, 1, [keys])],
                new=1,
                kv_heads=kv_heads,
                group=heads // kv_heads,
                threads=torch.get_num_threads(),
                causal=False,
            )
            for layer in range(layers):
                for each in new:  # as in `run`, where a model would have made them
                    each.clone()
                k_flat, v_flat = store.flat_pools(layer)
                native.attend(q, [(k_flat, v_flat)], plan, scale=dim**-0.5)

        contestants = {
            "stock": lambda: run(stock, sdpa_attention_forward),
            "ours": lambda: run(ours, seam.attention),
            "kernel": kernels,
        }
        times = harness.interleave(contestants, rounds=rounds, warmup=3, inner=3)
    each = {name: t.median_seconds / layers for name, t in times.items()}
    detail = {"seconds_a_layer": each, "mode": "blocks"}
    return times["stock"].median_seconds / times["ours"].median_seconds, each["ours"], each["kernel"], detail


def prefill(tokens: int, rounds: int) -> tuple[float, dict[str, Any]]:
    """Seconds of a prefill in one call, ours over stock."""
    config = shapes.smollm2_config()
    stock_model, our_model = two_models(config, torch.float32)
    ids = torch.randint(0, 49152, (1, tokens))

    def stock() -> None:
        stock_model(ids, cache=DynamicCache(config=config), logits_to_keep=1)

    def ours() -> None:
        with TieredCache(our_model.config, hot=f"{tokens + 512} tokens", warm=0) as cache:
            our_model(ids, cache=cache, logits_to_keep=1)

    times = harness.interleave({"stock": stock, "ours": ours}, rounds=rounds, warmup=1)
    detail = harness.plain(times)
    return times["ours"].median_seconds / times["stock"].median_seconds, detail


def windows(tokens: int, sizes: list[int], rounds: int) -> list[Row]:
    """Decode with a window hot and the rest warm, read in place: slowdown against everything hot."""
    config = shapes.smollm2_config()
    _, model = two_models(config, torch.float32)
    must = {512: 10, 1024: 8, 2048: 5, 4096: 3}
    rows = []
    with TieredCache(model.config, hot=f"{tokens + 2048} tokens", warm=0) as everything:
        shapes.fill(everything, config, tokens, torch.float32)
        for window in sizes:
            hot = f"{window + 3 * BLOCK} tokens"
            with TieredCache(model.config, hot=hot, warm=f"{tokens + 2048} tokens", window=window) as part:
                shapes.fill(part, config, tokens, torch.float32)
                steps = {"all hot": step_of(model, everything), "window": step_of(model, part)}
                times = harness.interleave(steps, rounds=rounds, inner=5)
                slow = times["window"].median_seconds / times["all hot"].median_seconds - 1
                stats = part.stats()
                rows.append(
                    Row(
                        f"slowdown at {tokens} tokens, window {window} hot, rest warm in place",
                        100 * slow,
                        "%",
                        f"<= {must[window]}",
                        100 * slow <= must[window],
                        {"hot_bytes": stats.hot.used_bytes, "warm_bytes": stats.warm.used_bytes, "mode": stats.mode}
                        | harness.plain(times),
                    )
                )
    return rows


def gather_step(tokens: int, rounds: int) -> Row:
    """A step with any other attention: the whole K/V of each layer is put together."""
    config = shapes.smollm2_config()
    model, _ = two_models(config, torch.float32)
    stock = DynamicCache(config=config)
    shapes.fill(stock, config, tokens, torch.float32)
    with TieredCache(model.config, hot=f"{tokens + 2048} tokens", warm=0) as ours:
        shapes.fill(ours, config, tokens, torch.float32)
        steps = {"stock": step_of(model, stock), "gather": step_of(model, ours)}
        times = harness.interleave(steps, rounds=rounds, inner=3)
    ratio = times["gather"].median_seconds / times["stock"].median_seconds
    return Row(f"gather at {tokens} tokens: step over DynamicCache + SDPA", ratio, "x")


def figures(quick: bool) -> list[Row]:
    """Every CPU figure, largest question first."""
    rounds = 2 if quick else 8
    long = 1024 if quick else 8192
    rows: list[Row] = []
    for dtype, name, limits in (
        (torch.float32, "fp32", {8192: 1.20, 1024: 0.95}),
        (torch.bfloat16, "bf16", {8192: 2.2, 1024: 1.1}),
    ):
        for tokens in sorted({long, 1024}, reverse=True):
            ratio, detail = compare_steps(tokens, dtype, rounds)
            limit = limits[tokens]
            measure = f"decode step at {tokens}, {name}, everything hot: DynamicCache + SDPA over ours"
            rows.append(Row(measure, ratio, "x", f">= {limit}", ratio >= limit, detail))
    ratio, each, kernel, detail = attention_alone(shapes.llama3_8b_config(6), long, torch.float32, rounds)
    measure = f"attention + cache alone, 32/8 heads of 128, {long}, fp32: stock over ours"
    rows.append(Row(measure, ratio, "x", ">= 3", ratio >= 3, detail))
    config = shapes.smollm2_config()
    ratio, each, kernel, detail = attention_alone(config, long, torch.float32, rounds)
    bandwidth = harness.read_bandwidth()
    moved = 2 * config.num_key_value_heads * config.head_dim * 4 * long
    over = kernel / (moved / bandwidth)
    detail |= {"bandwidth_bytes_per_second": bandwidth, "stock_over_ours": ratio}
    rows.append(
        Row(f"attention over KV bytes ÷ read bandwidth, fp32, {long}", over, "x", "<= 1.5", over <= 1.5, detail)
    )
    outside = each - kernel
    rows.append(Row("outside kernels, per layer and step", 1e6 * outside, "µs", "<= 60", 1e6 * outside <= 60, detail))
    ratio, detail = prefill(512 if quick else 4096, 2 if quick else 5)
    rows.append(Row("prefill of 4K in one call, ours over stock", ratio, "x", "<= 1.10", ratio <= 1.10, detail))
    sizes = [512] if quick else [512, 1024, 2048, 4096]
    rows += windows(long, sizes, rounds)
    # With less, all of it would fit in hot beside the staging buffers.
    rows += streamed.figures(shapes.smollm2_config(), max(long, 2048), sizes, rounds)
    rows.append(gather_step(long, rounds))
    rows.append(shapes_of_load.ragged(rounds))
    rows += shapes_of_load.graphs_of_a_run(quick)
    rows.append(shapes_of_load.many_pools(*((3, 3) if quick else (20, 20))))
    return rows


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, for checking that it runs")
    parser.add_argument("--device", choices=("cpu", "cuda", "cuda-code-on-cpu"), default="cpu")
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    started = time.perf_counter()
    if arguments.device == "cpu":
        rows = figures(arguments.quick)
    else:
        on_cpu = arguments.device == "cuda-code-on-cpu"
        rows = decode_cuda.run("cpu" if on_cpu else "cuda", quick=arguments.quick or on_cpu)
    keep = not arguments.quick and arguments.device != "cuda-code-on-cpu"
    harness.conclude("decode", rows, started=started, keep=keep)


if __name__ == "__main__":
    main()
