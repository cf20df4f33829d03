"""Caches that share a store: nobody takes more than its quota, and copies ahead of need wait without holding up any."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from support import audit_store

from tieredkv.block import LayerGeometry
from tieredkv.config import CacheSettings, ColdSettings
from tieredkv.device import CpuDevice, Device, SimulatedAccelerator
from tieredkv.errors import BudgetError, ConfigError
from tieredkv.plan import ForwardPlan
from tieredkv.store import BlockStore, Holder, planner, read_layer, write

BLOCK, HEADS, DIM = 16, 1, 4
LAYER = LayerGeometry(HEADS, DIM, DIM, torch.float32)
BLOCK_BYTES = LAYER.block_bytes(BLOCK)


def make(cold: Path | None = None, *, hot_blocks: int = 12, device: Device | None = None, **changes: Any) -> BlockStore:
    """A store of one layer with so many hot slots and 40 warm ones."""
    values: dict[str, Any] = {"hot": f"{(hot_blocks + 2) * BLOCK} tokens", "warm": "640 tokens", "window": 1, **changes}
    place = None if cold is None else ColdSettings(cold, free_floor=0)
    chosen = CacheSettings(
        block_size=BLOCK, cold=place, chunk_tokens=BLOCK, log_moves=True, read_in_place=False, **values
    )
    device = device or CpuDevice()
    return BlockStore(chosen, [LAYER], device, 1, "0" * 32)


def join(store: BlockStore, priority: int = 0) -> Holder:
    holder = store.holder()
    holder.table.rows, holder.priority = [[]], priority
    return holder


def values(holder: Holder, past: int, new: int) -> torch.Tensor:
    """Keys [1, 1, new, dim]: each token holds its cache and position."""
    positions = torch.arange(past, past + new, dtype=torch.float32) + 1000 * holder.number
    return positions[None, None, :, None].expand(1, HEADS, new, DIM).contiguous()


def forward(store: BlockStore, holder: Holder, new: int) -> ForwardPlan:
    plan = planner.begin(store, holder, new)
    k = values(holder, plan.past, new)
    write(store, plan, 0, k, -k)
    plan.updated.add(0)
    planner.commit(store, holder)
    return plan


def steps(store: BlockStore, holder: Holder, tokens: int) -> None:
    for _ in range(tokens):
        forward(store, holder, 1)


def check(store: BlockStore, *holders: Holder) -> None:
    for holder in holders:
        if holder.tokens:
            k, v = read_layer(store, holder, 0, holder.tokens)
            wanted = values(holder, 0, holder.tokens)
            assert torch.equal(k, wanted) and torch.equal(v, -wanted)
    audit_store(store)
    store.close()


def hot(holder: Holder) -> int:
    return sum(block.hot is not None for block in holder.table.blocks())


def reasons(store: BlockStore) -> list[str]:
    store.wait_all()
    return [record.reason for record in store.counters.log or () if record.source == "hot"]


# ---- quotas


@pytest.mark.parametrize("quota", [None, f"{4 * BLOCK} tokens"])
def test_one_that_takes_much_leaves_others_what_is_beyond_its_quota(quota: str | None) -> None:
    store = make(hot_quota=quota)
    quiet, hog = join(store), join(store)
    forward(store, quiet, 4 * BLOCK)
    for new in (3 * BLOCK, 20 * BLOCK, *[1] * 40, 50):
        forward(store, hog, new)
        if quota is not None:
            assert hog.own_hot_slots() <= 4
            assert hot(quiet) == 4
    if quota is None:
        assert hot(quiet) < 4, "without a quota it would have pushed them out"
    check(store, quiet, hog)


def test_a_quota_is_bytes_of_whole_blocks_and_copies_have_it_too() -> None:
    store = make(hot_quota=3 * BLOCK_BYTES + 5)
    holder = join(store)
    assert holder.quota_slots == 3
    forward(store, holder, 2 * BLOCK)
    twin = store.fork(holder)
    assert twin.quota_slots == 3 and twin.number != holder.number
    assert holder.own_hot_slots() == twin.own_hot_slots() == 0, "shared blocks count for nobody"
    forward(store, twin, 10 * BLOCK)
    assert twin.own_hot_slots() <= 3
    store.close()


def test_what_was_shared_counts_when_the_others_are_gone() -> None:
    store = make(hot_quota=f"{4 * BLOCK} tokens")
    holder = join(store)
    forward(store, holder, 3 * BLOCK)
    twin = store.fork(holder)
    forward(store, holder, 4 * BLOCK)
    assert holder.own_hot_slots() <= 4 < hot(holder)
    store.leave(twin)
    forward(store, holder, BLOCK)
    forward(store, holder, 1)
    assert hot(holder) <= 4
    assert "quota" in reasons(store)
    check(store, holder)


def test_a_quota_that_holds_no_row_is_refused_and_nothing_changes() -> None:
    store = make(hot_quota=BLOCK_BYTES - 1)
    holder = join(store)
    with pytest.raises(BudgetError, match="hot_quota"):
        planner.begin(store, holder, 1)
    assert holder.plan is None and store.hot.slots.used == 0
    store.close()


# ---- copies ahead of need


def test_without_moves_ahead_a_forward_still_gets_its_room() -> None:
    store = make(moves_per_forward=0)
    holders = [join(store), join(store)]
    for _ in range(12):
        for holder in holders:
            steps(store, holder, BLOCK)
    assert set(reasons(store)) == {"room"}
    check(store, *holders)


def test_each_forward_brings_a_bucket_its_moves_and_no_more() -> None:
    """A prefill leaves many blocks to copy down; two may go at each forward, saved up for four."""
    store = make(moves_per_forward=2, hot_blocks=40, write_down_at=0.1)
    holder = join(store)
    forward(store, holder, 30 * BLOCK)
    done = []
    for _ in range(12):
        forward(store, holder, 1)
        done.append(len(reasons(store)))
    steps_of_two = [2 * number for number in range(2, 14)]
    assert done == steps_of_two, "two for each forward so far, the first one's saved up"
    steps(store, holder, 8)
    assert set(reasons(store)) == {"window"} and not store.waiting
    before = len(reasons(store))
    steps(store, holder, 4 * BLOCK)
    assert holder.moves_left <= 8
    assert len(reasons(store)) > before
    check(store, holder)


def test_what_waits_does_not_hold_up_other_caches() -> None:
    store = make(moves_per_forward=1, hot_blocks=40, write_down_at=0.1)
    many, few = join(store), join(store)
    forward(store, many, 20 * BLOCK)
    forward(store, few, 3 * BLOCK)
    steps(store, few, 4)
    store.wait_all()
    stored = [sum(block.is_stored_below for block in holder.table.blocks()) for holder in (many, few)]
    assert stored == [1, 2], "the few had forwards for all of theirs that are outside the window"
    assert len(store.waiting) == 17
    store.leave(many)
    steps(store, few, BLOCK)
    assert not store.waiting, "blocks that were freed wait no more"
    check(store, few)


def test_a_high_priority_gets_its_copies_too() -> None:
    store = make(moves_per_forward=1, hot_blocks=60, write_down_at=0.1)
    high, low = join(store, 1), join(store, 0)
    forward(store, high, 12 * BLOCK)
    forward(store, low, 12 * BLOCK)
    for _ in range(20):
        for holder in (high, low):
            forward(store, holder, 1)
    store.wait_all()
    stored = [sum(block.is_stored_below for block in holder.table.blocks()) for holder in (high, low)]
    assert stored == [11, 11]
    check(store, high, low)


def test_a_queue_is_bounded_and_the_forward_waits_for_the_oldest(cold_dir: Path) -> None:
    with SimulatedAccelerator(latency_seconds=0.002) as device:
        store = make(cold_dir, device=device, queue_blocks=3, hot_blocks=40, write_down_at=0.1, warm=0)
        holder, most = join(store), 0
        forward(store, holder, 8 * BLOCK)
        for _ in range(3 * BLOCK):
            forward(store, holder, 1)
            most = max(most, len(store._moving))
        assert 0 < most <= 3
        forward(store, holder, 1)
        check(store, holder)


def test_the_move_of_a_block_that_was_freed_does_not_take_place() -> None:
    store = make(hot_blocks=40, write_down_at=0.1)
    holder = join(store)
    forward(store, holder, 10 * BLOCK)
    started, go = threading.Event(), threading.Event()

    def block_the_stream() -> None:
        started.set()
        go.wait(10)

    store.device.down.submit(block_the_stream)
    started.wait(10)
    planner.settle(store, holder)
    assert store._moving
    planner.crop(store, holder, 0)
    go.set()
    assert reasons(store) == []
    assert store.warm is not None and store.warm.slots.used == store.hot.slots.used == 0
    check(store, holder)


@pytest.mark.parametrize("change", [{"moves_per_forward": -1}, {"queue_blocks": 0}, {"hot_quota": "much"}])
def test_settings_that_cannot_be_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        CacheSettings(**change)


# ---- together


HISTORY = st.lists(
    st.tuples(st.integers(0, 2), st.one_of(st.just(1), st.integers(1, 60), st.integers(-40, -1))),
    min_size=5,
    max_size=30,
)


def play(store: BlockStore, history: list[tuple[int, int]], quota: int | None) -> list[list[str]]:
    """Forwards and crops of three caches; where every block is after each, and that nobody has too much."""
    holders = [join(store, priority) for priority in (0, 0, 1)]
    seen = []
    for index, tokens in history:
        holder = holders[index]
        if tokens > 0:
            forward(store, holder, tokens)
        else:
            planner.crop(store, holder, max(holder.tokens + tokens, 0))
        for each in holders:
            assert quota is None or each.own_hot_slots() <= quota
        planned = planner.begin(store, holder, 0)
        assert planned.past == holder.tokens
        planner.commit(store, holder)
        seen.append(["-" if b.hot is None else "hot" for each in holders for row in each.table for b in row])
    check(store, *holders)
    return seen


@settings(max_examples=25)
@given(HISTORY, st.sampled_from([None, 2, 4]), st.sampled_from([None, 0, 1, 3]))
def test_forwards_of_several_caches_are_right_and_within_their_quotas(
    tmp_path_factory: pytest.TempPathFactory, history: list[tuple[int, int]], quota: int | None, rate: int | None
) -> None:
    size = None if quota is None else f"{quota * BLOCK} tokens"
    store = make(tmp_path_factory.mktemp("cold"), hot_quota=size, moves_per_forward=rate, queue_blocks=4)
    play(store, history, quota)


@settings(max_examples=6)
@given(HISTORY)
def test_who_is_hot_does_not_depend_on_how_long_copies_take(
    tmp_path_factory: pytest.TempPathFactory, history: list[tuple[int, int]]
) -> None:
    found = []
    for seed in (1, 2):
        with SimulatedAccelerator(seed=seed, max_delay_seconds=0.003) as device:
            folder = tmp_path_factory.mktemp("cold")
            store = make(folder, device=device, hot_quota=f"{4 * BLOCK} tokens", moves_per_forward=1, queue_blocks=4)
            found.append(play(store, history, 4))
    assert found[0] == found[1]
