"""What fits where, and what it costs: a plan for a model, a context, a number of requests and a machine.

`plan` counts what the model leaves free on the device, spreads the keys and values over the three tiers as the cache
would, and predicts the bytes that each decode step streams. Everything is arithmetic on the config; nothing is
measured or allocated.

Imports: errors, config, explain, footprint, layers, record, source, spread, weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tieredkv.config import BLOCK_MULTIPLE, CODEC_NAMES, check_codec
from tieredkv.errors import ConfigError
from tieredkv.sizing.explain import describe_layers, explain_counting, suggest, warn
from tieredkv.sizing.footprint import DEFAULT_BLOCK_SIZE, kv_bytes_per_token, parse_dtype
from tieredkv.sizing.layers import LayerKV, cross_kv_layers, kv_layers
from tieredkv.sizing.record import Budgets, Encoding, Plan, Rates, Spread, StepCost, TableCell
from tieredkv.sizing.source import decoder_config, load_config, read_field
from tieredkv.sizing.spread import spread_blocks
from tieredkv.sizing.weights import device_use

DEFAULT_HOST_MEMORY_BYTES = 64 * 2**30
DEFAULT_DISK_BYTES = 500 * 2**30

_TABLE_CONTEXTS = (1024, 4096, 16384, 65536)
_TABLE_BATCHES = (1, 8, 32)


def plan(
    config: object,
    context_tokens: int,
    batch: int,
    device_memory_bytes: int,
    *,
    host_memory_bytes: int = DEFAULT_HOST_MEMORY_BYTES,
    disk_bytes: int = DEFAULT_DISK_BYTES,
    dtype: torch.dtype | str | None = None,
    codec: str = "raw",
    block_size: int = DEFAULT_BLOCK_SIZE,
    rates: Rates | None = None,
) -> Plan:
    """Plan a model's keys and values over the tiers of a machine.

    Args:
        config: as in `kv_layers`.
        context_tokens: tokens of each request, prompt and answer together.
        batch: requests at once.
        device_memory_bytes: all memory of the device; weights, activations and a reserve are subtracted.
        host_memory_bytes: what warm may take.
        disk_bytes: what cold may take, 0 for no cold tier.
        dtype: of weights, K and V; None takes the config's, or fp16 where it names none.
        codec: how blocks are stored below hot.
        block_size: tokens of a block.
        rates: how fast bytes move; `Rates()` by default.

    Raises:
        ConfigError: a number out of range, an unknown codec or dtype; and what `kv_layers` raises.
    """
    _check(context_tokens, batch, device_memory_bytes, host_memory_bytes, disk_bytes, block_size)
    check_codec(codec)  # before the model is built
    whole, rates = load_config(config), rates or Rates()
    layers, text = kv_layers(whole), decoder_config(whole)
    kv_dtype, dtype_source = _dtype(whole, dtype)
    encoding = Encoding(kv_dtype, codec, block_size)
    by_codec = {name: kv_bytes_per_token(whole, kv_dtype, name, block_size) for name in CODEC_NAMES}
    device = device_use(whole, device_memory_bytes, context_tokens, batch, kv_dtype)
    budgets = Budgets(device.left_bytes, host_memory_bytes, disk_bytes)
    spread = spread_blocks(layers, context_tokens, batch, budgets, encoding)
    cost = _step_cost(spread, device.weights_bytes, rates)
    return Plan(
        context_tokens=context_tokens,
        batch=batch,
        dtype=str(kv_dtype).removeprefix("torch."),
        codec=codec,
        block_size=block_size,
        layers=describe_layers(layers, encoding),
        kv_bytes_per_token=by_codec["raw"],
        kv_bytes_per_token_by_codec=by_codec,
        cross_kv_bytes_per_source_token=sum(x.geometry(kv_dtype).token_bytes for x in cross_kv_layers(whole)),
        device=device,
        spread=spread,
        rates=rates,
        cost=cost,
        table=_table(layers, context_tokens, batch, budgets, encoding),
        suggestion=suggest(context_tokens, batch, device, spread, encoding),
        warnings=tuple(warn(whole, text, context_tokens, batch, device, spread, cost)),
        how=tuple(explain_counting(device, spread, cost, rates, dtype_source)),
    )


def _check(
    context_tokens: int, batch: int, device_bytes: int, host_bytes: int, disk_bytes: int, block_size: int
) -> None:
    at_least = {"context_tokens": (context_tokens, 1), "batch": (batch, 1), "device_memory_bytes": (device_bytes, 1)}
    at_least |= {
        "host_memory_bytes": (host_bytes, 0),
        "disk_bytes": (disk_bytes, 0),
        "block_size": (block_size, BLOCK_MULTIPLE),
    }
    for name, (value, least) in at_least.items():
        if value < least:
            raise ConfigError(f"{name} is too small.", wanted=f"{least} or more", got=value, change=f"correct {name}")
    if block_size % BLOCK_MULTIPLE:
        raise ConfigError(
            "The block size is not usable.",
            wanted=f"a multiple of {BLOCK_MULTIPLE}",
            got=block_size,
            change="choose 64 or 128",
        )


def _dtype(config: Any, asked: torch.dtype | str | None) -> tuple[torch.dtype, str]:
    if asked is not None:
        return parse_dtype(asked), f"{asked}, as asked"
    for part in (config, decoder_config(config)):
        named = read_field(part, "dtype")
        if named is not None:
            return parse_dtype(named), f"{named}, as in the config"
    return torch.float16, "fp16, since the config names none"


def _step_cost(spread: Spread, weights_bytes: int, rates: Rates) -> StepCost:
    _, warm, cold = spread.tiers
    streamed_bytes = warm.used_bytes + cold.used_bytes
    pcie_seconds = streamed_bytes / rates.pcie_bytes_per_second
    nvme_seconds = cold.used_bytes / rates.nvme_bytes_per_second
    transfer_seconds = max(pcie_seconds, nvme_seconds)
    compute_seconds = (weights_bytes + spread.total_bytes) / rates.device_bytes_per_second
    return StepCost(
        streamed_bytes=streamed_bytes,
        pcie_seconds=pcie_seconds,
        nvme_seconds=nvme_seconds,
        transfer_seconds=transfer_seconds,
        compute_seconds=compute_seconds,
        seconds=max(transfer_seconds, compute_seconds),
    )


def _table(
    layers: Sequence[LayerKV], context_tokens: int, batch: int, budgets: Budgets, encoding: Encoding
) -> tuple[TableCell, ...]:
    cells = []
    for context in sorted({*_TABLE_CONTEXTS, context_tokens}):
        for rows in sorted({*_TABLE_BATCHES, batch}):
            spread = spread_blocks(layers, context, rows, budgets, encoding)
            cells.append(TableCell(context, rows, spread.total_bytes, spread.verdict))
    return tuple(cells)
