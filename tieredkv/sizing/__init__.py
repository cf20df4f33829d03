"""How much a model's keys and values take, where they fit, and what that costs: arithmetic on a config.

source reads configs; layers says what each layer stores; footprint turns that into bytes; weights counts what else
the device holds; spread places blocks in tiers; planning brings it together as a `Plan` (record), in words (explain).

Imports: errors, config, block (for `LayerGeometry`), codecs.
"""

from __future__ import annotations

from tieredkv.sizing.footprint import (
    DEFAULT_BLOCK_SIZE,
    EncodedBytes,
    encoded_block_bytes,
    kv_bytes,
    kv_bytes_per_token,
    parse_dtype,
)
from tieredkv.sizing.layers import LayerKV, cross_kv_layers, kv_layers
from tieredkv.sizing.planning import plan
from tieredkv.sizing.record import Plan, Rates, format_bytes, format_seconds
from tieredkv.sizing.source import load_config
from tieredkv.sizing.weights import count_weights

__all__ = [
    "DEFAULT_BLOCK_SIZE",
    "EncodedBytes",
    "LayerKV",
    "Plan",
    "Rates",
    "count_weights",
    "cross_kv_layers",
    "encoded_block_bytes",
    "format_bytes",
    "format_seconds",
    "kv_bytes",
    "kv_bytes_per_token",
    "kv_layers",
    "load_config",
    "parse_dtype",
    "plan",
]
