"""Finds the first part of the cache whose logits depart from transformers' own: hot only, + warm, + cold, + codec.

Every stage is fed the same tokens, those that the stock cache chose, so that differences do not add up.

Imports: errors, config, codecs, cache and this package; torch, transformers.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from tieredkv.cache import TieredCache
from tieredkv.cli.stock import LOGIT_TOLERANCE, cache_keyword
from tieredkv.codecs import get_codec
from tieredkv.config import CacheSettings
from tieredkv.errors import ChecksumError, ConfigError, TieredKVError

BLOCK_SIZES = (128, 64, 32, 16)
LEAST_BLOCKS = 16
"""The block size is the largest of which the text has so many, so that every tier gets some."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """One configuration, and how it did.

    Args:
        name: "hot only", "+ warm", "+ cold" or "+ int8".
        lossless: whether logits have to agree.
        blocks: reads of blocks by attention in (hot, warm, cold), over all layers.
        difference: largest difference of logits, relative to the largest logit; None when the stage failed.
        tolerance: the most that rounding leaves.
        layer: the first layer whose K and V differ, or None.
        block: in that layer, the first block of a row that differs, counted from the row's start, or None.
        error: what stopped the stage, or None.
    """

    name: str
    lossless: bool
    blocks: tuple[int, int, int]
    difference: float | None
    tolerance: float
    layer: int | None = None
    block: int | None = None
    error: str | None = None

    @property
    def departs(self) -> bool:
        """Whether it gave other logits than the stock cache, or none."""
        return self.difference is None or not self.difference <= self.tolerance

    @property
    def where(self) -> str:
        """Layer and block, for people."""
        if self.error is not None:
            return self.error
        if self.layer is None:
            return "all stored K and V agree: the attention of the last layer" if self.departs else ""
        return f"layer {self.layer}, block {self.block}"


def bisect(model: Any, ids: torch.Tensor, new_tokens: int, codec: str, cold: Path) -> list[Stage]:
    """Run a prompt with the stock cache, then with one more part of the tiered cache at a time.

    Args:
        model: a causal language model in eval mode.
        ids: the prompt, int64 [1, tokens].
        new_tokens: tokens that the stock cache chooses greedily and every stage is fed.
        codec: of the last stage.
        cold: a folder for the stages that have a cold tier.

    Returns:
        All stages up to the first lossless one that departs.

    Raises:
        ConfigError: a prompt that is too short to fill blocks in every tier, or an unknown codec.
    """
    total = ids.shape[1] + new_tokens
    if total < LEAST_BLOCKS * BLOCK_SIZES[-1]:
        raise ConfigError(
            "The text is too short to fill every tier.",
            wanted=f"at least {LEAST_BLOCKS * BLOCK_SIZES[-1]} tokens",
            got=total,
            change="a longer --document, or a larger --prompt-tokens",
        )
    stages = _settings(total, codec, cold)
    stock = DynamicCache(config=model.config)
    logits, fed = _feed(model, ids, stock, new_tokens, None)
    found = []
    for name, settings in stages.items():
        found.append(_run(model, ids, fed, logits, stock, name, settings))
        if found[-1].departs and found[-1].lossless:
            break
    return found


def _settings(total: int, codec: str, cold: Path) -> dict[str, CacheSettings]:
    """The stages in order; each has one part more than the one before it."""
    size = next((size for size in BLOCK_SIZES if total >= size * LEAST_BLOCKS), BLOCK_SIZES[-1])
    some = f"{max(total // 4, 4 * size)} tokens"
    all_ = f"{2 * total + 4 * size} tokens"
    hot_only = CacheSettings(hot=all_, warm=0, block_size=size, window=size)
    warm = dataclasses.replace(hot_only, hot=some, warm=all_)
    # One block unencoded: even encoded in an eighth of the bytes, not all blocks fit.
    with_cold = dataclasses.replace(warm, warm=f"{size} tokens", cold=cold, read_in_place=False)
    return {
        "hot only": hot_only,
        "+ warm": warm,
        "+ cold": with_cold,
        f"+ {codec}": dataclasses.replace(with_cold, codec=codec),
    }


@torch.no_grad()
def _feed(model: Any, ids: torch.Tensor, cache: Any, new: int, fed: list[int] | None) -> tuple[torch.Tensor, list[int]]:
    """Logits [new + 1, vocabulary] behind the prompt and behind each token fed after it, and those tokens."""
    keyword = {cache_keyword(model): cache}
    steps = [model(ids.to(model.device), **keyword).logits[0, -1].float().cpu()]
    tokens: list[int] = []
    for index in range(new):
        tokens.append(int(steps[-1].argmax()) if fed is None else fed[index])
        token = torch.tensor([[tokens[-1]]], device=model.device)
        steps.append(model(token, **keyword).logits[0, -1].float().cpu())
    return torch.stack(steps), tokens


def _run(
    model: Any,
    ids: torch.Tensor,
    fed: list[int],
    wanted: torch.Tensor,
    stock: Any,
    name: str,
    settings: CacheSettings,
) -> Stage:
    eps = torch.finfo(model.dtype).eps
    tolerance = LOGIT_TOLERANCE if model.dtype == torch.float32 else 8 * eps
    lossless = get_codec(settings.codec).lossless
    with TieredCache(model, settings=settings) as cache:
        try:
            got, _ = _feed(model, ids, cache, len(fed), fed)
        except TieredKVError as failure:
            layer = cache.parts().tiered[failure.layer] if isinstance(failure, ChecksumError) else None
            return Stage(name, lossless, _hits(cache), None, tolerance, layer, error=str(failure))
        hits = _hits(cache)
        difference = float((got - wanted).abs().max() / wanted.abs().max())
        if not difference <= tolerance:
            layer, block = _first_difference(cache, stock, tolerance)
            return Stage(name, lossless, hits, difference, tolerance, layer, block)
        return Stage(name, lossless, hits, difference, tolerance)


def _hits(cache: TieredCache) -> tuple[int, int, int]:
    stats = cache.stats()
    return stats.hot.hits, stats.warm.hits, stats.cold.hits


def _first_difference(cache: TieredCache, stock: Any, tolerance: float) -> tuple[int | None, int | None]:
    """The first layer whose stored K or V differ from the stock cache's, and its first block that does."""
    for layer in cache.parts().tiered:
        ours = cache.gather_layer(layer)
        theirs = (stock.layers[layer].keys, stock.layers[layer].values)
        differing = []
        for got, wanted in zip(ours or (), theirs, strict=True):
            off = (got.float() - wanted.float()).abs().amax((0, 1, 3))  # [tokens]
            differing += (~(off <= tolerance * wanted.float().abs().max())).nonzero().flatten().tolist()
        if differing:
            return layer, min(differing) // cache.settings.block_size
    return None, None
