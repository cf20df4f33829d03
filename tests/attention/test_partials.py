"""Dense, run and plain partials against the specification in float64, with SDPA's error as the measure."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from tieredkv.attention import flash
from tieredkv.attention.lse import Partial, merge
from tieredkv.attention.partials import dense, over_run, over_run_parts
from tieredkv.attention.plain import SHORTEST_CHUNK, plain
from tieredkv.reference import attend

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
DIMS = st.sampled_from([8, 32, 64, 80, 128, 256])
SLACK = {torch.float32: 8, torch.bfloat16: 1, torch.float16: 1}
"""Units of last place beyond twice SDPA's error: a single case may come out exact by chance; see test_error for
the bound over many."""
LSE_ERROR = {torch.float32: 2e-5, torch.bfloat16: 4e-3, torch.float16: 2e-3}
"""SDPA gives no LSE to compare with. Scores of bf16 inputs are exact products, summed in fp32."""


def _check(
    partial: Partial, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, mask: torch.Tensor | None
) -> None:
    """k and v `[rows, kv_heads, tokens, dim]`; mask bool `[rows, 1, q, tokens]`, each query seeing something or not."""
    rows = range(q.shape[0])
    blocks = [[(k[row].double(), v[row].double())] for row in rows]
    out, lse = attend(q.double(), blocks, scale=scale, mask=None if mask is None else list(mask))
    stock = scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True).double()
    seen = (lse > -torch.inf).unsqueeze(-1)
    error = (stock - out).where(seen, 0.0).abs().max()
    slack = SLACK[q.dtype] * torch.finfo(q.dtype).eps * out.abs().max()
    assert partial.out.dtype == torch.float32
    assert (partial.out.double() - out).abs().max() <= 2 * error + slack
    assert torch.equal(partial.lse.isneginf(), lse.isneginf())
    assert not partial.out.isnan().any()
    difference = (partial.lse.double() - lse).where(seen[..., 0], 0.0).abs().max()
    assert difference <= LSE_ERROR[q.dtype] * lse.where(seen[..., 0], 0.0).abs().max().clamp_min(1.0)


def _draw(rows: int, heads: int, kv_heads: int, queries: int, tokens: int, dim: int, dtype: torch.dtype) -> Any:
    q = torch.randn(rows, queries, heads, dim).to(dtype).transpose(1, 2)
    return q, *(torch.randn(rows, kv_heads, tokens, dim).to(dtype) for _ in range(2))


@settings(max_examples=60)
@given(
    dtype=DTYPES,
    dim=DIMS,
    heads=st.sampled_from([(1, 1), (9, 3), (4, 4), (8, 2)]),
    tokens=st.one_of(st.integers(1, 40), st.sampled_from([511, 513, 1023, 1024, 1031])),
    queries=st.sampled_from([1, 1, 1, 2, 7, 33]),
    splits=st.sampled_from([None, 1, 2, 3, 4, 7]),
    hidden=st.sampled_from([None, "left", "random", "all", "rows"]),
)
def test_over_run(
    dtype: torch.dtype,
    dim: int,
    heads: tuple[int, int],
    tokens: int,
    queries: int,
    splits: int | None,
    hidden: str | None,
) -> None:
    q, k, v = _draw(1, *heads, queries, tokens, dim, dtype)
    # The run lies inside a larger pool that holds NaN around it.
    pools = [torch.full((heads[1], tokens + 9, dim), torch.nan, dtype=dtype) for _ in range(2)]
    runs = [pool[:, 4 : 4 + tokens] for pool in pools]
    runs[0].copy_(k[0])
    runs[1].copy_(v[0])
    mask = None
    if hidden is not None:
        mask = torch.rand(1, 1, queries, tokens) > 0.5 if hidden == "random" else torch.ones(1, 1, queries, tokens) > 0
        if hidden == "left":
            mask[..., : tokens // 2 + 1] = False
        if hidden in ("all", "rows"):
            mask[:, :, : queries if hidden == "all" else queries // 2] = False
    partial = over_run(q, *runs, scale=dim**-0.5, bias=mask, splits=splits)
    assert partial.out.shape == q.shape
    _check(partial, q, k, v, dim**-0.5, mask)


@settings(max_examples=30)
@given(
    dtype=DTYPES,
    dim=DIMS,
    rows=st.integers(1, 3),
    queries=st.sampled_from([1, 2, 5, 64, 130]),
    causal=st.booleans(),
    starts=st.one_of(st.none(), st.lists(st.integers(0, 5), min_size=3, max_size=3)),
)
def test_dense(dtype: torch.dtype, dim: int, rows: int, queries: int, causal: bool, starts: list[int] | None) -> None:
    q, k, v = _draw(rows, 6, 2, queries, queries, dim, dtype)
    positions = torch.arange(queries)
    bias = None
    if starts is not None:
        bias = (positions >= torch.tensor(starts[:rows])[:, None])[:, None, None].expand(rows, 1, queries, queries)
    mask = torch.ones(rows, 1, queries, queries, dtype=torch.bool) if bias is None else bias
    if causal:
        mask = mask & (positions <= positions[:, None])
    _check(dense(q, k, v, scale=0.2, causal=causal, bias=bias), q, k, v, 0.2, mask)


@settings(max_examples=20)
@given(dtype=DTYPES, tokens=st.integers(1, 3 * SHORTEST_CHUNK), queries=st.integers(1, 9), seen=st.integers(0, 200))
def test_plain_in_chunks(dtype: torch.dtype, tokens: int, queries: int, seen: int) -> None:
    q, k, v = _draw(2, 4, 2, queries, tokens, 32, dtype)
    mask = (torch.arange(tokens) < seen).expand(2, 1, queries, tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tieredkv.attention.plain.SCORES_PER_CHUNK", 1)
        partial = plain(q, k, v, scale=0.2, bias=mask)
        _check(partial, q, k, v, 0.2, mask)
        if tokens >= queries:
            causal = plain(q, k[:, :, :queries], v[:, :, :queries], scale=0.2, causal=True)
            triangle = torch.ones(2, 1, queries, queries, dtype=torch.bool).tril()
            _check(causal, q, k[:, :, :queries], v[:, :, :queries], 0.2, triangle)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("queries", [1, 4])
def test_softcap_and_unequal_dims_go_through_the_plain_partial(softcap: float | None, queries: int) -> None:
    q, k, v = torch.randn(1, 4, queries, 16), torch.randn(2, 70, 16), torch.randn(2, 70, 24)
    expected = attend(q.double(), [[(k.double(), v.double())]], scale=0.5, softcap=softcap)
    partial = over_run(q, k, v, scale=0.5, softcap=softcap)
    torch.testing.assert_close(partial.out.double(), expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(partial.lse.double(), expected[1], atol=1e-5, rtol=1e-5)
    new_k, new_v = torch.randn(1, 2, queries, 16), torch.randn(1, 2, queries, 24)
    causal = torch.ones(1, queries, queries, dtype=torch.bool).tril()
    expected = attend(q.double(), [[(new_k[0].double(), new_v[0].double())]], scale=0.5, softcap=softcap, mask=[causal])
    partial = dense(q, new_k, new_v, scale=0.5, causal=True, softcap=softcap)
    torch.testing.assert_close(partial.out.double(), expected[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("queries", [1, 3])
def test_additive_biases_count(queries: int) -> None:
    q, k, v = torch.randn(1, 4, queries, 16), torch.randn(2, 1030, 16), torch.randn(2, 1030, 16)
    bias = torch.randn(1, 4, queries, 1030)
    bias[:, 1, :, 700:] = -torch.inf
    stock = scaled_dot_product_attention(q, k[None], v[None], bias, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(over_run(q, k, v, scale=0.3, bias=bias).out, stock)
    torch.testing.assert_close(over_run(q, k, v, scale=0.3, bias=bias, splits=3).out, stock)
    torch.testing.assert_close(plain(q, k[None], v[None], scale=0.3, bias=bias).out, stock)


@pytest.mark.parametrize("queries", [1, 2])
def test_an_empty_past_sees_nothing_and_an_empty_forward_is_empty(queries: int) -> None:
    q, k, v = _draw(1, 4, 2, queries, queries, 16, torch.float32)
    past = over_run(q, k[0, :, :0], v[0, :, :0], scale=1.0)
    assert not past.out.any()
    assert (past.lse == -torch.inf).all()
    new = dense(q, k, v, scale=1.0, causal=True)
    torch.testing.assert_close(merge([past, new], sinks=None, dtype=q.dtype), new.out)
    none = q[:, :, :0]
    assert dense(none, k[:, :, :0], v[:, :, :0], scale=1.0, causal=True).out.shape == (1, 4, 0, 16)
    assert over_run(none, k[0], v[0], scale=1.0).out.shape == (1, 4, 0, 16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_run_and_the_new_token_merge_to_sdpa(dtype: torch.dtype) -> None:
    q, k, v = _draw(1, 9, 3, 1, 1500, 64, dtype)
    parts = over_run_parts(q, k[0, :, :-1], v[0, :, :-1], scale=0.125, splits=4)
    assert len(parts) == 4
    merged = merge([*parts, dense(q, k[:, :, -1:], v[:, :, -1:], scale=0.125, causal=True)], sinks=None, dtype=dtype)
    exact = attend(q.double(), [[(k[0].double(), v[0].double())]], scale=0.125)[0]
    stock = scaled_dot_product_attention(q, k, v, scale=0.125, enable_gqa=True)
    assert merged.dtype == dtype
    assert (merged.double() - exact).abs().max() <= 2 * (stock.double() - exact).abs().max()


@pytest.mark.parametrize(
    ("kv_heads", "queries", "tokens", "threads", "pieces"),
    [
        (3, 1, 8192, 2, 2),
        (8, 1, 8192, 2, 1),
        (8, 1, 8192, 16, 2),
        (1, 1, 1500, 16, 2),
        (3, 1, 700, 2, 1),
        (3, 2, 8192, 2, 1),
    ],
)
def test_keys_are_cut_where_heads_do_not_divide_among_threads(
    kv_heads: int, queries: int, tokens: int, threads: int, pieces: int
) -> None:
    assert flash.pieces_for(kv_heads, queries, tokens, threads) == pieces
