"""Blocks on their way back up: asked for all at once, beside computing, behind what is attended now; and who waits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from held_back import Beside, gate, places
from support import audit_store

from tieredkv.block import LayerGeometry
from tieredkv.config import CacheSettings
from tieredkv.device import CpuDevice
from tieredkv.errors import ChecksumError
from tieredkv.store import BlockStore, Holder, planner, read_layer, requests, write

BLOCK, HEADS, DIM = 16, 1, 4
LAYER = LayerGeometry(HEADS, DIM, DIM, torch.float32)
LAYERS = 3


def make(folder: Path | None = None, **changes: Any) -> tuple[BlockStore, Holder]:
    """A store of three layers with 13 hot slots and 40 warm ones, of which nothing is read in place, and a holder."""
    sizes = {"hot": f"{14 * BLOCK} tokens", "warm": "640 tokens", "window": 1, "block_size": BLOCK, **changes}
    chosen = CacheSettings(chunk_tokens=BLOCK, read_in_place=False, cold=folder, **sizes)
    store = BlockStore(chosen, [LAYER] * LAYERS, CpuDevice(), 1, "0" * 32)
    return store, one_row(store)


def one_row(store: BlockStore) -> Holder:
    holder = store.holder()
    holder.table.rows = [[]]
    return holder


def values(past: int, new: int, layer: int) -> torch.Tensor:
    """Keys [1, 1, new, dim]: each token holds its position, and its layer."""
    keys = torch.arange(past, past + new, dtype=torch.float32) + 1000 * layer
    return keys[None, None, :, None].expand(1, HEADS, new, DIM).clone()


def forward(store: BlockStore, holder: Holder, new: int) -> None:
    plan = planner.begin(store, holder, new)
    for layer in range(LAYERS):
        k = values(plan.past, new, layer)
        write(store, plan, layer, k, -k)
        plan.updated.add(layer)
    planner.commit(store, holder)


def check(store: BlockStore, *holders: Holder) -> None:
    for holder in holders:
        for layer in range(LAYERS):
            k, v = read_layer(store, holder, layer, holder.tokens)
            wanted = values(0, holder.tokens, layer)
            assert torch.equal(k, wanted) and torch.equal(v, -wanted)
    audit_store(store)


def at_rest(store: BlockStore, holder: Holder, blocks: int = 6) -> None:
    """A sequence whose blocks lie in warm."""
    forward(store, holder, blocks * BLOCK)
    requests.demote(store, holder, "warm")
    assert places(holder) == ["warm"] * blocks


def test_all_layers_are_asked_for_before_one_is_waited_for() -> None:
    store, holder = make()
    at_rest(store, holder)
    with gate(store, "up") as open_gate:
        assert requests.promote(store, holder, wait=False) == 6
        assert store.device.up.pending == 1 + LAYERS, "neighbouring slots come in one copy a layer"
        assert places(holder) == ["warm"] * 6 and store.hot.slots.in_flight == 6
        resumed = Beside(lambda: forward(store, holder, 1))
        assert resumed.is_at_it_after(0.2), "the forward began without what was to come up"
        open_gate()
        resumed.end()
    assert places(holder) == ["hot"] * 7
    assert all(block.warm is not None for block in holder.table.rows[0][:6]), "copies below stay"
    check(store, holder)
    store.close()


def test_what_is_attended_now_goes_first() -> None:
    store, holder = make()
    at_rest(store, holder)
    order: list[str] = []
    with gate(store, "up"):
        requests.promote(store, holder, wait=False)
        fetch = store.mover.fetch
        store.mover.fetch = lambda *a, **k: (order.append(k["reason"]), fetch(*a, **k))[1]  # type: ignore[method-assign]
        now = store.device.up.submit(lambda: order.append("attended now"))
    now.wait()
    store.wait_all()
    assert order == ["attended now", *["request"] * LAYERS]
    check(store, holder)
    store.close()


@pytest.mark.parametrize("lower", ["warm", "none"])
def test_who_does_not_need_the_room_does_not_wait_for_another_to_be_resumed(lower: str) -> None:
    store, holder = make(window=10 * BLOCK)
    other = one_row(store)
    at_rest(store, holder)
    if lower == "none":  # without room below, what is needed is refused and not the window's alone
        assert store.warm is not None
        store.warm.slots.allocate_many(store.warm.slots.free)
    with gate(store, "up") as open_gate:
        requests.promote(store, holder, wait=False)
        forward(store, other, 2 * BLOCK)
        forward(store, other, 1)
        assert store.hot.slots.in_flight == 6
        crowded = Beside(lambda: forward(store, other, 8 * BLOCK))
        assert crowded.is_at_it_after(0.2), "its window needs slots that are about to be filled"
        open_gate()
        crowded.end()
    assert places(other) == ["hot"] * 11
    k, v = read_layer(store, other, 2, other.tokens)
    assert torch.equal(k, values(0, other.tokens, 2)) and torch.equal(v, -k)
    store.close()


@pytest.mark.parametrize("end", ["crop", "leave", "close", "fork"])
def test_what_is_coming_up_may_be_let_go_of(end: str) -> None:
    store, holder = make()
    kept = one_row(store)
    at_rest(store, holder)
    with gate(store, "up"):
        requests.promote(store, holder, wait=False)
        if end == "crop":
            planner.crop(store, holder, 2 * BLOCK + 3)
        elif end == "leave":
            store.leave(holder)
            assert store.hot.slots.in_flight == 6, "freed when the copies are over"
        elif end == "fork":
            kept = store.fork(holder)
    if end == "close":
        store.close()
        return
    forward(store, kept, 1)
    if end != "leave":
        forward(store, holder, 1)
        check(store, holder)
    check(store, kept)
    assert store.hot.slots.in_flight == 0
    store.close()


@pytest.mark.parametrize("wait", [True, False])
def test_what_is_wrong_below_does_not_come_up(wait: bool) -> None:
    store, holder = make()
    at_rest(store, holder)
    slot = holder.table.rows[0][3].warm
    assert store.warm is not None and slot is not None
    store.warm.run(1, slot, 1)[0][0, 0, 5, 0] += 1
    if wait:
        with pytest.raises(ChecksumError, match="layer 1"):
            requests.promote(store, holder)
    else:
        requests.promote(store, holder, wait=False)
        forward(store, holder, 1)  # here nothing is attended: a model is told by the read of that block
    assert places(holder)[:6] == ["warm"] * 6
    assert store.hot.slots.in_flight == 0 and store.counters.checksum_failures > 0
    store.warm.run(1, slot, 1)[0][0, 0, 5, 0] -= 1
    assert requests.promote(store, holder) == 6
    check(store, holder)
    store.close()


def test_what_has_no_room_above_comes_from_disk_to_memory(tmp_path: Path) -> None:
    store, holder = make(tmp_path)
    forward(store, holder, 30 * BLOCK)
    requests.demote(store, holder, "cold")
    assert set(places(holder)) == {"cold"}
    came = requests.promote(store, holder)
    assert came == 10 and places(holder) == ["warm"] * 20 + ["hot"] * 10
    assert [block.cold is None for block in holder.table.rows[0]] == [True] * 20 + [False] * 10
    check(store, holder)
    store.close()


def test_a_slow_disk_holds_back_no_copy_between_memories(tmp_path: Path) -> None:
    """What touches no device memory goes by a stream of its own, and is not counted in the queue of copies down."""
    store, holder = make(tmp_path, queue_blocks=4)
    other = one_row(store)
    forward(store, holder, 30 * BLOCK)
    requests.demote(store, holder, "cold")
    with gate(store, "disk") as open_gate:
        assert requests.promote(store, holder, wait=False) == 10
        assert store.warm is not None and store.warm.slots.in_flight == 20
        forward(store, other, 30 * BLOCK)  # most of it goes down to memory meanwhile
        assert "warm" in places(other)
        resumed = Beside(lambda: forward(store, holder, 1))
        assert resumed.is_at_it_after(0.2)
        open_gate()
        resumed.end()
    check(store, holder, other)
    store.close()


def test_placement_by_the_window_alone_brings_nothing_else_up() -> None:
    store, holder = make(placement="window", window=3 * BLOCK)
    at_rest(store, holder, 8)
    assert requests.promote(store, holder) == 3
    forward(store, holder, BLOCK)
    check(store, holder)
    store.close()


@pytest.mark.parametrize("coming", [0, 7 * BLOCK])
def test_a_sequence_that_is_expected_finds_its_blocks_above_and_room_for_its_tokens(coming: int) -> None:
    store, holder = make()
    at_rest(store, holder)
    assert requests.promotable(store, holder) == 6
    requests.expect(store, holder, coming)
    forward(store, holder, 1)
    assert places(holder).count("hot") == (7 if coming == 0 else 4)
    check(store, holder)
    store.close()


def test_only_forwards_that_wait_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def waited() -> float:
        return sum(phase.move_wait_seconds for phase in store.counters.phases())

    store, holder = make()
    at_rest(store, holder)
    for waits_in in ("request", "forward"):
        with gate(store, "up") as open_gate:
            if waits_in == "request":
                resumed = Beside(lambda: requests.promote(store, holder))
            else:
                requests.demote(store, holder, "warm")
                requests.promote(store, holder, wait=False)
                resumed = Beside(lambda: forward(store, holder, 1))
            assert resumed.is_at_it_after(0.3)
            open_gate()
            resumed.end()
        assert (waited() > 0.25) == (waits_in == "forward")
    store.close()


@pytest.mark.parametrize(("write_down_at", "priority"), [(0.1, 0), (1.0, 1)])
def test_copies_for_which_a_forward_waits_go_before_those_ahead_of_need(
    monkeypatch: pytest.MonkeyPatch, write_down_at: float, priority: int
) -> None:
    store, holder = make(write_down_at=write_down_at, watermark=1.0)
    told: list[int] = []
    submit = store.device.down.submit

    def noted(work: Callable[[], Any], **rest: Any) -> Any:
        told.append(rest["priority"])
        return submit(work, **rest)

    monkeypatch.setattr(store.device.down, "submit", noted)
    for _ in range(16):
        forward(store, holder, BLOCK)
    assert set(told) == {priority}
    check(store, holder)
    store.close()
