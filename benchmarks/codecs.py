"""What each codec costs in quality, bytes and time: python -m benchmarks.codecs [--quick].

Quality is that of SmolLM2-135M-Instruct over prose from `pydoc_data.topics`: one forward over all tokens in which every
full block of K and V of every layer went through the codec, the block a token is in included. A cache does better: its
hot blocks are exact.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.nn import functional
from transformers import DynamicCache

from benchmarks import harness
from benchmarks.harness import Row
from benchmarks.plots import Chart
from tieredkv.block import LayerGeometry
from tieredkv.cli.model import load
from tieredkv.cli.prompt import python_prose
from tieredkv.codecs import CODEC_NAMES, Codec, get_codec

BLOCK = 128
LOGIT_ROWS = 256  # logits computed at once: 50 MB of fp32 at 49,152 words

MOST_PERPLEXITY_CHANGE = {"int8": 0.1, "fp8": 3.5, "int4": 2.5}  # %
MOST_RATIO = {"fp8": 0.52, "int8": 0.54, "int4": 0.32}
LEAST_SPEED = 1.5  # GB/s of fp32 on one core


class EncodedCache(DynamicCache):
    """Returns K and V as they come out of a codec; for one forward into an empty cache."""

    def __init__(self, config: Any, codec: Codec) -> None:
        super().__init__(config=config)
        self.codec = codec

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **keywords: Any) -> Any:
        """Store and return; the tail that fills no block stays exact."""
        halves = key_states.clone(), value_states.clone()  # [1, kv_heads, tokens, dim]
        full = key_states.shape[2] // BLOCK * BLOCK
        k, v = (half[0, :, :full].unflatten(1, (-1, BLOCK)) for half in halves)  # [kv_heads, n, block_size, dim]
        self.codec.decode(self.codec.encode(k, v), k, v)
        return super().update(*halves, *args, **keywords)


@dataclasses.dataclass(frozen=True)
class Quality:
    """How a model predicts a text.

    Args:
        perplexity: of the text.
        kl: mean Kullback-Leibler divergence of its predictions from those with exact K and V, in nats.
        agreement: share of positions at which the likeliest next token is the same as with exact K and V.
    """

    perplexity: float
    kl: float
    agreement: float


def qualities(tokens: int) -> dict[str, Quality]:
    """Quality of each codec on the first `tokens` tokens of the prose."""
    loaded = load(None, torch.float32, "cpu")
    model = loaded.model
    ids = loaded.tokenizer(python_prose(), return_tensors="pt", add_special_tokens=False).input_ids[:, :tokens]
    exact: torch.Tensor | None = None
    found = {}
    for name in CODEC_NAMES:
        cache = EncodedCache(model.config, get_codec(name))
        hidden = model.model(ids, cache=cache, use_cache=True).last_hidden_state[0]  # [tokens, hidden]
        exact = hidden if exact is None else exact  # raw is the first
        found[name] = quality(model.lm_head, ids[0], hidden, exact)
    return found


def quality(head: Any, ids: torch.Tensor, hidden: torch.Tensor, exact: torch.Tensor) -> Quality:
    """Compare predictions from `hidden` `[tokens, hidden]` with those from `exact`, and both with the text."""
    nll = kl = same = 0.0
    count = len(ids) - 1
    for start in range(0, count, LOGIT_ROWS):
        rows = slice(start, min(start + LOGIT_ROWS, count))
        ours, theirs = head(hidden[rows]).log_softmax(-1), head(exact[rows]).log_softmax(-1)
        nll += functional.nll_loss(ours, ids[rows.start + 1 : rows.stop + 1], reduction="sum").item()
        kl += functional.kl_div(ours, theirs, reduction="sum", log_target=True).item()
        same += (ours.argmax(-1) == theirs.argmax(-1)).sum().item()
    return Quality(float(torch.tensor(nll / count).exp()), kl / count, same / count)


def quality_rows(tokens: int) -> list[Row]:
    """Perplexity change, KL and agreement of each lossy codec."""
    found = qualities(tokens)
    exact = found.pop("raw")
    rows = []
    for name, got in found.items():
        change = 100 * (got.perplexity / exact.perplexity - 1)
        most = MOST_PERPLEXITY_CHANGE[name]
        detail = dataclasses.asdict(got) | {"exact_perplexity": exact.perplexity, "tokens": tokens}
        title = f"{name}: perplexity change on {tokens:,} tokens, every block encoded"
        rows.append(Row(title, change, "%", f"<= {most}", change <= most, detail))
        rows.append(Row(f"{name}: KL divergence from exact", got.kl, "nats"))
        rows.append(Row(f"{name}: same likeliest token as exact", 100 * got.agreement, "%"))
    return rows


def ratio_rows() -> list[Row]:
    """Bytes of each lossy codec against bf16."""
    geometry = LayerGeometry(kv_heads=3, k_dim=64, v_dim=64, dtype=torch.bfloat16)
    rows = []
    for name, most in MOST_RATIO.items():
        ratio = get_codec(name).block_bytes(geometry, BLOCK) / geometry.block_bytes(BLOCK)
        rows.append(Row(f"{name}: bytes over bf16, scales included", ratio, "x", f"<= {most}", ratio <= most))
    return rows


def speed_rows(rounds: int) -> list[Row]:
    """Encode and decode on one core, in bytes of fp32 K and V."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows = []
    try:
        k, v = (torch.randn(8, 32, BLOCK, 128) for _ in range(2))  # 32 MiB each: out of cache, as blocks are
        for name in MOST_RATIO:
            times = coding_times(get_codec(name), k, v, rounds)
            for what, seconds in times.items():
                speed = 2 * k.nbytes / seconds.median_seconds / 1e9
                detail = dataclasses.asdict(seconds)
                must = f">= {LEAST_SPEED}"
                rows.append(Row(f"{name}: {what} on one core", speed, "GB/s", must, speed >= LEAST_SPEED, detail))
    finally:
        torch.set_num_threads(threads)
    return rows


def coding_times(codec: Codec, k: torch.Tensor, v: torch.Tensor, rounds: int) -> dict[str, harness.Timing]:
    """Seconds of encoding and of decoding K and V `[kv_heads, n, block_size, dim]`."""
    planes, outs = codec.encode(k, v), (torch.empty_like(k), torch.empty_like(v))
    contestants = {"encode": lambda: codec.encode(k, v), "decode": lambda: codec.decode(planes, *outs)}
    return harness.interleave(contestants, rounds=rounds)


def figures(quick: bool) -> tuple[list[Row], list[Chart]]:
    """Bytes, speed and quality of every codec."""
    return ratio_rows() + speed_rows(3 if quick else 30) + quality_rows(512 if quick else 4096), []


def main() -> None:
    """Measure, print, write."""
    harness.answer("codecs", __doc__, figures)


if __name__ == "__main__":
    main()
