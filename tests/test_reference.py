"""The specification itself, against torch's SDPA and against formulas written out."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tieredkv.reference import attend


def _case(heads: int = 4, kv_heads: int = 2, queries: int = 3, tokens: int = 11, dim: int = 8) -> list[torch.Tensor]:
    shapes = ((2, heads, queries, dim), (2, kv_heads, tokens, dim), (2, kv_heads, tokens, dim))
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def test_equals_sdpa_however_the_keys_are_cut_into_blocks() -> None:
    q, k, v = _case()
    expected = scaled_dot_product_attention(q, k, v, scale=0.3, enable_gqa=True)
    for cuts in ([11], [4, 4, 3], [1, 10], [5, 0, 6]):
        blocks = [list(zip(k[row].split(cuts, 1), v[row].split(cuts, 1), strict=True)) for row in range(2)]
        out, lse = attend(q, blocks, scale=0.3)
        torch.testing.assert_close(out, expected)
        scores = 0.3 * q @ k.repeat_interleave(2, 1).transpose(2, 3)
        torch.testing.assert_close(lse, torch.logsumexp(scores, -1))


def test_masks_are_per_row_and_a_query_that_sees_nothing_is_zero() -> None:
    q, k, v = _case()
    mask = torch.rand(2, 4, 3, 11) > 0.5
    mask[1, 2, 1] = False
    out, lse = attend(q, [[(k[0], v[0])], [(k[1], v[1])]], scale=1.0, mask=list(mask))
    assert torch.equal(out[1, 2, 1], torch.zeros(8, dtype=torch.float64))
    assert lse[1, 2, 1] == -torch.inf
    assert not out.isnan().any()
    seen = mask.any(-1)
    torch.testing.assert_close(out[seen], scaled_dot_product_attention(q, k, v, mask, scale=1.0, enable_gqa=True)[seen])


def test_rows_may_differ_in_length_and_have_no_keys() -> None:
    q, k, v = _case()
    out, lse = attend(q, [[(k[0, :, :5], v[0, :, :5])], [(k[1, :, :0], v[1, :, :0])]], scale=1.0)
    torch.testing.assert_close(
        out[:1], scaled_dot_product_attention(q[:1], k[:1, :, :5], v[:1, :, :5], scale=1.0, enable_gqa=True)
    )
    assert not out[1].any()
    assert (lse[1] == -torch.inf).all()


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_softcap_and_sinks_follow_their_formula(softcap: float | None) -> None:
    q, k, v = _case(heads=2, kv_heads=2)
    sinks = torch.tensor([0.5, -3.0], dtype=torch.float64)
    out, lse = attend(q, [[(k[row], v[row])] for row in range(2)], scale=1.0, softcap=softcap, sinks=sinks)
    scores = q @ k.transpose(2, 3)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.exp()
    total = weights.sum(-1) + sinks.exp()[:, None]
    torch.testing.assert_close(out, (weights @ v) / total.unsqueeze(-1))
    torch.testing.assert_close(lse, total.log())
