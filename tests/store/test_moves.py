"""Copies on their way down: how many there are at most, who waits for them, and that their timing decides nothing."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from held_back import Beside, gate, places
from support import audit_store

from tieredkv.block import Block, LayerGeometry
from tieredkv.config import CacheSettings
from tieredkv.device import CpuDevice, Event
from tieredkv.inflight import Move
from tieredkv.plan import ForwardPlan
from tieredkv.store import BlockStore, Holder, blocks, planner, read_layer, requests, write
from tieredkv.store.kept import KeptBlocks
from tieredkv.store.restore import Restore

BLOCK, HEADS, DIM = 16, 1, 4
LAYER = LayerGeometry(HEADS, DIM, DIM, torch.float32)


def make(**changes: Any) -> tuple[BlockStore, Holder]:
    """A store of one layer with 13 hot slots and 40 warm ones, and a holder of one row."""
    sizes = {"hot": f"{14 * BLOCK} tokens", "warm": "640 tokens", "window": 1, "block_size": BLOCK, **changes}
    chosen = CacheSettings(chunk_tokens=BLOCK, read_in_place=False, **sizes)
    store = BlockStore(chosen, [LAYER], CpuDevice(), 1, "0" * 32)
    holder = store.holder()
    holder.table.rows = [[]]
    return store, holder


def values(past: int, new: int) -> torch.Tensor:
    """Keys [1, 1, new, dim]: each token holds its position."""
    return torch.arange(past, past + new, dtype=torch.float32)[None, None, :, None].expand(1, HEADS, new, DIM).clone()


def forward(store: BlockStore, holder: Holder, new: int) -> ForwardPlan:
    plan = planner.begin(store, holder, new)
    k = values(plan.past, new).repeat(plan.rows, 1, 1, 1)
    write(store, plan, 0, k, -k)
    plan.updated.add(0)
    planner.commit(store, holder)
    return plan


def check(store: BlockStore, holder: Holder) -> None:
    k, v = read_layer(store, holder, 0, holder.tokens)
    wanted = values(0, holder.tokens)
    assert torch.equal(k, wanted) and torch.equal(v, -wanted)
    audit_store(store)
    store.close()


@pytest.mark.parametrize("by", ["forward", "request"])
@pytest.mark.parametrize("limit", [1, 3, 4])
def test_never_more_blocks_than_the_limit_are_on_their_way_and_the_forward_waits(
    monkeypatch: pytest.MonkeyPatch, limit: int, by: str
) -> None:
    store, holder = make(queue_blocks=limit, write_down_at=0.1)
    forward(store, holder, 8 * BLOCK)
    sizes, demote = [], store.mover.demote

    def counted(blocks: Sequence[Block], *rest: Any) -> Move:
        sizes.append((len(blocks), len(store._moving) + len(blocks)))
        return demote(blocks, *rest)

    monkeypatch.setattr(store.mover, "demote", counted)
    with gate(store, "down") as let_go:
        doing = Beside(lambda: forward(store, holder, 1) if by == "forward" else requests.demote(store, holder, "warm"))
        assert doing.is_at_it_after(0.3), "six blocks or more are to be copied, and none has been"
        assert sum(size for size, _ in sizes) == limit
        let_go()
        doing.end()
    store.wait_all()
    assert sum(size for size, _ in sizes) == (6 if by == "forward" else 8)
    assert max(under_way for _, under_way in sizes) == limit
    check(store, holder)


def test_a_queue_that_has_room_holds_nobody_up() -> None:
    store, holder = make(queue_blocks=8, write_down_at=0.1)
    forward(store, holder, 8 * BLOCK)
    with gate(store, "down"):
        Beside(lambda: forward(store, holder, 1)).end()
        assert len(store._moving) == 6
    check(store, holder)


def test_what_is_freed_while_it_is_copied_is_free_when_the_copy_ended() -> None:
    store, holder = make(write_down_at=0.1)
    forward(store, holder, 10 * BLOCK)
    with gate(store, "down") as let_go:
        forward(store, holder, 1)
        assert len(store._moving) == 8
        planner.crop(store, holder, 3 * BLOCK)
        assert store.hot.slots.used == 8, "those that are read stay"
        let_go()
    store.wait_all()
    assert store.hot.slots.used == 3
    check(store, holder)


@pytest.mark.parametrize("kept", [0, 2 * BLOCK])
def test_where_new_blocks_go_does_not_depend_on_a_copy_of_freed_ones(kept: int) -> None:
    found = []
    for is_late in (False, True):
        store, holder = make(write_down_at=0.1)
        forward(store, holder, 10 * BLOCK)
        with gate(store, "down") as let_go:
            forward(store, holder, 1)
            assert store._moving
            if not is_late:
                let_go()
                store.device.synchronize()
            planner.crop(store, holder, kept)
            doing = Beside(functools.partial(forward, store, holder, 10 * BLOCK - kept))
            assert doing.is_at_it_after(0.2) == is_late
            let_go()
            doing.end()
        found.append(places(holder))
        check(store, holder)
    assert found[0] == found[1]
    assert found[0].count("hot") == 10


def late(submit: Callable[..., Event], seconds: float) -> Callable[..., Event]:
    """`submit`, each of whose operations takes so long."""

    def submits(work: Callable[[], Any], **rest: Any) -> Event:
        def slow() -> Any:
            time.sleep(seconds)
            return work()

        return submit(slow, **rest)

    return submits


def test_what_leaves_hot_does_not_depend_on_which_copy_ended_first(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for delay_seconds in (0.0, 0.05):
        store, holder = make()
        monkeypatch.setattr(store.device.down, "submit", late(store.device.down.submit, delay_seconds))
        seen, was_moving = [], 0
        for _ in range(24 * BLOCK):
            forward(store, holder, 1)
            was_moving += bool(store._moving)
            seen.append([block.hot is not None for block in holder.table.rows[0]])
        assert any(not all(row) for row in seen), "none left"
        assert was_moving > 50 or not delay_seconds, "the copies were not late"
        found.append(seen)
        check(store, holder)
    assert found[0] == found[1]


@pytest.mark.parametrize("after", ["candidates", "leaving_order", "leaving", "Candidate"])
@pytest.mark.parametrize("write_down_at", [0.1, 1.0])
def test_a_copy_may_be_collected_while_another_makes_room(
    monkeypatch: pytest.MonkeyPatch, after: str, write_down_at: float
) -> None:
    """In the middle of looking for what leaves hot or is copied down, or when that was chosen already."""
    store, holder = make(write_down_at=write_down_at, watermark=1.0)
    forward(store, holder, 2 * BLOCK)
    twin = store.fork(holder)
    twin.priority = -1  # its blocks leave first
    while store.hot.slots.free:
        forward(store, twin, BLOCK)
    own = [block for block in twin.table.blocks() if block.refs == 1]
    looks = [(place, getattr(place, after)) for place in (store, blocks, planner) if hasattr(place, after)]
    freed: list[int] = []

    def collected(real: Callable[..., Any], *args: Any) -> Any:
        found = real(*args)
        if not freed:
            freed.append(sum(block.hot is not None for block in own))
            store.leave(twin)
        return found

    for place, real in looks:
        monkeypatch.setattr(place, after, functools.partial(collected, real))
    forward(store, holder, 5 * BLOCK)
    assert freed[0] > 2
    assert store.holders == [holder]
    check(store, holder)


def test_what_is_let_go_while_it_is_copied_makes_room_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks kept for later caches: a forward that needs the room of all of them is not refused."""
    store, holder = make(write_down_at=0.1, watermark=1.0, warm=f"{2 * BLOCK} tokens")
    forward(store, holder, 8 * BLOCK)
    kept = KeptBlocks(store, "lru")
    monkeypatch.setattr(store.device.down, "submit", late(store.device.down.submit, 0.2))
    forward(store, holder, 1)
    assert store._moving, "nothing is on its way"
    kept.add([str(number) for number in range(8)], holder.table.rows[0][:8])
    planner.crop(store, holder, 0)
    room = store.hot.slots.total + 2
    forward(store, holder, room * BLOCK)
    assert kept.evicted == 8 and len(holder.table.rows[0]) == room
    check(store, holder)


def test_room_for_what_comes_back_does_not_depend_on_a_copy_of_freed_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    rooms = []
    for delay_seconds in (0.0, 0.2):
        store, holder = make(write_down_at=0.1, warm=f"{6 * BLOCK} tokens")
        forward(store, holder, 8 * BLOCK)
        monkeypatch.setattr(store.device.down, "submit", late(store.device.down.submit, delay_seconds))
        forward(store, holder, 1)
        assert store._moving
        if not delay_seconds:
            store.device.synchronize()
        forward(store, holder, 1)
        assert bool(store._moving) == bool(delay_seconds)
        planner.crop(store, holder, 0)
        with Restore(store, [str(number) for number in range(30)], [(0,)] * 30) as loading:
            rooms.append(loading.room)
        check(store, holder)
    assert rooms[0] == rooms[1] == 6 + int(0.85 * 13)


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_which_rows_share_a_block_does_not_depend_on_a_copy(monkeypatch: pytest.MonkeyPatch, codec: str) -> None:
    """With a lossy codec a hot block is exact: what it shares decides which bits are read.

    Another cache's forwards have the first block of both rows written down, and that of one row leave hot.
    """
    found = []
    for delay_seconds in (0.0, 0.2):
        store, holder = make(codec=codec, queue_blocks=1, write_down_at=0.1, watermark=0.5)
        holder.table.rows, other = [[], []], store.holder()
        other.table.rows = [[]]
        forward(store, holder, 3 * BLOCK)
        monkeypatch.setattr(store.device.down, "submit", late(store.device.down.submit, delay_seconds))
        forward(store, other, BLOCK)
        if not delay_seconds:
            store.device.synchronize()
        forward(store, other, 1)
        first = [row[0] for row in holder.table]
        assert [block.hot is None for block in first] == [True, False]
        assert store.is_moving(first[1]) == bool(delay_seconds)
        forward(store, holder, 1)
        found.append([one is another for one, another in zip(*holder.table.rows, strict=True)])
        audit_store(store)
        store.close()
    assert found[0] == found[1] == [True, True, True, False]
