"""Plans of forwards over a bare store: every token has one place, is read from there, and refusals change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from support import audit_store

from tieredkv.block import LayerGeometry
from tieredkv.config import CacheSettings, ColdSettings
from tieredkv.device import CpuDevice
from tieredkv.errors import BudgetError, ColdTierError
from tieredkv.plan import ForwardPlan
from tieredkv.store import BlockStore, Holder, planner, read_layer, requests, write

BLOCK, HEADS, DIM = 16, 1, 4
LAYER = LayerGeometry(HEADS, DIM, DIM, torch.float32)


def make(rows: int = 1, cold: Path | None = None, **changes: Any) -> tuple[BlockStore, Holder]:
    """A store of one layer with 8 hot slots for each row (staging aside), 2 warm ones, and a holder of some rows."""
    values: dict[str, Any] = {"hot": "144 tokens", "warm": "32 tokens", "block_size": BLOCK, "window": BLOCK, **changes}
    place = None if cold is None else ColdSettings(cold, free_floor=0)
    chosen = CacheSettings(**{"cold": place, "read_in_place": False, **values})
    store = BlockStore(chosen, [LAYER], CpuDevice(), rows, "0" * 32)
    holder = store.holder()
    holder.table.rows = [[] for _ in range(rows)]
    return store, holder


def values(plan: ForwardPlan) -> torch.Tensor:
    """New keys [rows, 1, new, dim]: each token holds its row and position."""
    positions = torch.arange(plan.past, plan.total, dtype=torch.float32)
    rows = torch.arange(plan.rows, dtype=torch.float32)[:, None] * 1000
    return (rows + positions)[:, None, :, None].expand(-1, HEADS, -1, DIM).contiguous()


def forward(store: BlockStore, holder: Holder, new: int) -> ForwardPlan:
    """Plan, write and commit some tokens."""
    plan = planner.begin(store, holder, new)
    k = values(plan)
    write(store, plan, 0, k, -k)
    plan.updated.add(0)
    planner.commit(store, holder)
    return plan


def check_contents(store: BlockStore, holder: Holder) -> None:
    if not holder.tokens:
        return
    k, v = read_layer(store, holder, 0, holder.tokens)
    whole = ForwardPlan(number=0, past=0, new=holder.tokens, rows=len(holder.table))
    assert torch.equal(k, values(whole)) and torch.equal(v, -values(whole))


def written(plan: ForwardPlan) -> list[tuple[int, int]]:
    """(row, new token) of everything the plan writes."""
    hot = [(w.row, w.source + i) for w in plan.hot_writes for i in range(w.tokens)]
    below = [(w.row, w.source + i) for w in plan.through_writes for i in range(len(w.blocks) * BLOCK)]
    return hot + below


def read(plan: ForwardPlan) -> list[tuple[int, int]]:
    """(row, position) of everything the plan reads."""
    parts = [*plan.hot_runs, *plan.warm_runs, *plan.chunks]
    return [(row, part.position + i) for part in parts for row in part.rows for i in range(part.tokens)]


@settings(max_examples=30)
@given(
    rows=st.integers(1, 3),
    pieces=st.lists(st.one_of(st.just(1), st.integers(1, 60)), min_size=1, max_size=12),
    window=st.sampled_from([None, 1, 16, 40]),
    placement=st.sampled_from(["both", "both", "window", "watermark"]),
    sinks=st.sampled_from([0, 0, 5, 20]),
)
def test_every_token_is_written_once_and_read_once(
    tmp_path_factory: pytest.TempPathFactory,
    rows: int,
    pieces: list[int],
    window: int | None,
    placement: str,
    sinks: int,
) -> None:
    window = None if placement == "watermark" else window
    options: dict[str, Any] = {"window": window, "placement": placement, "sinks": sinks}
    store, holder = make(rows, tmp_path_factory.mktemp("cold"), **options)
    for new in pieces:
        past = holder.tokens
        plan = forward(store, holder, new)
        assert sorted(written(plan)) == [(row, i) for row in range(rows) for i in range(new)]
        visible = past + 1 if new == 1 else past
        assert sorted(read(plan)) == [(row, i) for row in range(rows) for i in range(visible)]
        assert holder.tokens == past + new
        assert [len(row) for row in holder.table] == [-(-holder.tokens // BLOCK)] * rows
        late = [b for row in holder.table for b in row[max(holder.tokens - (window or 1), 0) // BLOCK :]]
        assert all(block.hot is not None for block in late), "the window is hot"
        first = [b for row in holder.table for b in row[: -(-sinks // BLOCK)]]
        assert all(block.hot is not None for block in first), "sinks are hot"
    check_contents(store, holder)
    audit_store(store)
    store.close()


def test_neighbouring_slots_are_written_and_read_as_one() -> None:
    store, holder = make()
    plan = forward(store, holder, 60)
    assert len(plan.hot_writes) == 1
    plan = forward(store, holder, 2)
    assert [(run.position, run.tokens) for run in plan.hot_runs] == [(0, 60)]
    plan = forward(store, holder, 1)
    assert [(run.position, run.tokens) for run in plan.hot_runs] == [(0, 63)], "with the new token"
    assert plan.hot_runs[0].blocks == tuple(holder.table.rows[0])
    store.close()


def test_rows_that_share_blocks_read_them_once() -> None:
    store, holder = make(rows=2)
    holder.table.select([0])
    forward(store, holder, 40)
    holder.table.select([0, 0])
    plan = planner.begin(store, holder, 4)
    assert [(run.rows, run.position, run.tokens) for run in plan.hot_runs if len(run.rows) > 1] == [((0, 1), 0, 32)]
    assert sorted(read(plan)) == [(row, i) for row in (0, 1) for i in range(40)]
    store.close()


def test_what_a_prefill_cannot_keep_hot_goes_straight_down(tmp_path: Path) -> None:
    store, holder = make(cold=tmp_path)
    plan = forward(store, holder, 20 * BLOCK)
    below = [block for w in plan.through_writes for block in w.blocks]
    assert below == holder.table.rows[0][: len(below)], "the oldest blocks"
    assert all(block.hot is None and block.is_stored_below for block in below)
    assert {w.tier for w in plan.through_writes} == {"warm", "cold"}
    check_contents(store, holder)
    audit_store(store)
    store.close()


def test_full_blocks_are_sealed_at_the_next_forward_and_not_before() -> None:
    """So that what speculation rejects is never sealed."""
    store, holder = make()
    forward(store, holder, 2 * BLOCK)
    assert not any(block.sealed for block in holder.table.blocks())
    planner.crop(store, holder, 2 * BLOCK - 3)
    forward(store, holder, 1)
    assert [block.sealed for block in holder.table.rows[0]] == [True, False]
    check_contents(store, holder)
    audit_store(store)
    store.close()


def test_a_crop_goes_on_in_place_where_nobody_else_looks() -> None:
    store, holder = make()
    forward(store, holder, 3 * BLOCK)
    forward(store, holder, 1)
    slots = [block.hot for block in holder.table.rows[0]]
    planner.crop(store, holder, 2 * BLOCK + 5)
    forward(store, holder, 3)
    assert [block.hot for block in holder.table.rows[0]] == slots[:3], "no slot more"
    check_contents(store, holder)
    audit_store(store)
    store.close()


def test_a_crop_leaves_others_what_they_see() -> None:
    store, holder = make(hot="288 tokens")
    forward(store, holder, 3 * BLOCK)
    twin = store.fork(holder)
    planner.crop(store, holder, 2 * BLOCK + 5)
    plan = planner.begin(store, holder, 4)
    write(store, plan, 0, torch.zeros(1, HEADS, 4, DIM), torch.zeros(1, HEADS, 4, DIM))
    planner.commit(store, holder)
    check_contents(store, twin)
    assert holder.table.rows[0][2] is not twin.table.rows[0][2]
    assert holder.table.rows[0][:2] == twin.table.rows[0][:2]
    store.close()


def test_a_rollback_leaves_nothing(tmp_path: Path) -> None:
    store, holder = make(cold=tmp_path)
    forward(store, holder, 100)
    before = ([list(row) for row in holder.table], {role: t.slots.used for role, t in store.tiers.items()})
    plan = planner.begin(store, holder, 8 * BLOCK)
    assert plan.through_writes
    write(store, plan, 0, values(plan), values(plan))
    planner.rollback(store, holder)
    store.wait_all()
    after = ([list(row) for row in holder.table], {role: t.slots.used for role, t in store.tiers.items()})
    assert holder.tokens == 100 and after[0] == before[0]
    assert after[1]["hot"] <= before[1]["hot"], "blocks that made room may have left"
    check_contents(store, holder)
    audit_store(store)
    store.close()


def test_a_refusal_leaves_everything_as_it_was() -> None:
    store, holder = make()
    forward(store, holder, 50)
    rows = [list(row) for row in holder.table]
    with pytest.raises(BudgetError) as caught:
        planner.begin(store, holder, 40 * BLOCK)
    assert caught.value.tier == "warm"
    assert holder.plan is None and holder.tokens == 50
    assert [list(row) for row in holder.table] == rows
    audit_store(store)
    forward(store, holder, 10)
    check_contents(store, holder)
    audit_store(store)
    store.close()


def test_exactly_as_much_as_fits_is_taken() -> None:
    """8 hot slots and 2 warm ones: 10 blocks, and not a token more."""
    for extra in (0, 1):
        store, holder = make()
        total = (store.hot.slots.total + 2) * BLOCK
        forward(store, holder, total // 2)
        if extra:
            with pytest.raises(BudgetError):
                forward(store, holder, total - total // 2 + 1)
        else:
            forward(store, holder, total - total // 2)
        check_contents(store, holder)
        store.close()


def test_a_write_that_fails_below_takes_the_forward_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, holder = make(cold=tmp_path, warm=0)
    forward(store, holder, 50)
    cold = store.cold
    assert cold is not None

    def fail(*_: Any, **__: Any) -> None:
        raise ColdTierError("The disk broke.", wanted="a disk", got="none", change="a new disk")

    monkeypatch.setattr(cold, "write", fail)
    # Which write fails first is a matter of timing: the forward's own (told at its commit), or a write-down that was
    # queued just before, after which the forward finds no cold tier.
    with pytest.raises((ColdTierError, BudgetError)):
        forward(store, holder, 12 * BLOCK)
    assert holder.tokens == 50 and holder.plan is None
    check_contents(store, holder)
    with pytest.raises(BudgetError, match="given up"):
        forward(store, holder, 12 * BLOCK)
    forward(store, holder, 10)
    check_contents(store, holder)
    assert cold.slots.used == 0
    store.close()


def test_a_holder_that_rests_does_not_keep_others_out_of_hot() -> None:
    """Its full blocks are sealed when another one needs room, though it made no forward since."""
    store, holder = make(warm="160 tokens")
    forward(store, holder, 6 * BLOCK)
    other = store.holder()
    other.table.rows = [[]]
    for _ in range(6):
        forward(store, other, BLOCK)
    check_contents(store, holder)
    check_contents(store, other)
    assert any(block.hot is None for block in holder.table.blocks())
    store.close()


# ---- what leaves hot, and when


def hot_places(holder: Holder) -> list[int]:
    """Numbers of the first row's blocks that are hot."""
    return [number for number, block in enumerate(holder.table.rows[0]) if block.hot is not None]


def written_down(store: BlockStore) -> int:
    return sum(move.bytes for name, move in store.counters.moves().items() if name.startswith("hot_to_"))


def step(store: BlockStore, holder: Holder, tokens: int) -> None:
    """So many tokens, one at a time, and what the last of them settles."""
    for _ in range(tokens):
        forward(store, holder, 1)
    planner.settle(store, holder)
    store.wait_all()


def test_both_keeps_old_blocks_while_there_is_room_and_the_window_always() -> None:
    store, holder = make(warm="640 tokens")
    step(store, holder, 30 * BLOCK)
    watermark = int(store.settings.watermark * store.hot.slots.total)
    assert hot_places(holder) == list(range(30 - watermark, 30))
    check_contents(store, holder)
    store.close()


def test_by_window_alone_a_block_leaves_as_soon_as_it_is_outside() -> None:
    store, holder = make(warm="640 tokens", placement="window", window=2 * BLOCK)
    for tokens in range(1, 8):
        step(store, holder, BLOCK)
        assert hot_places(holder) == list(range(max(tokens - 3, 0), tokens)), "the window and a block of slack"
    forward(store, holder, 6 * BLOCK)
    assert len(hot_places(holder)) == 3 + 2, "a prefill writes its window alone to hot"
    check_contents(store, holder)
    store.close()


def test_by_watermark_alone_there_is_no_window() -> None:
    store, holder = make(warm="640 tokens", placement="watermark", window=None)
    assert store.budget.window_tokens == 0
    step(store, holder, 20 * BLOCK)
    assert len(hot_places(holder)) == int(store.settings.watermark * store.hot.slots.total)
    other = store.holder()
    other.table.rows = [[]]
    step(store, other, 9 * BLOCK)
    assert hot_places(holder) == [19], "older than the other's, and nothing protects it but the block of slack"
    check_contents(store, holder)
    store.close()


@pytest.mark.parametrize("amplitude", [1, 2, 15, 16])
@pytest.mark.parametrize("tokens", [4 * BLOCK, 6 * BLOCK + 1, 7 * BLOCK + 1, 20 * BLOCK + 1])
def test_tokens_added_and_taken_away_again_move_nothing(tokens: int, amplitude: int) -> None:
    """At the border of a block, with hot below, at and above the watermark, and a window of one token."""
    store, holder = make(warm="640 tokens", window=1)
    step(store, holder, tokens)

    def turn() -> None:
        planner.crop(store, holder, tokens - amplitude)
        forward(store, holder, amplitude)
        planner.settle(store, holder)
        store.wait_all()

    turn()  # what stands at the border may leave once
    before, hot = written_down(store), hot_places(holder)
    for _ in range(10):
        turn()
        assert hot_places(holder) == hot
    assert written_down(store) == before
    check_contents(store, holder)
    audit_store(store)
    store.close()


def test_what_was_promoted_is_not_pushed_out_by_the_next_block() -> None:
    store, holder = make(warm="640 tokens", hot="560 tokens")
    step(store, holder, 40 * BLOCK)
    requests.demote(store, holder, "warm")
    assert requests.promote(store, holder) > 0
    hot = hot_places(holder)
    for _ in range(store.hot.slots.total // 16):
        step(store, holder, BLOCK)
        assert set(hot) <= set(hot_places(holder))
        assert requests.promote(store, holder) == 0, "full enough: or each block would take turns"
    store.close()


def test_sinks_stay_hot_when_all_else_leaves(tmp_path: Path) -> None:
    store, holder = make(cold=tmp_path, sinks=20)
    plan = forward(store, holder, 30 * BLOCK)
    assert plan.through_writes[0].blocks[0] is holder.table.rows[0][2]
    assert hot_places(holder)[:2] == [0, 1]
    step(store, holder, 10 * BLOCK)
    other = store.holder()
    other.table.rows = [[]]
    step(store, other, 5 * BLOCK)
    assert hot_places(holder)[:2] == [0, 1]
    check_contents(store, holder)
    audit_store(store)
    store.close()


def test_sinks_and_a_window_that_do_not_fit_are_refused() -> None:
    with pytest.raises(BudgetError, match="sinks"):
        make(sinks=7 * BLOCK)
