"""Where the blocks of a request go: hot first, then warm, then cold, in whole blocks, as the cache places them.

Imports: config, footprint, layers, record.
"""

from __future__ import annotations

from collections.abc import Sequence

from tieredkv.config import STAGING_ON_GPU, CacheSettings
from tieredkv.sizing.footprint import encoded_block_bytes, layer_bytes
from tieredkv.sizing.layers import LayerKV
from tieredkv.sizing.record import Budgets, Encoding, Spread, TierShare, Verdict


def spread_blocks(
    layers: Sequence[LayerKV], context_tokens: int, batch: int, budgets: Budgets, encoding: Encoding
) -> Spread:
    """Spread a request over the tiers.

    Layers with a window stay hot; so does the last block of each row, which is still being written.

    Args:
        layers: what the model stores.
        context_tokens: tokens of each row.
        batch: rows.
        budgets: what each tier may hold.
        encoding: how blocks are stored; hot stores them as they are.
    """
    blocks = batch * -(-context_tokens // encoding.block_size)
    windowed_bytes = batch * _windowed_bytes(layers, context_tokens, encoding)
    hot_block_bytes = _block_bytes(layers, "raw", encoding)
    low_block_bytes = _block_bytes(layers, encoding.codec, encoding)
    # A model whose layers all have a window has no blocks to place.
    blocks = blocks if hot_block_bytes else 0

    total_bytes = windowed_bytes + blocks * hot_block_bytes
    is_streamed = total_bytes > budgets.hot_bytes
    staging_bytes = _staging_bytes(layers, budgets.hot_bytes, encoding) if is_streamed and blocks else 0
    room_bytes = budgets.hot_bytes - staging_bytes - windowed_bytes
    hot_missing_bytes = max(0, batch * hot_block_bytes - room_bytes) if is_streamed else 0

    hot_blocks = min(blocks, _whole_blocks(room_bytes, hot_block_bytes))
    warm_blocks = min(blocks - hot_blocks, _whole_blocks(budgets.warm_bytes, low_block_bytes))
    cold_blocks = min(blocks - hot_blocks - warm_blocks, _whole_blocks(budgets.cold_bytes, low_block_bytes))
    left = blocks - hot_blocks - warm_blocks - cold_blocks

    short_tier: str | None = None
    if hot_missing_bytes:
        short_tier = "hot"
    elif left:
        short_tier = "cold" if budgets.cold_bytes else "warm"
    tokens = encoding.block_size
    hot = _share("hot", "raw", budgets.hot_bytes, hot_block_bytes, hot_blocks, tokens, windowed_bytes)
    warm = _share("warm", encoding.codec, budgets.warm_bytes, low_block_bytes, warm_blocks, tokens)
    cold = _share("cold", encoding.codec, budgets.cold_bytes, low_block_bytes, cold_blocks, tokens)
    return Spread(
        tiers=(hot, warm, cold),
        total_bytes=total_bytes,
        staging_bytes=staging_bytes,
        shortfall_bytes=hot_missing_bytes or left * low_block_bytes,
        shortfall_tier=short_tier,
        verdict=_verdict(short_tier, warm_blocks, cold_blocks),
    )


def _share(
    name: str, codec: str, budget_bytes: int, block_bytes: int, blocks: int, block_size: int, other_bytes: int = 0
) -> TierShare:
    return TierShare(
        name=name,
        codec=codec,
        budget_bytes=max(0, budget_bytes),
        used_bytes=min(max(0, budget_bytes), other_bytes + blocks * block_bytes),
        used_blocks=blocks,
        block_bytes=block_bytes,
        capacity_tokens=_whole_blocks(budget_bytes - other_bytes, block_bytes) * block_size,
    )


def _block_bytes(layers: Sequence[LayerKV], codec: str, encoding: Encoding) -> int:
    """Bytes of one block over all layers that keep every token."""
    return sum(
        encoded_block_bytes(layer, codec, encoding.block_size, encoding.dtype).total_bytes
        for layer in layers
        if layer.grows and layer.window_tokens is None
    )


def _staging_bytes(layers: Sequence[LayerKV], hot_bytes: int, encoding: Encoding) -> int:
    """Bytes of all staging buffers: each holds some blocks of one layer, and their encoded form when that differs."""
    rule = STAGING_ON_GPU  # the plan is for a device with memory of its own; a CPU takes less for this
    codecs = ("raw",) if encoding.codec == "raw" else ("raw", encoding.codec)
    growing = [layer for layer in layers if layer.grows]
    each = rule.buffers * max(
        sum(encoded_block_bytes(layer, codec, encoding.block_size, encoding.dtype).total_bytes for codec in codecs)
        for layer in growing
    )
    raw_bytes = max(encoded_block_bytes(x, "raw", encoding.block_size, encoding.dtype).total_bytes for x in growing)
    most_tokens = rule.chunk_tokens(CacheSettings(), raw_bytes // encoding.block_size)
    most_blocks = max(1, most_tokens // encoding.block_size)
    return each * max(1, min(max(0, hot_bytes) // rule.one_in // each, most_blocks))


def _windowed_bytes(layers: Sequence[LayerKV], context_tokens: int, encoding: Encoding) -> int:
    """Bytes of one row in the layers that keep only a window."""
    return sum(
        layer_bytes(layer, layer.stored_tokens(context_tokens), encoding.dtype, "raw", encoding.block_size)
        for layer in layers
        if layer.window_tokens is not None
    )


def _whole_blocks(budget_bytes: int, block_bytes: int) -> int:
    return max(0, budget_bytes) // block_bytes if block_bytes else 0


def _verdict(short_tier: str | None, warm_blocks: int, cold_blocks: int) -> Verdict:
    if short_tier is not None:
        return "too large"
    if cold_blocks:
        return "cold"
    return "warm" if warm_blocks else "hot"
