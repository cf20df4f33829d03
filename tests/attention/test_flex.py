"""Tiles and compiled kernels: exact for any block lists, few graphs, and plain attention beyond the cap.

A graph takes seconds to compile, so one module-wide registry serves all tests that need kernels, and shapes repeat.
"""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch._inductor.choices import InductorChoices
from torch.nn.functional import scaled_dot_product_attention

from tieredkv.attention import kernels as module
from tieredkv.attention.flex import FlexKernels, FlexTiles, TileRow, rows_bucket
from tieredkv.attention.kernels import CompiledFlex, options_for
from tieredkv.errors import ConfigError, MismatchError
from tieredkv.reference import attend

CPU = torch.device("cpu")
SLOTS, SIZE = 24, 16
SLACK = {torch.float32: 4, torch.bfloat16: 1, torch.float16: 1}
"""Units of last place beyond twice SDPA's error: a single small case may come out exact by chance."""


@pytest.fixture(scope="module")
def kernels() -> FlexKernels:
    return FlexKernels()


def _tiles(kernels: FlexKernels, rows: int, *, kv_heads: int = 2, q_length: int = 1, slots: int = SLOTS) -> FlexTiles:
    return FlexTiles(
        kernels, kv_heads=kv_heads, pool_slots=slots, rows=rows, block_size=SIZE, device=CPU, q_length=q_length
    )


def _random_rows(count: int, q_length: int = 1, slots: int = SLOTS) -> list[TileRow]:
    """Rows of unequal length, some after a common prefix, some with hidden tokens in front, near block borders."""
    free = random.sample(range(slots), slots)
    prefix = [free.pop() for _ in range(random.randrange(3))]
    rows = []
    for _ in range(count):
        own = random.randint(1, max(1, len(free) // count - 1))
        row = (prefix if random.random() < 0.5 else []) + [free.pop() for _ in range(own)]
        least = (len(row) - 1) * SIZE + 1
        tokens = random.choice(
            [least, least + 1, len(row) * SIZE - 1, len(row) * SIZE, random.randint(least, len(row) * SIZE)]
        )
        tokens = max(tokens, q_length)
        start = random.choice([0, 0, 1, SIZE - 1, SIZE, SIZE + 1, tokens - q_length])
        rows.append(TileRow(row, tokens, min(start, tokens - q_length)))
    return rows


def _check(tiles: FlexTiles, rows: Sequence[TileRow], *, heads: int = 6, dim: int = 32, dtype: torch.dtype) -> None:
    tiles.update(rows)
    _check_attend(tiles, rows, heads, dim, dtype)


def _check_attend(tiles: FlexTiles, rows: Sequence[TileRow], heads: int, dim: int, dtype: torch.dtype) -> None:
    kv_heads, new = tiles.kv_heads, tiles.q_length
    pools = [torch.full((kv_heads, tiles.slots, SIZE, dim), torch.nan, dtype=dtype) for _ in range(2)]
    for slot in {slot for row in rows for slot in row.slots}:
        for pool in pools:
            pool[:, slot] = torch.randn(kv_heads, SIZE, dim).to(dtype)
    q = torch.randn(len(rows), new, heads, dim).to(dtype).transpose(1, 2)
    out, lse = tiles.attend(q, *pools, scale=0.2, lse=False)
    assert (out.dtype, out.shape, lse) == (dtype, q.shape, None)
    ours, measure = [], []
    for index, (slots, tokens, start) in enumerate(rows):
        k, v = (pool[:, list(slots)].flatten(1, 2)[None] for pool in pools)
        positions = torch.arange(k.shape[2])
        mask = (positions >= start) & (positions <= torch.arange(tokens - new, tokens)[:, None])  # [q, tokens]
        one = q[index : index + 1]
        exact, _ = attend(one.double(), [[(k[0].double(), v[0].double())]], scale=0.2, mask=[mask])
        # SDPA is another kernel with a mask than without: the coarser of the two is the measure.
        stock = scaled_dot_product_attention(one, k, v, mask[None, None], scale=0.2, enable_gqa=True)
        errors = [(stock.double() - exact).abs().max()]
        if new == 1:
            k, v = k[:, :, start:tokens], v[:, :, start:tokens]
            stock = scaled_dot_product_attention(one, k, v, scale=0.2, enable_gqa=True)
            errors.append((stock.double() - exact).abs().max())
        slack = SLACK[dtype] * torch.finfo(dtype).eps * exact.abs().max()
        measure.append(2 * torch.stack(errors).max() + slack)
        ours.append((out[index : index + 1].double() - exact).abs().max())
    # Over all rows: of a single one SDPA's error is small by chance.
    assert max(ours) <= max(measure)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", range(16, 272, 16))
def test_a_gpu_has_a_template_for_any_block(
    monkeypatch: pytest.MonkeyPatch, block_size: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 6))
    options: Any = options_for(torch.device("cuda"), dtype, block_size)
    tile = options["BLOCK_N"]
    assert tile >= 16 and not tile & (tile - 1) and not block_size % tile
    assert options["FLOAT32_PRECISION"] == "'ieee'"  # whatever the process allows to matrix products
    # The template for few queries leaves out what torch's own tile does not divide, before it looks at the options.
    choices = InductorChoices().get_flex_decode_configs(128, dtype, "cuda")
    is_left = any(not block_size % min(choice.block_n, block_size) for choice in choices)
    assert is_left or options["FORCE_USE_FLEX_ATTENTION"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_block_lists_through_one_graph(kernels: FlexKernels, dtype: torch.dtype) -> None:
    before = kernels.graphs
    tiles = _tiles(kernels, 3)
    assert tiles.rows == 4
    for _ in range(40):
        _check(tiles, _random_rows(random.randint(1, 4)), dtype=dtype)
    assert kernels.graphs - before == 1


def test_several_new_tokens_are_causal_among_themselves(kernels: FlexKernels) -> None:
    before = kernels.graphs
    tiles = _tiles(kernels, 2, q_length=3)
    for _ in range(40):
        _check(tiles, _random_rows(random.randint(1, 2), q_length=3), dtype=torch.float32)
    assert kernels.graphs - before == 1


def test_heads_without_a_group_and_half_precision(kernels: FlexKernels) -> None:
    tiles = _tiles(kernels, 2)
    for _ in range(20):
        _check(tiles, _random_rows(2), heads=2, dim=64, dtype=torch.float16)


def test_decoding_step_by_step_rewrites_only_what_changed(
    kernels: FlexKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles = _tiles(kernels, 4)
    written: list[int] = []
    write = FlexTiles._write
    monkeypatch.setattr(
        FlexTiles, "_write", lambda self, index, lists: (written.append(index), write(self, index, lists))
    )
    slots = [[7, 3, 9, 1], [20, 21, 22, 23]]
    for step in range(2 * SIZE + 3):
        rows = [
            TileRow(slots[0][: -(-(step + 17) // SIZE)], step + 17, 2),
            TileRow(slots[1][: step // SIZE + 1], step + 1),
        ]
        tiles.update(rows)
        if step % 3 == 0:
            _check_attend(tiles, rows, 6, 32, torch.float32)
    # Each row at the start and at each of its new blocks; idle rows follow the last block of the first.
    assert [written.count(index) for index in range(4)] == [4 - 1, 3, 4 - 1, 4 - 1]


def test_inference_mode_and_no_grad_take_turns_on_the_same_tiles(kernels: FlexKernels) -> None:
    with torch.inference_mode():
        tiles = _tiles(kernels, 4)
        _check(tiles, _random_rows(3), dtype=torch.float32)
    before = kernels.graphs
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad, torch.inference_mode):
        with mode():
            _check(tiles, _random_rows(2), dtype=torch.float32)
    assert kernels.graphs == before  # the graph without gradients was compiled by the tests above


def test_many_pool_sizes_and_rows_compile_no_more_than_the_cap() -> None:
    kernels = FlexKernels(cap=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for slots in range(20, 40):
            for rows in range(1, 21):
                tiles = _tiles(kernels, rows, slots=slots)
                spec = [
                    TileRow([(row + 3) % slots, row % slots], SIZE + 1 + row % SIZE, row % 3) for row in range(rows)
                ]
                tiles.update(spec)
                if rows in (1, 5, 20):
                    _check_attend(tiles, spec, 6, 32, torch.float32)
                else:
                    q, pool = torch.zeros(rows, 6, 1, 32), torch.zeros(2, slots, SIZE, 32)
                    assert not tiles.attend(q, pool, pool, scale=1.0, lse=False)[0].any()
    assert kernels.graphs == 1
    assert [str(w.message)[:30] for w in caught if "FlexAttention" in str(w.message)] == [
        "1 FlexAttention graphs are com"
    ]


def test_what_one_cache_compiled_serves_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(module, "_compile", counting(made))
    shared = CompiledFlex()
    for cap, slots in ((1, 5), (1, 5), (2, 5), (2, 6), (0, 5)):
        kernels = FlexKernels(cap, shared)
        tiles = _tiles(kernels, 1, slots=slots)
        tiles.update([TileRow([1, 0], 20)])
        q, pool = torch.zeros(1, 6, 1, 32), torch.zeros(2, slots, SIZE, 32)
        with contextlib.nullcontext() if cap else pytest.warns(UserWarning, match="plain attention"):
            tiles.attend(q, pool, pool, scale=1.0, lse=False)
        assert kernels.graphs == (cap > 0)
    assert made == [0, 1]  # two sizes of pool
    monkeypatch.setattr(module, "KEPT_COMBINATIONS", 2)
    for number in (*range(4), 3, 0):
        shared.get(number, {}, lse=False)
    assert made == [0, 1, 2, 3, 4, 5, 6]  # the last two are kept, and the first is compiled again


def counting(made: list[int]) -> Callable[..., Any]:
    def compile_(number: int, options: object, lse: bool, count: Callable[[], None]) -> Any:
        made.append(number)
        count()
        return lambda q, k, v, mask, scale: (torch.zeros_like(q), None)

    return compile_


def test_more_graphs_than_one_function_may_have() -> None:
    """Torch raises at the ninth graph of a function; here each shape has its own. The eager backend stands in."""
    kernels = FlexKernels(cap=12)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._dynamo, "lookup_backend", lambda name: lambda graph, inputs: graph.forward)
        for slots in range(2, 13):
            tiles = _tiles(kernels, 1, slots=slots)
            tiles.update([TileRow([1, 0], 20)])
            pool = torch.ones(2, slots, SIZE, 32)
            out, _ = tiles.attend(torch.randn(1, 6, 1, 32), pool, pool, scale=1.0, lse=False)
            torch.testing.assert_close(out, torch.ones(1, 6, 1, 32))
    assert kernels.graphs == 11


def test_beyond_the_cap_the_lse_comes_from_plain_attention() -> None:
    tiles = _tiles(FlexKernels(cap=0), 2, q_length=2)
    tiles.kernels._compiled._lse["cpu"] = True
    rows = [TileRow([4, 5, 2], 40, 3), TileRow([9], 2)]
    with pytest.warns(UserWarning, match="plain attention"):
        _check(tiles, rows, dtype=torch.float32)
    q, pool = torch.randn(2, 6, 2, 32), torch.randn(2, SLOTS, SIZE, 32)
    lse = tiles.attend(q, pool, pool, scale=0.2, lse=True)[1]
    k = pool[:, [9]].flatten(1, 2).double()
    exact = attend(q[1:].double(), [[(k, k)]], scale=0.2, mask=[torch.arange(SIZE) <= torch.arange(2)[:, None]])[1]
    assert lse is not None
    torch.testing.assert_close(lse[1:].double(), exact, atol=1e-5, rtol=1e-5)


def test_what_does_not_compile_is_served_plainly_with_a_warning() -> None:
    kernels = FlexKernels()

    def no_compiler(graph: object, inputs: object) -> object:
        raise RuntimeError("no compiler here")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._dynamo, "lookup_backend", lambda name: no_compiler)
        tiles = _tiles(kernels, 1)
        with pytest.warns(UserWarning, match="no compiler here"):
            _check(tiles, [TileRow([1, 0], 20)], dtype=torch.float32)
        _check(tiles, [TileRow([5, 0], 20)], dtype=torch.float32)


def test_lse_support_is_tried_and_remembered(kernels: FlexKernels) -> None:
    first = kernels.returns_lse(CPU)
    graphs = kernels.graphs
    assert kernels.returns_lse(CPU) is first
    assert kernels.graphs == graphs
    tiles = _tiles(kernels, 4)
    rows = _random_rows(2)
    tiles.update(rows)
    pool = torch.randn(2, SLOTS, SIZE, 32)
    lse = tiles.attend(torch.randn(2, 6, 1, 32), pool, pool, scale=0.2, lse=True)[1]
    assert (lse is not None) is first


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [TileRow([0], 1)] * 3,
        [TileRow([0, 1], 0)],
        [TileRow([0, 1], 20, 20)],
        [TileRow([0], 17)],
        [TileRow([], 1)],
        [TileRow([0, SLOTS], 20)],
        [TileRow([-1, 2], 20)],
        [TileRow([3, 3], 20)],
    ],
)
def test_rows_that_cannot_be_attended_are_refused(kernels: FlexKernels, rows: list[TileRow]) -> None:
    with pytest.raises(MismatchError):
        _tiles(kernels, 2).update(rows)


def test_queries_that_do_not_fit_are_refused(kernels: FlexKernels) -> None:
    tiles = _tiles(kernels, 1, q_length=65)
    tiles.update([TileRow([0, 1, 2, 3, 4], 70)])
    pool = torch.zeros(2, SLOTS, SIZE, 32)
    with pytest.raises(ConfigError):
        tiles.attend(torch.zeros(1, 4, 65, 32), pool, pool, scale=1.0, lse=False)
    with pytest.raises(MismatchError):
        tiles.attend(torch.zeros(1, 4, 1, 32), pool, pool, scale=1.0, lse=False)
    with pytest.raises(MismatchError):
        tiles.attend(torch.zeros(2, 4, 65, 32), pool, pool, scale=1.0, lse=False)


def test_the_mask_of_the_tiles_is_complete_by_itself(kernels: FlexKernels) -> None:
    """Kernels skip it for whole tiles; evaluated over the whole pool it still shows each row its own tokens only."""
    tiles = _tiles(kernels, 2)
    rows = [TileRow([5, 2, 9], 37, 18), TileRow([2, 5], 20)]
    tiles.update(rows)
    sees = tiles._mask(3).mask_mod
    b, kv = torch.arange(4)[:, None], torch.arange(2 * SLOTS * SIZE)
    seen = sees(b, torch.zeros(1), torch.zeros(1, dtype=torch.int64), kv)
    expected = torch.zeros(2, 2, 2, SLOTS, SIZE, dtype=torch.bool)  # [row, head of the query, head of the key, ...]
    for index, (slots, tokens, start) in enumerate(rows):
        for position in range(start, tokens):
            for head in range(2):
                expected[index, head, head, slots[position // SIZE], position % SIZE] = True
    assert torch.equal(seen.view_as(expected), expected)


def test_buckets() -> None:
    assert [rows_bucket(rows) for rows in (1, 2, 3, 4, 5, 16, 17)] == [1, 2, 4, 4, 8, 16, 32]
