"""Each kernel, in the whole cache: logits over hot, warm and streamed blocks equal the cache-free ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import assert_close, tiny

import tieredkv
from tieredkv.attention import flash
from tieredkv.attention.engine import Engine
from tieredkv.attention.flex import FlexTiles
from tieredkv.attention.native import NativeKernels
from tieredkv.compiler import Compiler
from tieredkv.hf import seam

STEPS = ((0, 130), (130, 131), (131, 150), *((i, i + 1) for i in range(150, 170)))


def logits(model: Any, cache: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """All logits, in several forwards of several lengths."""
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    outputs = [
        model(
            ids[:, first:last],
            attention_mask=mask[:, :last],
            position_ids=positions[:, first:last],
            past_key_values=cache,
        ).logits
        for first, last in STEPS
    ]
    return torch.cat(outputs, 1)


def batch(rows: int, padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(3, 97, (rows, STEPS[-1][1]), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    return ids, mask


def has_matrices(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, has: bool = True) -> None:
    """As if the processor had, or had not, instructions for whole matrices of this dtype."""
    monkeypatch.setattr(flash, "_MATRICES", {dtype: "amx"})
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx": has})


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
@pytest.mark.parametrize("kernel", ["auto", "native"])
@pytest.mark.parametrize("has", [True, False])
@pytest.mark.parametrize(("rows", "padding"), [(1, 0), (3, 21)])
def test_many_tokens_where_the_processor_multiplies_matrices(
    monkeypatch: pytest.MonkeyPatch, cold_dir: Path, rows: int, padding: int, has: bool, kernel: Any
) -> None:
    has_matrices(monkeypatch, torch.float32, has)
    served = list[int]()
    attend = NativeKernels.attend
    monkeypatch.setattr(
        NativeKernels, "attend", lambda self, q, *a, **k: served.append(q.shape[2]) or attend(self, q, *a, **k)
    )
    model = tiny()
    ids, mask = batch(rows, padding)
    options: dict[str, Any] = {"hot": "64 tokens", "warm": "32 tokens", "cold": cold_dir, "block_size": 16}
    settings = tieredkv.CacheSettings(kernel=kernel)
    with torch.no_grad(), tieredkv.TieredCache(model, window=16, settings=settings, **options) as cache:
        got = logits(model, cache, ids, mask)
    many = {last - first for first, last in STEPS if last - first >= flash.MATRIX_LEAST_TOKENS}
    assert 1 in served
    assert many & set(served) == (many if kernel == "native" or not has else set())
    with torch.no_grad():
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        wanted = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    assert_close(got[mask.bool()], wanted[mask.bool()])


def test_when_whole_matrices_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    q, many = torch.zeros(1, 2, 1, 16, dtype=torch.bfloat16), flash.MATRIX_LEAST_TOKENS
    has_matrices(monkeypatch, torch.bfloat16)
    assert flash.beats_native(q, 16, 16, many)
    assert not flash.beats_native(q, 16, 16, many - 1)
    assert not flash.beats_native(q, 16, 32, many)  # matmul would serve
    assert not flash.beats_native(q.to(torch.float16), 16, 16, many)
    has_matrices(monkeypatch, torch.bfloat16, False)
    assert not flash.beats_native(q, 16, 16, many)


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
@pytest.mark.parametrize(("rows", "padding"), [(1, 0), (3, 21)])
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("kernel", ["auto", "native", "flash"])
def test_every_kernel_is_exact(cold_dir: Path, kernel: Any, in_place: bool, rows: int, padding: int) -> None:
    model = tiny()
    ids, mask = batch(rows, padding)
    settings = tieredkv.CacheSettings(kernel=kernel, read_in_place=in_place)
    with (
        torch.no_grad(),
        tieredkv.TieredCache(
            model, hot="64 tokens", warm="32 tokens", cold=cold_dir, block_size=16, window=16, settings=settings
        ) as cache,
    ):
        got = logits(model, cache, ids, mask)
        assert cache.mode == "blocks"
        assert cache.stats().decode.streamed_bytes > 0
    with torch.no_grad():
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        wanted = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    assert_close(got[mask.bool()], wanted[mask.bool()])


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
@pytest.mark.parametrize("kernel", ["native", "flash", "flex"])
def test_a_kernel_that_is_asked_for_is_the_one_that_serves(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    served = set[str]()
    for name, owner, method in (
        ("native", NativeKernels, "attend"),
        ("flash", flash, "attend_run"),
        ("flex", FlexTiles, "attend"),
    ):
        monkeypatch.setattr(owner, method, told(served, name, getattr(owner, method)))
    model, (ids, _) = tiny(), batch(1, 0)
    with (
        torch.no_grad(),
        tieredkv.TieredCache(model, hot="2000 tokens", settings=tieredkv.CacheSettings(kernel=kernel)) as cache,
    ):
        model(ids[:, :-1], past_key_values=cache)
        served.clear()
        model(ids[:, -1:], past_key_values=cache)
    assert served == {kernel}


def told(served: set[str], name: str, real: Any) -> Any:
    def listening(*args: Any, **options: Any) -> Any:
        served.add(name)
        return real(*args, **options)

    return listening


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
def test_chunks_that_are_for_some_rows_only(cold_dir: Path) -> None:
    """Several new tokens over streamed blocks: each row has its own, and two begin alike."""
    model = tiny()
    ids = torch.randint(3, 97, (3, 200), generator=torch.Generator().manual_seed(2))
    ids[2, :96] = ids[0, :96]
    settings = tieredkv.CacheSettings(read_in_place=False)
    options: dict[str, Any] = {"hot": "48 tokens", "warm": "32 tokens", "cold": cold_dir, "block_size": 16}
    with torch.no_grad(), tieredkv.TieredCache(model, window=16, settings=settings, **options) as cache:
        got = [model(ids[:, a:b], past_key_values=cache).logits for a, b in ((0, 150), (150, 151), (151, 200))]
        assert cache.stats().prefill.streamed_bytes > 0
    with torch.no_grad():
        assert_close(torch.cat(got, 1), model(ids, use_cache=False).logits)


def test_queries_of_another_dtype_are_not_read_as_if_they_were_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[int] = []
    attend = NativeKernels.attend
    monkeypatch.setattr(NativeKernels, "attend", lambda self, *a, **k: served.append(1) or attend(self, *a, **k))
    model = tiny()
    model.set_attn_implementation("tieredkv")
    module = model.model.layers[0].self_attn
    with torch.no_grad(), tieredkv.TieredCache(model.config, hot="256 tokens", warm=0, block_size=16) as cache:
        k, v = (torch.randn(1, 2, 20, 16).to(torch.bfloat16) for _ in "kv")
        k, v = cache.update(k, v, 0, kwargs={})
        with pytest.raises(RuntimeError):  # as SDPA refuses it
            seam.attention(module, torch.randn(1, 4, 20, 16), k, v, None)
    assert not served


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
def test_flex_over_rows_that_interleave(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[int] = []
    attend = FlexTiles.attend
    monkeypatch.setattr(FlexTiles, "attend", lambda self, *a, **k: served.append(1) or attend(self, *a, **k))
    model = tiny()
    ids, mask = batch(3, 21)
    with (
        torch.no_grad(),
        tieredkv.TieredCache(
            model, hot="256 tokens", warm=0, block_size=16, settings=tieredkv.CacheSettings(kernel="flex")
        ) as cache,
    ):
        got = logits(model, cache, ids, mask)
        assert cache.stats().graphs == 1
    assert len(served) == 2 * (len(STEPS) - 2)  # both layers, each step of one token
    with torch.no_grad():
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        wanted = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    assert_close(got[mask.bool()], wanted[mask.bool()])


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
def test_native_serves_by_default_and_flash_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = tiny()
    ids, mask = batch(1, 0)
    served: list[int] = []
    attend = NativeKernels.attend
    monkeypatch.setattr(NativeKernels, "attend", lambda self, *a, **k: served.append(1) or attend(self, *a, **k))
    with torch.no_grad(), tieredkv.TieredCache(model, hot="256 tokens", warm=0, block_size=16) as cache:
        with_compiler = logits(model, cache, ids, mask)
    assert served
    served.clear()
    make = NativeKernels.__init__
    monkeypatch.setattr(NativeKernels, "__init__", lambda self: make(self, Compiler(tmp_path)))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with torch.no_grad(), tieredkv.TieredCache(model, hot="256 tokens", warm=0, block_size=16) as cache:
        with pytest.warns(RuntimeWarning, match="slower without C"):
            without = logits(model, cache, ids, mask)
        assert isinstance(cache.engine, Engine)
        assert "compiler" in (cache.engine.native_reason or "")
        assert "compiler" in cache.stats().native_failures[0]
    assert not served
    assert_close(without, with_compiler)
