"""Torch's default dtype and device are other people's: whatever they are, attention and the cache give the same."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import Attention, assert_close, config_of

import tieredkv
from tieredkv.attention.native import NativeKernels, NativePlan, NewTokens
from tieredkv.hf import seam


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


DEFAULTS: dict[str, Any] = {
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "another device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("defaults", DEFAULTS)
def test_what_the_native_kernel_writes(defaults: str) -> None:
    kernels, pool, q = NativeKernels(), torch.randn(2, 700, 16), torch.randn(1, 4, 40, 16)
    plan = NativePlan([NewTokens(0, 0, 40, [(0, 0, 700)])], new=40, kv_heads=2, group=2, threads=2, causal=True)
    assert kernels.serves(q, 16, 16)
    wanted = NativeKernels()
    assert wanted.serves(q, 16, 16)
    exact = wanted.attend(q, [(pool, pool)], plan, scale=0.2)
    with DEFAULTS[defaults]():
        got = kernels.attend(q, [(pool, pool)], plan, scale=0.2)
    assert got.out.dtype == got.lse.dtype == torch.float32
    assert kernels._scratch.nbytes >= 4 * plan.scratch_floats(16, 16)
    assert torch.equal(got.out, exact.out) and torch.equal(got.lse, exact.lse)


def test_working_memory_is_given_back() -> None:
    kernels, pool = NativeKernels(), torch.randn(8, 9000, 64)
    assert kernels.serves(pool, 64, 64)
    for new in (600, 1):
        q = torch.randn(1, 32, new, 64)
        plan = NativePlan([NewTokens(0, 0, new, [(0, 0, 9000)])], new=new, kv_heads=8, group=4, threads=2, causal=True)
        kernels.attend(q, [(pool, pool)], plan, scale=0.1)
        assert kernels._scratch.numel() <= max(4 * plan.scratch_floats(64, 64), 2**16)


def outputs(kernel: Any, codec: str, folder: Path, defaults: Any, warm: str | int = "32 tokens") -> list[torch.Tensor]:
    """Of forwards of several lengths over blocks in three tiers; made under some defaults, from the same tensors."""
    torch.manual_seed(0)
    config, module, found = config_of("llama", head_dim=32), Attention().eval(), []
    config._attn_implementation = "tieredkv"
    settings = tieredkv.CacheSettings(kernel=kernel, codec=codec)
    sizes: dict[str, Any] = {"hot": "96 tokens", "warm": warm, "cold": folder, "block_size": 16, "window": 16}
    drawn = [
        [torch.randn(2, heads, new, 32) for heads in (2, 2, 4)] for new in (90, 1, 1, 70, 1) for _ in range(2)
    ]  # k, v, q of each layer
    with defaults(), tieredkv.TieredCache(config, settings=settings, **sizes) as cache, torch.no_grad():
        for number, (k, v, q) in enumerate(drawn):
            key, value = cache.update(k, v, number % 2, kwargs={})
            found.append(seam.attention(module, q, key, value, None)[0])
        cache.crop(-3)
        cache.reorder_cache(torch.tensor([1, 0], device="cpu"))
        found += [torch.stack(pair) for layer in range(2) if (pair := cache.gather_layer(layer)) is not None]
    return found


@pytest.mark.parametrize("codec", ["raw", "int8", "fp8", "int4"])
@pytest.mark.parametrize("kernel", ["auto", "flash", "flex"])
@pytest.mark.parametrize("defaults", DEFAULTS)
def test_a_cache_in_three_tiers(tmp_path: Path, defaults: str, kernel: Any, codec: str) -> None:
    wanted = outputs(kernel, codec, tmp_path / "a", contextlib.nullcontext)
    got = outputs(kernel, codec, tmp_path / "b", DEFAULTS[defaults])
    for mine, theirs in zip(got, wanted, strict=True):
        assert mine.dtype == theirs.dtype and mine.device == theirs.device
        assert_close(mine, theirs, tolerance=1e-6)


@pytest.mark.parametrize("codec", ["raw", "int8", "fp8", "int4"])
@pytest.mark.parametrize("defaults", DEFAULTS)
def test_a_cache_whose_blocks_are_all_on_disk(tmp_path: Path, defaults: str, codec: str) -> None:
    wanted = outputs("auto", codec, tmp_path / "a", contextlib.nullcontext, warm=0)
    got = outputs("auto", codec, tmp_path / "b", DEFAULTS[defaults], warm=0)
    for mine, theirs in zip(got, wanted, strict=True):
        assert mine.dtype == theirs.dtype and mine.device == theirs.device
        assert_close(mine, theirs, tolerance=1e-6)
