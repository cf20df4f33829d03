"""Bytes that blocks moved, down and up, against the least that would do: the first figures of `transfer`.

Imports: this package's shapes and harness; tieredkv, torch.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import shapes
from benchmarks.harness import Row
from benchmarks.shapes import Attention, two_models
from tieredkv import CacheSettings, TieredCache
from tieredkv.cli.stock import cache_keyword
from tieredkv.hf import seam
from tieredkv.store import BlockStore

STREAM = CacheSettings(read_in_place=False)


def store_of(cache: TieredCache) -> BlockStore:
    """The store of a cache that was used."""
    store = cache.parts().store
    if store is None:
        raise LookupError("the cache was not used yet")
    return store


def not_hot(cache: TieredCache) -> tuple[int, int]:
    """(how many, bytes) of the layer pieces of distinct blocks that do not lie in hot, as they are stored."""
    row_bytes = store_of(cache).mover.row_bytes
    outside = {(entry.block_id, entry.layer_id) for entry in cache.block_table() if entry.location != "hot"}
    return len(outside), sum(row_bytes[layer] for _, layer in outside)


def attention_step(cache: TieredCache, config: Any, tokens: int = 1) -> Callable[[], None]:
    """A forward of attention alone: new random K, V and queries through every layer."""
    module = Attention(config.num_attention_heads // config.num_key_value_heads).eval()
    config._attn_implementation = "tieredkv"
    q = torch.randn(1, config.num_attention_heads, tokens, config.head_dim)
    new = torch.randn(1, config.num_key_value_heads, tokens, config.head_dim)

    def step() -> None:
        for layer in range(config.num_hidden_layers):
            keywords: dict[str, Any] = {}
            k, v = cache.update(new.clone(), new.clone(), layer, kwargs=keywords)
            seam.attention(module, q, k, v, None, scaling=config.head_dim**-0.5, **keywords)

    return step


def traffic(codec: str, steps: int) -> list[Row]:
    """Bytes down over K/V produced, and bytes up over what had to come up, in a long generation."""
    config = shapes.smollm2_config(layers=4)
    written_limit, read_limit = 1.0, 1.0
    with (
        tempfile.TemporaryDirectory() as folder,
        torch.inference_mode(),
        TieredCache(
            config, hot="1024 tokens", warm="512 tokens", cold=folder, window=256, codec=codec, settings=STREAM
        ) as cache,
    ):
        attention_step(cache, config, 1500)()
        step = attention_step(cache, config)
        for _ in range(3):
            step()
        store = store_of(cache)
        store.device.synchronize()
        before, wanted = cache.stats().decode.streamed_bytes, 0
        for _ in range(steps):
            step()
            wanted += not_hot(cache)[1]
        store.device.synchronize()
        read = cache.stats().decode.streamed_bytes - before
        cache.promote()
        cache.demote("warm" if store.warm and store.warm.free_blocks() > 99 else "cold")
        stats = cache.stats()
        down = {name: move.bytes for name, move in stats.moves.items() if name.startswith("hot_to")}
        encoded = sum(store.mover.row_bytes) / store.block_size
        written = sum(down.values()) / (stats.tokens * encoded)
    detail = {"steps": steps, "tokens": stats.tokens, "down_bytes": down, "read_bytes": read, "wanted_bytes": wanted}
    return [
        Row(
            f"bytes written down per token over K/V produced ({codec}, encoded; promoted and demoted again)",
            written,
            "",
            f"<= {written_limit}",
            written <= written_limit,
            detail,
        ),
        Row(
            f"bytes read up per step over distinct unmasked encoded non-resident bytes ({codec})",
            read / wanted,
            "",
            f"<= {read_limit}",
            read / wanted <= read_limit,
            detail,
        ),
    ]


def padded(steps: int) -> Row:
    """Bytes up of two rows of which one is mostly padding, over what some row sees."""
    config, tokens, padding = shapes.smollm2_config(layers=4), 1500, 1200
    model = two_models(config, torch.float32)[1]
    ids = torch.randint(0, 1000, (2, tokens + steps))
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    given = {"hot": "600 tokens", "warm": "2048 tokens", "window": 128, "settings": STREAM}
    with torch.inference_mode(), TieredCache(model, **given) as cache:
        model(ids[:, :tokens], attention_mask=mask[:, :tokens], logits_to_keep=1, **{cache_keyword(model): cache})
        store, wanted, before = store_of(cache), 0, 0
        for step in range(steps):
            if step == 1:  # the first one may read what the prompt's end has left in the ring
                before = cache.stats().decode.streamed_bytes
            whole = mask[:, : tokens + step + 1]
            model(ids[:, [tokens + step]], attention_mask=whole, **{cache_keyword(model): cache})
            outside = {
                (entry.block_id, entry.layer_id)
                for entry in cache.block_table()
                if entry.location != "hot" and (entry.row or entry.token_range[1] > padding)
            }
            wanted += sum(store.mover.row_bytes[layer] for _, layer in outside) if step else 0
        read = cache.stats().decode.streamed_bytes - before
    ratio, detail = read / wanted, {"read_bytes": read, "wanted_bytes": wanted, "padding": padding, "tokens": tokens}
    measure = "bytes read up per step over distinct unmasked non-resident bytes (two rows, one 80 % padding)"
    return Row(measure, ratio, "", "<= 1.0", ratio <= 1.0, detail)
