"""What single operations take, by pytest-benchmark: `make micro`. The usual tests run each once.

The questions of this folder measure whole steps; when one of them got slower, this says which part did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from benchmarks import shapes
from tieredkv import TieredCache, prefix
from tieredkv.attention.lse import Partial, merge
from tieredkv.block import Block
from tieredkv.block_table import BlockTable
from tieredkv.checksum import Checksummer
from tieredkv.codecs import CODEC_NAMES, get_codec
from tieredkv.fingerprint import Fingerprint
from tieredkv.hf import seam
from tieredkv.store import planner

Benchmark = Callable[..., Any]
"""pytest-benchmark's fixture: calls a function often enough, and returns what it returned."""

BLOCK, BLOCKS = 128, 5
CONTEXT = 8192


@pytest.fixture(scope="module")
def planes() -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of one layer of some blocks of SmolLM2's shape, [kv_heads, n, block_size, dim], 1 MB together."""
    torch.manual_seed(0)
    return torch.randn(3, BLOCKS, BLOCK, 64), torch.randn(3, BLOCKS, BLOCK, 64)


@pytest.fixture
def cache() -> Iterator[TieredCache]:
    """A context of 8K tokens, all of it hot, in two layers of SmolLM2's shape, attended over blocks."""
    config = shapes.smollm2_config(layers=2)
    config._attn_implementation = seam.NAME
    with torch.inference_mode(), TieredCache(config, hot=f"{CONTEXT + 1024} tokens", warm=0, block_size=BLOCK) as cache:
        shapes.fill(cache, config, CONTEXT, torch.float32)
        cache.ended()
        yield cache


def test_checksum(benchmark: Benchmark, planes: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Of each block."""
    sums = benchmark(Checksummer().checksum, planes)
    assert len(set(sums.tolist())) == BLOCKS


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_encode(benchmark: Benchmark, planes: tuple[torch.Tensor, torch.Tensor], name: str) -> None:
    """One layer, on one thread as the workers do it or on all."""
    assert benchmark(get_codec(name).encode, *planes)


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_decode(benchmark: Benchmark, planes: tuple[torch.Tensor, torch.Tensor], name: str) -> None:
    """One layer, into memory that is there."""
    codec, out = get_codec(name), [torch.empty_like(plane) for plane in planes]
    benchmark(codec.decode, codec.encode(*planes), *out)
    assert (out[0] - planes[0]).abs().max() < 1


def test_plan_a_token(benchmark: Benchmark, cache: TieredCache) -> None:
    """Plan one token after 8K, and take it back."""
    parts = cache.parts()
    store, holder = parts.store, parts.holder
    assert store is not None and holder is not None

    def plan() -> int:
        total = planner.begin(store, holder, 1).total
        planner.rollback(store, holder)
        return total

    assert benchmark(plan) == CONTEXT + 1


def test_read_all_of_a_layer(benchmark: Benchmark, cache: TieredCache) -> None:
    """Gather 8K tokens of K and V."""
    k, _ = benchmark(cache.gather_layer, 0)
    assert k.shape[2] == CONTEXT


def test_reorder_beams(benchmark: Benchmark) -> None:
    """Four rows that share 64 blocks change places."""
    table = BlockTable(BLOCK, lambda block: None)
    table.rows = [[Block(number, refs=4) for number in range(64)]] * 4
    benchmark(table.select, [1, 1, 3, 0])
    assert len(table) == 4


def test_merge_partials(benchmark: Benchmark) -> None:
    """Three partials of one decoding row."""
    parts = [Partial(torch.randn(1, 9, 1, 64), torch.randn(1, 9, 1)) for _ in range(3)]
    assert benchmark(merge, parts, sinks=None, dtype=torch.float32).shape == (1, 9, 1, 64)


def test_hash_a_prompt(benchmark: Benchmark) -> None:
    """Names of the blocks of 4K token ids."""
    names = benchmark(prefix.chain, torch.arange(4096), BLOCK, "00" * 32)
    assert len(set(names)) == 4096 // BLOCK


def test_look_at_a_model(benchmark: Benchmark) -> None:
    """Find that a model of 30 layers has not changed."""
    mark = Fingerprint(LlamaForCausalLM(shapes.smollm2_config()))
    assert benchmark(mark.current) == mark.current()
