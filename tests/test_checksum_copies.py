"""Checksums that are taken while blocks are copied: the bytes and the checksums of a copy and a sum after it."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from tieredkv.block import Planes
from tieredkv.checksum import Checksummer
from tieredkv.checksum_native import LEAST_WORDS

ROOM = 7
"""Slots of the pools that are copied from and to."""


def pool(heads: int, *inner: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (heads, ROOM, *inner[:-1], inner[-1] * dtype.itemsize), generator=generator)
    return raw.to(torch.uint8).view(dtype)


def as_bytes(planes: Planes) -> list[bytes]:
    return [plane.contiguous().view(torch.uint8).numpy().tobytes() for plane in planes]


@hypothesis.settings(max_examples=60)
@hypothesis.given(
    layer=st.lists(
        st.tuples(st.integers(1, 4), st.sampled_from([(8,), (16, 24), (2, 4, 8)]), st.integers(0, 99)), min_size=1
    ),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int8]),
    count=st.integers(0, 4),
    places=st.tuples(st.integers(0, 3), st.integers(0, 3)),
)
def test_a_copy_that_sums_is_a_copy_and_a_sum(
    layer: list[tuple[int, tuple[int, ...], int]], dtype: torch.dtype, count: int, places: tuple[int, int]
) -> None:
    summer, (come_from, into) = Checksummer(), places
    pools = [pool(heads, *inner, dtype=dtype, seed=seed) for heads, inner, seed in layer]
    targets = [torch.full_like(each.view(torch.uint8), 7).view(dtype) for each in pools]
    sources = tuple(each[:, come_from : come_from + count] for each in pools)
    out = tuple(each[:, into : into + count] for each in targets)
    sums = summer.copy_summed(out, sources)
    assert sums is not None and torch.equal(sums, summer.checksum(sources))
    assert as_bytes(out) == as_bytes(sources)
    beside = [slot for slot in range(ROOM) if not into <= slot < into + count]
    assert all((each[:, beside].contiguous().view(torch.uint8) == 7).all() for each in targets)


def test_what_does_not_lie_in_whole_words_is_left_alone() -> None:
    summer, source = Checksummer(), (pool(2, 16, dtype=torch.bfloat16, seed=0),)
    odd = torch.zeros(2 * ROOM * 16 + 1, dtype=torch.bfloat16)[1:].view(2, ROOM, 16)
    apart = torch.zeros(2, ROOM, 16, 2, dtype=torch.bfloat16)[..., 0]
    for out in (odd, apart):
        assert summer.copy_summed((out,), source) is None
        assert not out.any()
        copied = torch.empty_like(source[0])
        sums = summer.copy_summed((copied,), (out,))  # what is read may lie anyhow
        assert sums is not None and torch.equal(sums, summer.checksum((out,)))
        assert torch.equal(copied, out)


def test_without_the_kernel_nothing_is_copied() -> None:
    source, out = pool(2, 16, dtype=torch.float16, seed=0), torch.zeros(2, ROOM, 16, dtype=torch.float16)
    assert Checksummer(native=False).copy_summed((out,), (source,)) is None
    assert not out.any()
    meta = torch.empty(2, ROOM, 16, dtype=torch.float16, device="meta")
    assert Checksummer().copy_summed((meta,), (source,)) is None


@pytest.mark.parametrize("threads", [1, 2])
def test_several_threads_copy_the_same(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        source = torch.randn(3, 4 * LEAST_WORDS // 64 // 3, 128)
        out = torch.empty_like(source)
        sums = Checksummer().copy_summed((out,), (source,))
    finally:
        torch.set_num_threads(before)
    assert sums is not None and torch.equal(sums, Checksummer().checksum((source,)))
    assert torch.equal(out, source)
