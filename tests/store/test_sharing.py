"""Rows that hold the same bits share blocks, and no others do; wherever the blocks lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from support import assert_close, audit, audit_store, feed, oracle, small, store_of, tiny, tokens

import tieredkv
from tieredkv.block import LayerGeometry
from tieredkv.config import CacheSettings, ColdSettings
from tieredkv.device import CpuDevice, SimulatedAccelerator
from tieredkv.store import BlockStore, Holder, planner, read_layer, sharing, write

BLOCK, DIM, LAYERS = 16, 4, 2


def make(rows: int, cold: Path | None = None, **changes: Any) -> tuple[BlockStore, Holder]:
    values: dict[str, Any] = {"hot": "160 tokens", "warm": "64 tokens", "block_size": BLOCK, "window": BLOCK, **changes}
    place = None if cold is None else ColdSettings(cold, free_floor=0)
    layer = LayerGeometry(1, DIM, DIM, torch.float32)
    chosen = CacheSettings(**{"cold": place, "read_in_place": False, **values})
    store = BlockStore(chosen, [layer] * LAYERS, CpuDevice(), rows, "0" * 32)
    holder = store.holder()
    holder.table.rows = [[] for _ in range(rows)]
    return store, holder


def forward(store: BlockStore, holder: Holder, values: torch.Tensor, layers: torch.Tensor | None = None) -> None:
    """Write [rows, new] numbers as tokens; `layers` [rows, new] are those of the last layer, where they differ."""
    plan = planner.begin(store, holder, values.shape[1])
    for layer in range(LAYERS):
        numbers = values if layers is None or layer == 0 else layers
        k = numbers.float()[:, None, :, None].expand(-1, 1, -1, DIM).contiguous()
        write(store, plan, layer, k, -k)
        plan.updated.add(layer)
    planner.commit(store, holder)


def shared(holder: Holder, index: int) -> list[int]:
    """For each row the first row whose block at a place it has."""
    column = [row[index] for row in holder.table]
    return [column.index(block) for block in column]


@settings(max_examples=40)
@given(
    texts=st.lists(st.lists(st.integers(0, 1), min_size=4, max_size=4), min_size=2, max_size=4),
    pieces=st.lists(st.sampled_from([1, 7, 16, 40]), min_size=1, max_size=5),
    with_cold=st.booleans(),
)
def test_rows_share_exactly_what_is_equal_from_the_start(
    tmp_path_factory: pytest.TempPathFactory, texts: list[list[int]], pieces: list[int], with_cold: bool
) -> None:
    """Each row is four blocks of one of two kinds, given in pieces, in three tiers."""
    rows = len(texts)
    cold = tmp_path_factory.mktemp("cold") if with_cold else None
    store, holder = make(rows, cold, **({} if with_cold else {"hot": "256 tokens"}))
    whole = torch.tensor(texts).repeat_interleave(BLOCK, 1) * 1000 + torch.arange(4 * BLOCK)
    at = 0
    for new in [*pieces, 4 * BLOCK]:
        part = whole[:, at : at + new]
        if part.shape[1]:
            forward(store, holder, part)
        at += part.shape[1]
        audit_store(store)
    planner.settle(store, holder)
    for index in range(4):
        starts = [text[: index + 1] for text in texts]
        assert shared(holder, index) == [starts.index(start) for start in starts]
    for layer in range(LAYERS):
        k, v = read_layer(store, holder, layer, 4 * BLOCK)
        assert torch.equal(k[:, 0, :, 0], whole.float()) and torch.equal(v, -k)
    audit_store(store)
    store.close()


def test_a_difference_in_one_layer_keeps_blocks_apart() -> None:
    store, holder = make(2)
    same = torch.arange(BLOCK).expand(2, -1)
    other = same.clone()
    other[1, 5] += 1
    forward(store, holder, same, other)
    forward(store, holder, same)
    planner.settle(store, holder)
    assert shared(holder, 0) == [0, 1]
    assert shared(holder, 1) == [0, 1], "equal, after what is not"


def test_a_checksum_does_not_decide(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Blocks below hot have checksums; if those collide, bytes still tell the blocks apart."""
    store, holder = make(2, tmp_path, hot="48 tokens")
    monkeypatch.setattr(store.mover.checksummer, "checksum", lambda planes: torch.zeros(planes[0].shape[1]).long())
    values = torch.arange(6 * BLOCK).expand(2, -1).clone()
    values[1] += 1
    forward(store, holder, values)
    planner.settle(store, holder)
    assert any(block.hot is None for block in holder.table.rows[0])
    assert [shared(holder, index) for index in range(6)] == [[0, 1]] * 6


def test_zeros_of_two_signs_are_not_the_same() -> None:
    store, holder = make(2)
    zeros = torch.zeros(2, BLOCK)
    zeros[1] = -0.0
    forward(store, holder, zeros)
    planner.settle(store, holder)
    assert shared(holder, 0) == [0, 1]


def test_not_a_number_equals_itself() -> None:
    store, holder = make(2)
    forward(store, holder, torch.full((2, BLOCK), float("nan")))
    planner.settle(store, holder)
    assert shared(holder, 0) == [0, 0]


def test_blocks_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store, holder = make(2)
    compared: list[int] = []
    original = sharing._equal
    monkeypatch.setattr(sharing, "_equal", lambda *args: compared.append(1) or original(*args))
    forward(store, holder, torch.stack([torch.arange(2 * BLOCK)] * 2))
    for step in range(BLOCK + 2):
        forward(store, holder, torch.tensor([[step], [step + 1]]))
    assert len(compared) == 3


def test_a_crop_makes_new_blocks_that_are_compared_anew() -> None:
    store, holder = make(2)
    values = torch.stack([torch.arange(3 * BLOCK)] * 2)
    apart = values.clone()
    apart[1, BLOCK + 3] += 1
    forward(store, holder, apart)
    planner.settle(store, holder)
    assert [shared(holder, index) for index in range(3)] == [[0, 0], [0, 1], [0, 1]]
    planner.crop(store, holder, BLOCK)
    forward(store, holder, values[:, BLOCK:])
    planner.settle(store, holder)
    assert [shared(holder, index) for index in range(3)] == [[0, 0]] * 3
    audit_store(store)


# ---- whole caches


@pytest.mark.parametrize("kind", ["cpu", "simulated"])
def test_equal_rows_of_a_prefill_share_their_prompt(cold_dir: Path, kind: str) -> None:
    model, ids = tiny(), tokens(100)
    device = SimulatedAccelerator(seed=2, max_delay_seconds=0.002) if kind == "simulated" else None
    with small(model, cold_dir, device=device) as cache:
        rows = torch.cat([ids, ids, tokens(100, seed=3), ids])
        more = tokens(40, rows=4, seed=6)
        got = [feed(model, rows, cache), feed(model, more, cache, [1, 1])]
        assert_close(torch.cat(got, 1), oracle(torch.cat([rows, more], 1)))
        entries = [entry for entry in cache.block_table() if entry.layer_id == 0]
        first = {(entry.row, entry.token_range[0]): entry.block_id for entry in entries}
        for start in range(0, 96, 16):
            assert first[0, start] == first[1, start] == first[3, start] != first[2, start]
        assert len({first[row, 96] for row in range(4)}) == 4
        audit(cache)
        assert device is None or device.clocks.races == 0


def test_beams_take_the_bytes_of_one_sequence_and_their_tails() -> None:
    model, ids = tiny(), tokens(640)
    with tieredkv.TieredCache(model, hot="1024 tokens", block_size=16) as cache:
        wanted = tiny().generate(ids, max_new_tokens=8, num_beams=4, do_sample=False)
        out = model.generate(ids, past_key_values=cache, max_new_tokens=8, num_beams=4, do_sample=False)
        assert torch.equal(out, wanted)
        used, one = store_of(cache).hot.slots.used, 41
        assert used <= 1.1 * one, (used, one)
        audit(cache)


def test_reordering_copies_tails_only(cold_dir: Path) -> None:
    model, ids = tiny(), tokens(100)
    with tieredkv.TieredCache(model, hot="512 tokens", block_size=16) as cache:
        feed(model, ids, cache)
        cache.batch_repeat_interleave(4)
        copied: list[int] = []
        original = planner._copy_into
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(planner, "_copy_into", lambda *args: copied.append(1) or original(*args))
            rows = ids.expand(4, -1)
            for step in range(10):
                order = torch.randint(4, (4,), generator=torch.Generator().manual_seed(step))
                cache.reorder_cache(order)
                new = tokens(1, rows=4, seed=step)
                rows = torch.cat([rows[order], new], 1)
                before = len(copied)
                got = feed(model, new, cache)
                assert len(copied) - before <= 3
                if step % 5 == 4:
                    assert_close(got, oracle(rows)[:, -1:])
        audit(cache)
