"""The native kernel against the specification in float64, and what happens without a compiler."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from tieredkv import compiler
from tieredkv.attention.lse import merge
from tieredkv.attention.native import NativeKernels, NativePlan, NewTokens
from tieredkv.compiler import Compiler
from tieredkv.errors import MismatchError
from tieredkv.reference import attend

POOL = 3000
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> NativeKernels:
    return NativeKernels(Compiler(tmp_path_factory.mktemp("kernels")))


def plan_of(
    rows: list[list[tuple[int, int, int]]],
    *,
    new: int,
    kv_heads: int,
    group: int,
    threads: int = 2,
    causal: bool = True,
) -> NativePlan:
    """A plan in which every row has as many new tokens."""
    tokens = [NewTokens(row, 0, new, stretches) for row, stretches in enumerate(rows)]
    return NativePlan(tokens, new=new, kv_heads=kv_heads, group=group, threads=threads, causal=causal)


def _mask(rows: list[list[tuple[int, int, int]]], new: int, fresh: int) -> list[torch.Tensor | None]:
    masks: list[torch.Tensor | None] = []
    for row in rows:
        total = sum(tokens for _, _, tokens in row)
        ends = torch.arange(total - new + 1, total + 1) if fresh else torch.full((new,), total)
        masks.append(torch.arange(total) < ends[:, None])
    return masks


@settings(max_examples=50)
@given(
    data=st.data(),
    dtype=st.sampled_from(DTYPES),
    dims=st.sampled_from([(64, 64), (32, 80), (16, 128)]),
    heads=st.sampled_from([(1, 1), (9, 3), (8, 2), (4, 4)]),
    new=st.sampled_from([1, 1, 1, 2, 5, 22, 65, 150]),
    fresh=st.booleans(),
    threads=st.integers(1, 3),
    spread=st.sampled_from([1.0, 40.0]),
)
def test_any_stretches_of_any_rows(
    kernels: NativeKernels,
    data: st.DataObject,
    dtype: torch.dtype,
    dims: tuple[int, int],
    heads: tuple[int, int],
    new: int,
    fresh: bool,
    threads: int,
    spread: float,
) -> None:
    lengths = st.one_of(st.integers(1, 40), st.sampled_from([127, 128, 129, 512, 700]))
    stretch = lengths.flatmap(
        lambda tokens: st.tuples(st.integers(0, 1), st.integers(0, POOL - tokens), st.just(tokens))
    )
    rows = data.draw(st.lists(st.lists(stretch, max_size=4), min_size=1, max_size=4))
    pools = [
        tuple(torch.full((heads[1], POOL + extra, dim), torch.nan, dtype=dtype)[:, extra:] for dim in dims)
        for extra in (0, 32)
    ]
    for row in rows:
        for number, offset, tokens in row:
            for pool, dim in zip(pools[number], dims, strict=True):
                pool[:, offset : offset + tokens] = torch.randn(heads[1], tokens, dim).to(dtype)
    q = (spread * torch.randn(len(rows), new, heads[0], dims[0])).to(dtype).transpose(1, 2)
    assert kernels.serves(q, *dims)
    group = heads[0] // heads[1]
    plan = plan_of(rows, new=new, kv_heads=heads[1], group=group, threads=threads, causal=fresh)
    out, lse = kernels.attend(q, pools, plan, scale=0.2)
    blocks = [
        [tuple(pool[:, a : a + n].double() for pool in pools[p]) for p, a, n in row]
        or [tuple(pool[:, :0].double() for pool in pools[0])]
        for row in rows
    ]
    exact_out, exact_lse = attend(q.double(), blocks, scale=0.2, mask=_mask(rows, new, fresh))
    # Scores are sums in fp32 of exact products, so their error, and with it that of the weights, grows with them.
    tolerance = 2e-6 * max(1.0, float(exact_lse.nan_to_num(neginf=0.0).abs().max()))
    torch.testing.assert_close(out.double(), exact_out, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), exact_lse, atol=tolerance, rtol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_error_against_sdpa(kernels: NativeKernels, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(1, heads, tokens, 128).to(dtype) for heads, tokens in ((8, 1), (2, 2500), (2, 2500)))
    plan = plan_of([[(0, 0, 1300), (0, 1300, 1200)]], new=1, kv_heads=2, group=4)
    out = merge([kernels.attend(q, [(k[0], v[0])], plan, scale=0.1)], sinks=None, dtype=dtype)
    exact = attend(q.double(), [[(k[0].double(), v[0].double())]], scale=0.1)[0]
    stock = scaled_dot_product_attention(q, k, v, scale=0.1, enable_gqa=True)
    assert (out.double() - exact).abs().max() <= 2 * (stock.double() - exact).abs().max()


def test_the_same_bits_whatever_thread_comes_first(kernels: NativeKernels) -> None:
    q, pool = torch.randn(3, 6, 1, 64), torch.randn(2, POOL, 64)
    plan = plan_of([[(0, 0, 2900)], [(0, 5, 700)], [(0, 100, 64)]], new=1, kv_heads=2, group=3)
    first = kernels.attend(q, [(pool, pool)], plan, scale=0.2)
    for _ in range(20):
        again = kernels.attend(q, [(pool, pool)], plan, scale=0.2)
        assert torch.equal(again.out, first.out)
        assert torch.equal(again.lse, first.lse)


def test_one_plan_serves_layers_of_unlike_dims_and_heads_with_any_stride(kernels: NativeKernels) -> None:
    plan = plan_of([[(0, 3, 200), (0, 900, 31)]], new=1, kv_heads=2, group=2)
    for dim in (64, 128):
        q, pool = torch.randn(1, 4, 1, dim), torch.randn(2, 1, POOL + 77, dim)[:, 0, 77:]
        assert kernels.serves(q, dim, dim)
        block = (
            (pool[:, 3:203].double(), pool[:, 3:203].double()),
            (pool[:, 900:931].double(), pool[:, 900:931].double()),
        )
        exact = attend(q.double(), [block], scale=0.1)[0]
        torch.testing.assert_close(
            kernels.attend(q, [(pool, pool)], plan, scale=0.1).out.double(), exact, atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize(
    ("flags", "dtypes"),
    [
        (("-mno-avx512f",), DTYPES),
        (("-mno-avx512f", "-mno-avx2", "-mno-fma"), DTYPES),
        (("-mno-avx512f", "-mno-avx2", "-mno-fma", "-mno-f16c"), DTYPES),
        (("-fno-openmp",), [torch.bfloat16]),
    ],
)
def test_other_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], dtypes: list[torch.dtype]
) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("flags of x86")
    monkeypatch.setattr(compiler, "_FLAGS", (*compiler._FLAGS, *flags))
    kernels = NativeKernels(Compiler(tmp_path))
    rows = [[(0, 0, 1000), (0, 1500, 13)], [(0, 40, 7)]]
    for dtype, group in itertools.product(dtypes, (1, 2)):  # 3 queries a KV head share a reading, 6 do not
        q, pool = torch.randn(2, 2 * group, 3, 48).to(dtype), torch.randn(2, POOL, 48).to(dtype)
        assert kernels.serves(q, 48, 48), kernels.reason
        plan = plan_of(rows, new=3, kv_heads=2, group=group, threads=1 if "openmp" in flags[0] else 2)
        out = kernels.attend(q, [(pool, pool)], plan, scale=0.2).out
        blocks = [[(pool[:, a : a + n].double(), pool[:, a : a + n].double()) for _, a, n in row] for row in rows]
        exact = attend(q.double(), blocks, scale=0.2, mask=_mask(rows, 3, 3))[0]
        torch.testing.assert_close(out.double(), exact, atol=1e-5, rtol=1e-5)


def test_work_is_cut_for_all_threads_and_no_finer() -> None:
    assert plan_of([[(0, 0, 8192)]], new=1, kv_heads=3, group=3).units == 16
    assert plan_of([[(0, 0, 1024)]], new=1, kv_heads=3, group=3).units == 3
    assert plan_of([[(0, 0, 200)]], new=1, kv_heads=8, group=4).units == 1
    three = [[(0, 0, 16), (0, 32, 16), (0, 64, 16)], [], [(0, 0, 100)]]
    assert plan_of(three, new=1, kv_heads=1, group=1, threads=8).units == 3
    assert plan_of([[]], new=1, kv_heads=2, group=1).units == 0
    prefill = plan_of([[(0, 0, 4096)]], new=1024, kv_heads=3, group=3)
    assert prefill.groups == 49
    assert 64 <= prefill.units <= 64 + prefill.groups  # keys are cut for balance, and no more than that


def test_a_long_prompt_in_one_forward_needs_little_memory() -> None:
    """32K tokens of 32/8 heads of 128: what is not cut is not kept for merging either."""
    whole = plan_of([[(0, 0, 32768)]], new=32768, kv_heads=8, group=4)
    assert whole.groups == whole.units == 2048
    assert whole.scratch_floats(128, 128) * 4 < 2**20
    after_a_past = plan_of([[(0, 0, 28672), (1, 0, 1024)]], new=1024, kv_heads=8, group=4)
    assert after_a_past.scratch_floats(128, 128) * 4 < 40 * 2**20


def test_new_tokens_of_several_plans_in_one_row(kernels: NativeKernels) -> None:
    """Pieces of prompts and single tokens side by side, each with keys of its own, in any order and strides."""
    pool = torch.randn(2, POOL, 32)
    pieces = [
        NewTokens(0, 40, 1, [(0, 7, 500)]),
        NewTokens(0, 0, 40, [(0, 1000, 300), (0, 1500, 40)]),
        NewTokens(0, 41, 1, []),
        NewTokens(0, 42, 3, [(0, 2000, 3)]),
    ]
    q = torch.randn(1, 45, 6, 32).transpose(1, 2)
    plan = NativePlan(pieces, new=45, kv_heads=2, group=3, threads=2, causal=True)
    assert kernels.serves(q, 32, 32)
    out, lse = kernels.attend(q, [(pool, pool)], plan, scale=0.2)
    assert out.transpose(1, 2).is_contiguous()
    for _, first, tokens, stretches in pieces:
        keys = [(pool[:, a : a + n].double(), pool[:, a : a + n].double()) for _, a, n in stretches]
        blocks = [keys or [(pool[:, :0].double(), pool[:, :0].double())]]
        mine = q[:, :, first : first + tokens].double()
        exact_out, exact_lse = attend(mine, blocks, scale=0.2, mask=_mask([list(stretches)], tokens, 1))
        torch.testing.assert_close(out[:, :, first : first + tokens].double(), exact_out, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse[:, :, first : first + tokens].double(), exact_lse, atol=1e-5, rtol=1e-5)


def test_without_a_compiler_the_reason_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    kernels = NativeKernels(Compiler(tmp_path))
    q, pool = torch.zeros(1, 2, 1, 16), torch.zeros(1, 9, 16)
    with pytest.warns(RuntimeWarning, match="slower without C"):
        assert not kernels.serves(q, 16, 16)
    assert kernels.reason is not None and "no C++ compiler" in kernels.reason
    with pytest.raises(MismatchError):
        kernels.attend(q, [(pool, pool)], plan_of([[(0, 0, 9)]], new=1, kv_heads=1, group=2), scale=1.0)


def test_what_it_does_not_serve(kernels: NativeKernels) -> None:
    assert not kernels.serves(torch.zeros(1, 2, 1, 24), 24, 16)
    assert not kernels.serves(torch.zeros(1, 2, 1, 16, dtype=torch.float64), 16, 16)
    assert not kernels.serves(torch.zeros(1, 2, 1, 16, device="meta"), 16, 16)


def test_a_plan_of_another_forward_is_refused(kernels: NativeKernels) -> None:
    pool = torch.zeros(2, 9, 64)
    plan = plan_of([[(0, 0, 9)]], new=1, kv_heads=2, group=2)
    for q in (torch.zeros(2, 4, 1, 64), torch.zeros(1, 4, 2, 64), torch.zeros(1, 6, 1, 64)):
        assert kernels.serves(q, 64, 64)
        with pytest.raises(MismatchError):
            kernels.attend(q, [(pool, pool)], plan, scale=1.0)
    with pytest.raises(MismatchError):
        kernels.attend(torch.zeros(1, 4, 1, 64), [(pool[:1], pool[:1])], plan, scale=1.0)
