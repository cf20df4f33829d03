"""How much must stay hot, and what does the rest cost? Run: python -m benchmarks.windows [--quick]

Measured: SmolLM2-135M-Instruct decodes after a long prompt with a window hot and the rest warm, read in place or copied
at each step, against everything hot. Computed, from the bytes that must move and the rates that `tieredkv plan` takes:
the same for models of 1.5B and 8B parameters on a card.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig

from benchmarks import harness, shapes
from benchmarks.harness import Row
from benchmarks.plots import Chart
from tieredkv import CacheSettings, TieredCache
from tieredkv.cli.model import load
from tieredkv.cli.prompt import python_prose
from tieredkv.sizing import Rates, kv_bytes_per_token, parse_dtype

WINDOWS = (512, 1024, 2048, 4096)
BEYOND = 4 * 128
"""Tokens that hot has beside the window: the open block, new tokens, staging."""
CONTEXT = 32768
MOST_LOGIT_ERROR = 1e-5


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model by what decides the cost of a step.

    Args:
        name: for people.
        config: its layers and heads.
        parameters: all of them.
    """

    name: str
    config: LlamaConfig
    parameters: float


def known_shapes() -> list[Shape]:
    """The models for which a window is computed."""
    return [
        Shape("Qwen2.5-1.5B", shapes.qwen25_15b_config(), 1.54e9),
        Shape("Llama-3-8B", shapes.llama3_8b_config(32), 8.03e9),
    ]


def computed(shape: Shape, window: int, codec: str, rates: Rates) -> tuple[float, float, float]:
    """(hot bytes, bytes moved up in a step, slowdown of a step against everything hot) at `CONTEXT` tokens in bf16.

    A step reads weights and K/V once; copies overlap with that, so that the slower of the two counts, as in
    `tieredkv plan`.
    """
    dtype = parse_dtype("bf16")
    token_bytes = kv_bytes_per_token(shape.config, dtype)
    moved = (CONTEXT - window) * kv_bytes_per_token(shape.config, dtype, codec)
    compute = (2 * shape.parameters + CONTEXT * token_bytes) / rates.device_bytes_per_second
    slowdown = max(moved / rates.pcie_bytes_per_second, compute) / compute - 1
    return window * token_bytes, moved, slowdown


def computed_rows() -> list[Row]:
    """The table for the models that are not run here."""
    rates, rows = Rates(), []
    for shape in known_shapes():
        whole = CONTEXT * kv_bytes_per_token(shape.config, parse_dtype("bf16"))
        for window in WINDOWS:
            for codec in ("raw", "int8"):
                hot, moved, slowdown = computed(shape, window, codec, rates)
                title = f"{shape.name}, {CONTEXT:,} tokens, window {window:,}, rest warm, {codec}: slowdown (computed)"
                detail = {"hot_bytes": hot, "moved_bytes_a_step": moved, "all_hot_bytes": whole}
                rows.append(Row(title, 100 * slowdown, "%", detail=detail))
    for shape in known_shapes():
        for window in WINDOWS:
            hot = window * kv_bytes_per_token(shape.config, parse_dtype("bf16"))
            rows.append(Row(f"{shape.name}, window {window:,}: hot bytes (computed)", hot / 2**20, "MiB"))
    return rows


def measured_rows(tokens: int, windows: tuple[int, ...], rounds: int) -> tuple[list[Row], list[Chart]]:
    """The table for SmolLM2: each window against everything hot, in interleaved rounds on one prompt."""
    loaded = load(None, torch.float32, "cpu")
    model = loaded.model
    model.set_attn_implementation("tieredkv")
    ids = loaded.tokenizer(python_prose(), return_tensors="pt", add_special_tokens=False).input_ids[:, :tokens]
    token = ids[:, :1]
    rows: list[Row] = []
    lines: dict[str, list[tuple[float, float]]] = {}
    prompt = DynamicCache(config=model.config)  # computed once: every cache begins with the same K and V
    model(ids, cache=prompt, logits_to_keep=1)
    with TieredCache.from_dynamic(prompt, model, hot=f"{tokens + 2048} tokens", warm=0) as everything:
        for in_place in (True, False):
            way = "read in place" if in_place else "copied at each step"
            for window in windows:
                settings = CacheSettings(read_in_place=in_place)
                hot, warm = f"{window + BEYOND} tokens", f"{tokens + 2048} tokens"
                tiers: dict[str, Any] = {"hot": hot, "warm": warm, "window": window, "settings": settings}
                with TieredCache.from_dynamic(prompt, model, **tiers) as part:
                    slowdown, detail = against(model, token, everything, part, rounds)
                    everything.crop(tokens - everything.get_seq_length())
                title = f"SmolLM2, {tokens:,} tokens, window {window:,}, rest warm, {way}"
                rows.append(Row(f"{title}: slowdown", 100 * slowdown, "%", detail=detail))
                error = detail["logit_error"]
                good = error <= MOST_LOGIT_ERROR
                rows.append(Row(f"{title}: logits differ by", error, "of the largest", "<= 1e-5", good))
                rows.append(Row(f"{title}: hot bytes", detail["hot_bytes"] / 2**20, "MiB"))
                lines.setdefault(way, []).append((float(window), 100 * slowdown))
    title = f"SmolLM2-135M, {tokens:,} tokens: slowdown of a step"
    return rows, [Chart("slowdown", title, "tokens of the window", "% over everything hot", lines, log_x=True)]


def against(
    model: Any, token: torch.Tensor, everything: TieredCache, part: TieredCache, rounds: int
) -> tuple[float, dict[str, Any]]:
    """(slowdown, what is behind it) of a step with `part` against one with everything hot."""
    caches = {"all hot": everything, "window": part}
    logits = {}
    for name, cache in caches.items():
        for _ in range(2):  # the first forward of a cache finds out that blocks serve, and gathers
            logits[name] = model(token, cache=cache).logits
            cache.crop(-1)
        if cache.mode != "blocks":
            raise RuntimeError(f"{name}: attended in mode {cache.mode}, {cache.fallback_reason}")
    error = harness.difference(logits["window"], logits["all hot"])

    def step(cache: TieredCache) -> None:
        model(token, cache=cache)

    times = harness.interleave({n: lambda c=c: step(c) for n, c in caches.items()}, rounds=rounds, inner=3)
    stats = part.stats()
    detail = {"hot_bytes": stats.hot.peak_bytes, "warm_bytes": stats.warm.used_bytes, "mode": stats.mode}
    detail |= {"logit_error": error} | {name: dataclasses.asdict(each) for name, each in times.items()}
    return times["window"].median_seconds / times["all hot"].median_seconds - 1, detail


def figures(quick: bool) -> tuple[list[Row], list[Chart]]:
    """What is measured, then what is computed."""
    windows = WINDOWS[:1] if quick else WINDOWS
    rows, charts = measured_rows(1536 if quick else 8000, windows, 1 if quick else 6)
    return rows + computed_rows(), charts


def main() -> None:
    """Measure, print, write."""
    harness.answer("windows", __doc__, figures)


if __name__ == "__main__":
    main()
