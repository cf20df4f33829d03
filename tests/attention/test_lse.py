"""Merging: partials over parts of the keys become attention over all of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tieredkv.attention.lse import Partial, cat_rows, fold, merge, merge_partials, nothing_seen
from tieredkv.reference import attend


def _parts(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cuts: list[int]) -> list[Partial]:
    rows = range(q.shape[0])
    pairs = zip(k.split(cuts, 2), v.split(cuts, 2), strict=True)
    return [Partial(*attend(q, [[(a[row], b[row])] for row in rows], scale=1.0)) for a, b in pairs]


def _whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None = None) -> Partial:
    return Partial(*attend(q, [[(k[row], v[row])] for row in range(q.shape[0])], scale=1.0, sinks=sinks))


@settings(max_examples=40)
@given(
    cuts=st.lists(st.integers(0, 5), min_size=1, max_size=7),
    spread=st.sampled_from([0.1, 1.0, 30.0]),
    with_sinks=st.booleans(),
)
def test_the_merge_of_parts_is_attention_over_all(cuts: list[int], spread: float, with_sinks: bool) -> None:
    q = spread * torch.randn(2, 4, 3, 8, dtype=torch.float64)
    k, v = (torch.randn(2, 2, sum(cuts), 8, dtype=torch.float64) for _ in range(2))
    sinks = torch.randn(4, dtype=torch.float64) if with_sinks else None
    parts = _parts(q, k, v, cuts)
    merged = merge_partials(parts)
    torch.testing.assert_close(merged.out, _whole(q, k, v).out)
    torch.testing.assert_close(merged.lse, _whole(q, k, v).lse)
    out = merge(parts, sinks=sinks, dtype=torch.float64)
    torch.testing.assert_close(out, _whole(q, k, v, sinks).out)


@pytest.mark.parametrize("count", [1, 2, 3, 6])
@pytest.mark.parametrize("sink", [None, 0.0, -torch.inf])
def test_nothing_seen_anywhere_is_zero_and_never_nan(count: int, sink: float | None) -> None:
    parts = [nothing_seen(torch.zeros(1, 2, 3, 4), 5)] * count
    out = merge(parts, sinks=None if sink is None else torch.full((2,), sink), dtype=torch.bfloat16)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, torch.zeros(1, 2, 3, 5, dtype=torch.bfloat16))
    assert (merge_partials(parts).lse == -torch.inf).all()


@pytest.mark.parametrize("others", [1, 2, 5])
def test_a_part_that_saw_nothing_changes_nothing(others: int) -> None:
    seen = Partial(torch.randn(1, 2, 3, 4), 50 * torch.randn(1, 2, 3))
    parts = [nothing_seen(torch.zeros(1, 2, 3, 4), 4)] * others
    for order in ([seen, *parts], [*parts, seen]):
        torch.testing.assert_close(merge_partials(order).out, seen.out)
        torch.testing.assert_close(merge_partials(order).lse, seen.lse)


def test_a_nan_is_not_hidden() -> None:
    seen = Partial(torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3))
    broken = Partial(torch.full_like(seen.out, torch.nan), torch.full_like(seen.lse, torch.nan))
    assert merge([seen, broken], sinks=None, dtype=torch.float32).isnan().all()


def test_rows_are_put_together_in_order() -> None:
    rows = [Partial(torch.randn(n, 2, 3, 4), torch.randn(n, 2, 3)) for n in (1, 2, 1)]
    together = cat_rows(rows)
    assert torch.equal(together.out, torch.cat([row.out for row in rows]))
    assert torch.equal(together.lse, torch.cat([row.lse for row in rows]))
    assert cat_rows(rows[:1]) is rows[0]


@pytest.mark.parametrize("pieces", [1, 2, 40])
def test_folding_is_merging(pieces: int) -> None:
    """Queries that see nothing, at first or ever, and sums so large that fp32 would lose the small ones' share."""
    partials = [Partial(torch.randn(2, 3, 5, 4), 80 + torch.randn(2, 3, 5)) for _ in range(pieces)]
    for partial in partials:
        partial.out[0, 0, 0], partial.lse[0, 0, 0] = 0, -torch.inf
    partials[0].out[0, 1, :2], partials[0].lse[0, 1, :2] = 0, -torch.inf
    exact = merge_partials([Partial(out.double(), lse.double()) for out, lse in partials])
    whole = Partial(partials[0].out.clone(), partials[0].lse)
    for partial in partials[1:]:
        whole = fold(whole, partial)
    torch.testing.assert_close(whole.out.double(), exact.out, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(whole.lse.double(), exact.lse, atol=1e-12 if pieces > 1 else 1e-5, rtol=0)
