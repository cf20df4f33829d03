"""What a cache does with its blocks: shares them, writes each once, keeps the window hot, holds the watermark."""

from __future__ import annotations

import copy
import io
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support import (
    WAYS,
    assert_close,
    audit,
    feed,
    locations,
    of,
    oracle,
    small,
    store_of,
    tiny,
    tokens,
)

import tieredkv
from tieredkv.device import SimulatedAccelerator


def test_shared_tails_are_copied_when_they_are_written_and_not_before(cold_dir: Path) -> None:
    model, ids = tiny(), tokens(40)
    with small(model, cold_dir, hot="256 tokens") as cache:
        feed(model, ids, cache)
        store = store_of(cache)
        used = store.hot.slots.used
        cache.batch_repeat_interleave(3)
        assert store.hot.slots.used == used, "a repeat took slots"
        twin = copy.deepcopy(cache)
        assert store.hot.slots.used == used, "a deep copy took slots"
        more = tokens(3, rows=3, seed=8)
        wanted = oracle(torch.cat([ids.expand(3, -1), more], 1))[:, 40:]
        assert_close(feed(model, more, cache), wanted)
        assert store.hot.slots.used == used + 3, "each row of one cache got a tail of its own"
        assert_close(feed(model, more, twin), wanted)
        assert store.hot.slots.used == used + 3 + 2, "the last one to write keeps the tail"
        audit(cache, twin)
        twin.close()
        assert_close(feed(model, more, cache), oracle(torch.cat([ids.expand(3, -1), more, more], 1))[:, 43:])


def test_a_slot_that_a_tail_was_copied_to_is_cleaned_before_it_is_used_again() -> None:
    model, ids = tiny(), tokens(120)
    device = SimulatedAccelerator()  # fills what is freed with NaN
    with small(model, None, warm=0, hot="160 tokens", device=device) as cache:
        feed(model, ids[:, :40], cache)
        with copy.deepcopy(cache) as twin:
            feed(model, ids[:, 40:41], twin)
        for step in range(40, 120):
            feed(model, ids[:, step : step + 1], cache)
            audit(cache)


def test_a_deep_copy_lives_on_without_its_original(cold_dir: Path) -> None:
    model, ids = tiny(), tokens(150)
    cache = small(model, cold_dir)
    feed(model, ids[:, :120], cache)
    twin = copy.deepcopy(cache)
    cache.close()
    model.set_attn_implementation("tieredkv")
    with twin:
        assert_close(feed(model, ids[:, 120:], twin, [1, 20]), oracle(ids)[:, 120:])
    assert not list(cold_dir.iterdir())


@pytest.mark.parametrize("way", WAYS)
def test_copies_go_their_own_ways(cold_dir: Path, way: str) -> None:
    model, ids = tiny(), tokens(118)
    with small(of(model, way), cold_dir) as cache:
        feed(model, ids, cache)
        twins = [copy.deepcopy(cache) for _ in range(2)]
        for seed, some in enumerate([cache, *twins, twins[0], cache]):
            past = some.get_seq_length()
            more = tokens(9, seed=20 + seed)
            before = ids if past == 118 else torch.cat([ids, tokens(9, seed=20 if some is cache else 21)], 1)
            assert_close(feed(model, more, some, [4, 1]), oracle(torch.cat([before, more], 1))[:, past:])
            audit(cache)


@pytest.mark.parametrize("by", ["pickle", "torch"])
def test_a_pickle_is_by_value(cold_dir: Path, by: str) -> None:
    model, ids = tiny(), tokens(150)
    with small(model, cold_dir) as cache:
        feed(model, ids[:, :120], cache)
        if by == "pickle":
            twin = pickle.loads(pickle.dumps(cache))
        else:
            buffer = io.BytesIO()
            torch.save(cache, buffer)
            buffer.seek(0)
            twin = torch.load(buffer, weights_only=False)
        cache.reset()
        with twin:
            assert store_of(twin) is not store_of(cache)
            assert_close(feed(model, ids[:, 120:], twin, [1, 20]), oracle(ids)[:, 120:])


@pytest.mark.parametrize("read_in_place", [True, False])
def test_a_block_leaves_hot_at_most_once(cold_dir: Path, read_in_place: bool) -> None:
    """Through drops and promotions, whatever leaves hot a second time moves no bytes."""
    model, ids = tiny(), tokens(400)
    settings = tieredkv.CacheSettings(log_moves=True, read_in_place=read_in_place)
    with small(model, cold_dir, settings=settings) as cache:
        got = [feed(model, ids[:, :200], cache, [90, 1])]
        for start in range(200, 400, 50):
            cache.promote()
            got.append(feed(model, ids[:, start : start + 50], cache, [1] * 20))
            cache.demote("cold")
        assert_close(torch.cat(got, 1), oracle(ids))
        store = store_of(cache)
        log = store.counters.log
        assert log is not None
        left = Counter((record.block, layer) for record in log if record.source == "hot" for layer in layers_of(record))
        assert max(left.values()) == 1
        moved = sum(m.bytes for name, m in cache.stats().moves.items() if name.startswith("hot_to_"))
        assert moved == sum(store.mover.row_bytes[layer] for _, layer in left)
        assert any(record.reason == "stream" or record.target == "hot" for record in log)


def layers_of(record: Any) -> list[int]:
    return [0, 1] if record.layer is None else [record.layer]


def test_dropping_what_is_stored_below_moves_nothing(cold_dir: Path) -> None:
    model, ids = tiny(), tokens(96)
    with small(model, cold_dir, hot="256 tokens", warm="256 tokens") as cache:
        feed(model, ids, cache)
        assert cache.demote("warm") == 6
        before = cache.stats().moves["hot_to_warm"]
        assert cache.promote() == 6
        assert set(locations(cache)) == {"hot"}
        assert cache.demote("warm") == 6
        assert cache.stats().moves["hot_to_warm"] == before
        more = tokens(5, seed=3)
        assert_close(feed(model, more, cache), oracle(torch.cat([ids, more], 1))[:, 96:])


def test_a_crop_into_a_sealed_block_copies_it(cold_dir: Path) -> None:
    model, ids = tiny(), tokens(130)
    with small(model, cold_dir) as cache:
        feed(model, ids, cache, [100])
        feed(model, tokens(1), cache)  # seals
        twin = copy.deepcopy(cache)
        for cut in (1, 4, 16, 40):
            length = cache.get_seq_length() - cut
            cache.crop(-cut)
            assert cache.get_seq_length() == length
        assert cache.get_seq_length() == 70
        more = tokens(20, seed=6)
        whole = torch.cat([ids[:, :70], more], 1)
        assert_close(feed(model, more, cache, [1, 3]), oracle(whole)[:, 70:])
        twin_ids = torch.cat([ids, tokens(1), more], 1)
        assert_close(feed(model, more, twin), oracle(twin_ids)[:, 131:])
        audit(cache)


def test_a_crop_into_a_block_that_is_on_its_way_down_waits_for_the_copy(cold_dir: Path) -> None:
    model, ids = tiny(), tokens(120)
    device = SimulatedAccelerator(latency_seconds=0.05)
    eager = tieredkv.CacheSettings(write_down_at=0.0)
    with small(model, cold_dir, window=1, hot="192 tokens", warm="160 tokens", device=device, settings=eager) as cache:
        feed(model, ids[:, :80], cache)
        feed(model, ids[:, 80:81], cache)  # seals the blocks, and writes those outside the window down
        store, holder = store_of(cache), cache.parts().holder
        assert holder is not None
        assert store.is_moving(holder.table.rows[0][2]) and not store.is_moving(holder.table.rows[0][3])
        length = 2 * 16 + 5
        cache.crop(length - 81)
        assert_close(feed(model, ids[:, length:], cache, [1, 3]), oracle(ids)[:, length:])
        assert device.clocks.races == 0
        audit(cache)


def test_a_block_that_was_written_straight_down_is_cut_promoted_and_written_on(cold_dir: Path) -> None:
    """It is not sealed yet, and its copy below is out of date from then on."""
    model, ids, other = tiny(), tokens(120), tokens(120, seed=5)
    with small(model, cold_dir) as cache:
        feed(model, ids, cache)
        cache.crop(-70)
        assert locations(cache)[-1] != "hot"
        cache.promote()
        assert locations(cache)[-1] == "hot"
        feed(model, other[:, :40], cache)
        cache.demote("cold")
        whole = torch.cat([ids[:, :50], other], 1)
        assert_close(feed(model, other[:, 40:], cache, [1, 1]), oracle(whole)[:, 90:])


# ---- placement


@pytest.mark.parametrize("window", [1, 16, 33, 48])
def test_the_window_stays_hot(cold_dir: Path, window: int) -> None:
    model, ids = tiny(), tokens(300, rows=2)
    with small(model, cold_dir, window=window, hot="112 tokens") as cache:
        for piece in (150, 40, *[1] * 60):
            start = cache.get_seq_length()
            feed(model, ids[:, start : start + piece], cache)
            end = start + piece
            late = [e for e in cache.block_table() if e.token_range[1] > end - window]
            assert {entry.location for entry in late} == {"hot"}, end


def test_the_watermark_holds(cold_dir: Path) -> None:
    """Between two forwards no more than the mark is used, apart from what the last forward wrote."""
    model, ids = tiny(), tokens(700)
    with small(model, cold_dir, hot="336 tokens", settings=tieredkv.CacheSettings(watermark=0.75)) as cache:
        feed(model, ids[:, :100], cache)
        slots = store_of(cache).hot.slots
        mark = int(0.75 * slots.total)
        for start in range(100, 700, 10):
            feed(model, ids[:, start : start + 10], cache)
            assert slots.used <= mark + 2, "one that is being filled, one that is not sealed yet"
        assert slots.used >= mark - 1, "what fits stays hot"


def test_older_blocks_are_written_down_early_and_stay_hot(cold_dir: Path) -> None:
    model, ids = tiny(), tokens(240)
    with small(model, cold_dir, hot="336 tokens", warm="160 tokens") as cache:
        feed(model, ids, cache, [1] * 230)
        store_of(cache).wait_all()
        holder = cache.parts().holder
        assert holder is not None
        both = [block for block in holder.table.blocks() if block.hot is not None and block.is_stored_below]
        assert both
        assert set(locations(cache)) == {"hot"}
        assert sum(move.blocks for move in cache.stats().moves.values()) == len(both)


def test_blocks_of_low_priority_leave_first(cold_dir: Path) -> None:
    model = tiny()
    with small(model, cold_dir, hot="160 tokens") as cache:
        feed(model, tokens(64), cache)
        twin = copy.deepcopy(cache)
        cache.reset()
        feed(model, tokens(64, seed=2), cache)
        twin.set_priority(-5)
        feed(model, tokens(30, seed=3), cache, [1] * 29)
        assert locations(twin).count("hot") < locations(cache).count("hot")
        twin.close()


def test_demote_and_promote_by_hand(cold_dir: Path) -> None:
    model, ids = tiny(), tokens(130)
    with small(model, cold_dir, hot="192 tokens", warm="160 tokens") as cache:
        first = feed(model, ids[:, :100], cache)
        assert cache.demote("warm") == 6
        assert locations(cache) == ["warm"] * 6 + ["hot"]
        assert cache.demote("cold") == 6
        assert locations(cache) == ["cold"] * 6 + ["hot"]
        assert cache.promote() == 6
        assert locations(cache) == ["hot"] * 7
        rest = feed(model, ids[:, 100:], cache, [1])
        assert_close(torch.cat([first, rest], 1), oracle(ids))
        audit(cache)
