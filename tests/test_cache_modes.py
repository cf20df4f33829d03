"""Inference mode, no_grad and grad mode take turns on one cache, streamed blocks and all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support import assert_close, tiny

import tieredkv

MODES: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
}


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
@pytest.mark.parametrize("codec", ["raw", "int8"])
@pytest.mark.parametrize("first", MODES)
def test_modes_take_turns(first: str, codec: str, cold_dir: Path) -> None:
    model = tiny()
    for weight in model.parameters():
        weight.requires_grad_(False)
    ids = torch.randint(3, 97, (2, 150), generator=torch.Generator().manual_seed(1))
    order = [first, *(mode for mode in MODES if mode != first)]
    outputs = []
    with tieredkv.TieredCache(
        model, hot="64 tokens", warm="32 tokens", cold=cold_dir, block_size=16, window=16, codec=codec
    ) as cache:
        for index, part in enumerate((*ids[:, :140].split(70, 1), *ids[:, 140:].split(1, 1))):
            with MODES[order[index % 2]]():
                outputs.append(model(part, past_key_values=cache).logits.clone())
        assert cache.stats().decode.streamed_bytes > 0
        cache.demote("cold")
        with MODES[order[1]]():
            cache.crop(-20)
            cache.promote()
            cache.reorder_cache(torch.tensor([1, 0]))
            model(ids[:, :1], past_key_values=cache)
        model(ids[:, :1], past_key_values=cache)  # gradients enabled, and none asked for
    if codec == "raw":
        with torch.no_grad():
            assert_close(torch.cat(outputs, 1), model(ids, use_cache=False).logits)
