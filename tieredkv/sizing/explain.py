"""The words of a plan: what the layers store, how it was counted, what to beware of, and code that makes the cache.

Imports: config, and this package's footprint, layers and record.
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tieredkv.config import DEFAULT_WINDOW_TOKENS
from tieredkv.sizing.footprint import layer_bytes
from tieredkv.sizing.layers import LayerKV
from tieredkv.sizing.record import DeviceUse, Encoding, Rates, Spread, StepCost, format_bytes, format_seconds
from tieredkv.sizing.source import read_field

_SLOW_STEP_RATIO = 3.0  # a transfer this many times the compute beside it earns a warning
_MIB = 2**20


def describe_layers(layers: Sequence[LayerKV], encoding: Encoding) -> tuple[str, ...]:
    """A line for each kind of layer: how many, and what each token takes in all of them together."""
    item_bytes = encoding.dtype.itemsize
    lines = []
    kinds = Counter((x.kind, x.kv_heads, x.k_dim, x.v_dim, x.window_tokens) for x in layers)
    for (kind, heads, k_dim, v_dim, window), count in kinds.items():
        if heads == 0:
            lines.append(f"{count} {kind}: no keys and values that grow with the context")
            continue
        one = LayerKV(0, kind, heads, k_dim, v_dim, window, "")
        token_bytes = count * layer_bytes(one, 1, encoding.dtype, "raw", encoding.block_size)
        width = f"2 x {k_dim}" if k_dim == v_dim else f"({k_dim} + {v_dim})"
        kept = "" if window is None else f", the last {window:,} tokens only"
        lines.append(
            f"{count} {kind}: {count} layers x {heads} KV heads x {width} x {item_bytes} bytes"
            f" = {format_bytes(token_bytes)} per token{kept}"
        )
    return tuple(lines)


def explain_counting(device: DeviceUse, spread: Spread, cost: StepCost, rates: Rates, dtype_source: str) -> list[str]:
    """How everything was counted, a line each."""
    lines = [
        f"dtype: {dtype_source}",
        f"weights: {device.parameters:,} parameters = {format_bytes(device.weights_bytes)}, {device.counted}",
        f"activations: {format_bytes(device.activations_bytes)}, one layer's transient and the logits,"
        f" with {device.prefill_chunk_tokens:,} tokens of each row in one forward",
        f"reserve: {format_bytes(device.reserve_bytes)}, 5 % of the device for its context, kernels and fragmentation",
        f"hot: {format_bytes(device.device_bytes)} - weights - activations - reserve"
        f" = {format_bytes(device.left_bytes)} for keys and values",
        "blocks are counted whole; layers with a window count its tokens and stay hot",
    ]
    if spread.staging_bytes:
        lines.append(f"staging: {format_bytes(spread.staging_bytes)} of hot, for blocks while they are read")
    lines.append(
        f"step: {format_bytes(cost.streamed_bytes)} over {rates.pcie_bytes_per_second / 1e9:g} GB/s to the device"
        f" ({format_seconds(cost.pcie_seconds)}) and {rates.nvme_bytes_per_second / 1e9:g} GB/s from disk"
        f" ({format_seconds(cost.nvme_seconds)}), side by side, beside compute: weights, keys and values read once at"
        f" {rates.device_bytes_per_second / 1e9:g} GB/s ({format_seconds(cost.compute_seconds)})"
    )
    return lines


def warn(
    config: Any, text: Any, context_tokens: int, batch: int, device: DeviceUse, spread: Spread, cost: StepCost
) -> list[str]:
    """What the user should know before running it."""
    lines = []
    if isinstance(config, types.SimpleNamespace):
        lines.append("transformers does not know this model type: the config was read field by field")
    if spread.shortfall_tier == "hot":
        lines.append(
            f"hot is short of {format_bytes(spread.shortfall_bytes)}: the model, the windows of its layers and one"
            " block of each row must be on the device"
        )
    elif spread.shortfall_tier is not None:
        lines.append(f"{spread.shortfall_tier} is short of {format_bytes(spread.shortfall_bytes)}: enlarge it")
    if cost.transfer_seconds > _SLOW_STEP_RATIO * cost.compute_seconds:
        lines.append(
            f"each step transfers for {format_seconds(cost.transfer_seconds)} and computes for"
            f" {format_seconds(cost.compute_seconds)}: {cost.transfer_seconds / cost.compute_seconds:.0f} times as"
            " long. More hot memory, fewer requests at once or a codec shortens it"
        )
    if device.prefill_chunk_tokens < context_tokens:
        lines.append(
            f"prefill in chunks: generate(prefill_chunk_size={device.prefill_chunk_tokens}); all"
            f" {batch * context_tokens:,} tokens in one forward need about"
            f" {format_bytes(device.activations_bytes * context_tokens // device.prefill_chunk_tokens)} of activations"
        )
    longest = read_field(text, "max_position_embeddings")
    if isinstance(longest, int) and context_tokens > longest:
        lines.append(f"the model was trained for {longest:,} positions, the context is {context_tokens:,}")
    return lines


def suggest(context_tokens: int, batch: int, device: DeviceUse, spread: Spread, encoding: Encoding) -> str:
    """Code that makes the cache of a plan, or an empty text where it does not fit."""
    if spread.shortfall_tier is not None:
        return ""
    hot, warm, cold = spread.tiers
    arguments = ["model", f'hot="{hot.budget_bytes // _MIB}MiB"']
    if warm.used_blocks:
        # Blocks are written down early, so warm is given room for all of them, as far as the host has it.
        blocks = hot.used_blocks + warm.used_blocks + cold.used_blocks
        arguments.append(f'warm="{-(-min(warm.budget_bytes, blocks * warm.block_bytes) // _MIB)}MiB"')
    if cold.used_blocks:
        arguments.append('cold="/path/on/nvme"')
    arguments.append(f"block_size={encoding.block_size}")
    window_tokens = hot.used_blocks * encoding.block_size // batch
    if spread.verdict != "hot" and window_tokens < DEFAULT_WINDOW_TOKENS:
        arguments.append(f"window={window_tokens}")
    if spread.verdict != "hot" and encoding.codec != "raw":
        arguments.append(f'codec="{encoding.codec}"')
    chunk_tokens = device.prefill_chunk_tokens
    chunk = f", prefill_chunk_size={chunk_tokens}" if chunk_tokens < context_tokens else ""
    return (
        f"with TieredCache({', '.join(arguments)}) as cache:\n"
        f"    model.generate(**inputs, past_key_values=cache{chunk})"
    )
