"""What a cache means: sharing, write-once, the window, masks, interrupts, handles, threads, and its end."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import (
    assert_close,
    assert_generated,
    audit,
    difference,
    feed,
    generate,
    locations,
    oracle,
    small,
    store_of,
    tiny,
    tokens,
)
from transformers import DynamicCache

import tieredkv
from tieredkv.device import CpuDevice, SimulatedAccelerator
from tieredkv.errors import ClosedError, HandleError

WAYS = ["blocks", "gather"]
FAMILIES = ["llama", "gemma3", "gemma3n", "gemma2", "mistral", "gptoss", "mla", "bloom", "qwen3next"]


def of(model: Any, way: str) -> Any:
    """What a cache is given so that it attends this way."""
    return model if way == "blocks" else model.config


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("tieredkv")}


def eventually(holds: Callable[[], bool], seconds: float = 5.0) -> bool:
    """Whether something becomes true within a time; workers end by themselves, a little later."""
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    return holds()


# ---- right logits


@pytest.mark.contract
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_in_three_tiers(cold_dir: Path, name: str, way: str) -> None:
    """Pieces that start and end inside blocks, at their borders, and over several of them."""
    model, ids = tiny(name), tokens(250, rows=2)
    with small(of(model, way), cold_dir) as cache:
        pieces = [100, 1, 1, 10, 16, 1, 31, 33, 1]
        logits = feed(model, ids, cache, pieces)
        # Linear attention in pieces differs from linear attention at once by more than rounding.
        wanted = feed(tiny(name), ids, DynamicCache(config=model.config), pieces) if name == "qwen3next" else None
        assert_close(logits, oracle(ids, name) if wanted is None else wanted)
        if cache.parts().tiered:
            assert set(locations(cache)) == {"hot", "warm", "cold"}
        over_blocks = way == "blocks" and name in ("llama", "gemma3", "gemma3n", "gemma2", "gptoss", "qwen3next")
        assert cache.mode == ("blocks" if over_blocks else "gather")
        assert (cache.fallback_reason is None) == over_blocks
        audit(cache)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes(cold_dir: Path, dtype: torch.dtype, way: str) -> None:
    """float64 shows errors that rounding of fp32 would hide."""
    model, ids = tiny(dtype=dtype), tokens(150)
    with small(of(model, way), cold_dir) as cache:
        tolerance = {torch.float64: 1e-12, torch.bfloat16: 5e-2, torch.float16: 5e-3}[dtype]
        assert_close(feed(model, ids, cache, [80, 1, 20]), oracle(ids, dtype=dtype), tolerance=tolerance)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kernel", ["native", "flash", "plain"])
@pytest.mark.parametrize("read_in_place", [True, False])
def test_kernels_and_reading_in_place(cold_dir: Path, kernel: str, way: str, read_in_place: bool) -> None:
    model, ids = tiny(), tokens(170, rows=2)
    settings = tieredkv.CacheSettings(kernel=kernel, read_in_place=read_in_place)  # type: ignore[arg-type]
    with small(of(model, way), cold_dir, settings=settings) as cache:
        assert_close(feed(model, ids, cache, [90, 1, 30, 1]), oracle(ids))
        assert (cache.stats().moves.get("warm_to_hot") is not None) == (not read_in_place)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("addresses_host", [True, False])
def test_on_a_device_whose_copies_come_late(cold_dir: Path, addresses_host: bool, way: str) -> None:
    model, ids = tiny(), tokens(300, rows=2)
    device = SimulatedAccelerator(seed=5, max_delay_seconds=0.003, addresses_host=addresses_host)
    with small(of(model, way), cold_dir, device=device) as cache:
        assert_close(feed(model, ids, cache, [130, 1, 1, 40, *[1] * 20, 60]), oracle(ids))
        assert device.clocks.races == 0
        audit(cache)


@pytest.mark.contract
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("padding", ["left", "holes"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "mla"])
def test_padded_batches(cold_dir: Path, name: str, padding: str, way: str) -> None:
    model, ids = tiny(name), tokens(140, rows=3)
    mask = torch.ones_like(ids)
    mask[0, :37] = mask[2, :1] = 0
    if padding == "holes":
        mask[1, 20:23] = mask[2, 90:101] = mask[0, 61] = 0
    wanted, got, past = oracle(ids, name, mask=mask), [], 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with small(of(model, way), cold_dir) as cache, torch.no_grad():
        for new in (100, 1, 1, 15, 1, 22):
            part = slice(past, past + new)
            past += new
            keywords = {"attention_mask": mask[:, :past], "position_ids": positions[:, part]}
            got.append(model(ids[:, part], past_key_values=cache, **keywords).logits)
        assert_close(torch.cat(got, 1)[mask.bool()], wanted[mask.bool()])


@pytest.mark.parametrize("way", WAYS)
def test_generation_of_a_padded_batch(cold_dir: Path, way: str) -> None:
    model, ids = tiny(), tokens(70, rows=2)
    mask = torch.ones_like(ids)
    mask[0, :33] = 0
    with small(of(model, way), cold_dir) as cache:
        out = generate(model, ids.masked_fill(mask == 0, 0), cache, 20, attention_mask=mask)
        assert_generated(out, 70, mask=mask)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_four_dimensional_masks_of_the_user(cold_dir: Path, kind: str, way: str) -> None:
    model, ids, total = tiny(), tokens(130, rows=2), 130
    seen = torch.ones(2, 1, total, total, dtype=torch.bool).tril()
    generator = torch.Generator().manual_seed(3)
    seen &= (torch.rand(2, 1, total, total, generator=generator) > 0.3) | torch.eye(total, dtype=torch.bool)
    mask = seen if kind == "bool" else torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    got, past = [], 0
    with small(of(model, way), cold_dir) as cache, torch.no_grad():
        for new in (80, 1, 1, 30, 18):
            part = slice(past, past + new)
            past += new
            four = mask[:, :, part, :past]
            got.append(model(ids[:, part], past_key_values=cache, attention_mask=four).logits)
        assert cache.mode == way
    assert_close(torch.cat(got, 1), oracle(ids, mask=mask))


# ---- sharing and writing once


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
        assert store.is_moving(holder.table.rows[0][3]) and not store.is_moving(holder.table.rows[0][4])
        length = 3 * 16 + 5
        cache.crop(length - 81)
        assert_close(feed(model, ids[:, length:], cache, [1, 3]), oracle(ids)[:, length:])
        assert device.clocks.races == 0
        audit(cache)


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


# ---- interrupts


class Stop(Exception):
    """Raised in the middle of a forward."""


@pytest.fixture(params=[Stop, KeyboardInterrupt])
def stop(request: pytest.FixtureRequest) -> type[BaseException]:
    kind: type[BaseException] = request.param
    return kind


def stops_at(place: torch.nn.Module, kind: type[BaseException]) -> Any:
    """A hook that raises once the place in the model is reached."""

    def hook(*_: Any) -> None:
        raise kind("stop here")

    return place.register_forward_pre_hook(hook)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("past", [0, 50, 140])
@pytest.mark.parametrize("place", ["layers.0.mlp", "layers.1", "layers.1.mlp", "norm"])
def test_a_forward_that_was_interrupted(
    cold_dir: Path, place: str, past: int, way: str, stop: type[BaseException]
) -> None:
    """Whether it counts or not, the cache says its length, and goes on from there with right logits."""
    model, ids = tiny(), tokens(220)
    with small(of(model, way), cold_dir) as cache:
        feed(model, ids[:, :past], cache, [past // 2, 1])
        for new in (30, 1):
            start = cache.get_seq_length()
            hook = stops_at(model.model.get_submodule(place), stop)
            with pytest.raises(stop):
                feed(model, ids[:, start : start + new], cache)
            hook.remove()
            counts = place in ("layers.1.mlp", "norm")  # every layer had its tokens
            assert cache.get_seq_length() == start + (new if counts else 0)
        start = cache.get_seq_length()
        assert_close(feed(model, ids[:, start:], cache, [1, 20]), oracle(ids)[:, start:])
        audit(cache)


@pytest.mark.parametrize("name", ["gemma3", "qwen3next"])
@pytest.mark.parametrize("past", [0, 3, 30])
def test_an_interrupted_hybrid_model_is_right_or_refuses(cold_dir: Path, name: str, past: int) -> None:
    """Layers that are not tiered went ahead, and some of them cannot go back."""
    model, ids = tiny(name), tokens(100)
    wanted, tolerance = oracle(ids, name), 1e-5 if name == "gemma3" else 1e-4  # linear attention in pieces is rougher
    with small(model, cold_dir) as cache:
        feed(model, ids[:, :past], cache)
        hook = stops_at(model.model.layers[1], Stop)
        with pytest.raises(Stop):
            feed(model, ids[:, past : past + 20], cache)
        hook.remove()
        try:
            start = cache.get_seq_length()
            assert_close(feed(model, ids[:, start:], cache, [1, 20]), wanted[:, start:], tolerance=tolerance)
        except tieredkv.MismatchError as error:
            assert "reset" in error.change
            assert name == "qwen3next", "only a linear state cannot go back"
        cache.reset()
        assert_close(feed(model, ids, cache, [50, 1]), wanted, tolerance=tolerance)


@pytest.mark.parametrize("within", ["plan_reads", "_append_blocks", "_own_tails"])
def test_an_interrupt_inside_of_planning(
    cold_dir: Path, within: str, monkeypatch: pytest.MonkeyPatch, stop: type[BaseException]
) -> None:
    """Control-C may strike between any two lines; the worst case is after slots were taken."""
    from tieredkv.store import planner

    model, ids = tiny(), tokens(220)
    original = getattr(planner, within)

    def interrupted(*arguments: Any) -> Any:
        original(*arguments)
        raise stop

    with small(model, cold_dir) as cache:
        feed(model, ids[:, :150], cache, [70])
        for new in (1, 40):
            monkeypatch.setattr(planner, within, interrupted)
            with pytest.raises(stop):
                feed(model, ids[:, 150 : 150 + new], cache)
            monkeypatch.setattr(planner, within, original)
            assert cache.get_seq_length() == 150
        assert_close(feed(model, ids[:, 150:], cache, [1, 20]), oracle(ids)[:, 150:])
        audit(cache)


@pytest.mark.parametrize("kind", ["cpu", "simulated"])
def test_an_interrupt_while_a_chunk_is_attended(
    cold_dir: Path, kind: str, monkeypatch: pytest.MonkeyPatch, stop: type[BaseException]
) -> None:
    from tieredkv.attention import engine

    model, ids = tiny(), tokens(220)
    device = SimulatedAccelerator(max_delay_seconds=0.002) if kind == "simulated" else CpuDevice(addresses_host=False)
    original = engine._add_run
    with small(model, cold_dir, device=device) as cache:
        feed(model, ids[:, :180], cache, [150])
        for after in range(1, 12, 3):
            calls = iter(range(after))

            def interrupted(*arguments: Any, calls: Iterator[int] = calls) -> None:
                original(*arguments)
                if next(calls, None) is None:
                    raise stop

            monkeypatch.setattr(engine, "_add_run", interrupted)
            with pytest.raises(stop):
                feed(model, ids[:, 180:181], cache)
            monkeypatch.setattr(engine, "_add_run", original)
        start = cache.get_seq_length()
        assert_close(feed(model, ids[:, start:], cache, [1, 20]), oracle(ids)[:, start:])
        audit(cache)


# ---- handles and implementations


def test_a_handle_that_nobody_claims_raises(cold_dir: Path) -> None:
    model, ids = tiny(), tokens(60)
    with small(model, cold_dir) as cache:
        feed(model, ids, cache)
        new = torch.randn(1, 2, 1, 8)
        key, _ = cache.update(new, new.clone(), 0, kwargs={})
        assert key.shape[2] == 1, "new keys alone"
        with pytest.raises(HandleError, match="reset"):
            cache.update(new.clone(), new.clone(), 1, kwargs={})
        assert cache.get_seq_length() == 60
        cache.reset()
        assert_close(feed(model, ids, cache, [40, 1]), oracle(ids))


def test_a_handle_that_nobody_claims_in_the_last_layer_raises_at_the_next_call(cold_dir: Path) -> None:
    model, ids = tiny(), tokens(60)
    with small(model, cold_dir) as cache:
        feed(model, ids[:, :50], cache)
        model.model.layers[1].self_attn.config = copy.deepcopy(model.config)
        model.model.layers[1].self_attn.config._attn_implementation = "eager"
        feed_ignoring_errors(model, ids[:, 50:51], cache)
        with pytest.raises(HandleError):
            feed(model, ids[:, 51:52], cache)


def feed_ignoring_errors(model: Any, ids: torch.Tensor, cache: Any) -> None:
    try:
        feed(model, ids, cache)
    except (RuntimeError, IndexError, ValueError) as error:  # eager attention may meet keys it did not expect
        assert not isinstance(error, tieredkv.TieredKVError)


@pytest.mark.parametrize("start", ["tieredkv", "sdpa"])
def test_the_attention_implementation_is_switched_in_mid_conversation(cold_dir: Path, start: str) -> None:
    model, ids = tiny(), tokens(240)
    names = ["tieredkv", "sdpa", "eager", "tieredkv", "sdpa", "tieredkv"]
    with small(model.config, cold_dir) as cache:
        got = []
        model.set_attn_implementation(start)
        got.append(feed(model, ids[:, :60], cache, [30]))
        for number, name in enumerate(names):
            model.set_attn_implementation(name)
            part = ids[:, 60 + 30 * number : 90 + 30 * number]
            got.append(feed(model, part, cache, [1, 1, 10]))
        assert_close(torch.cat(got, 1), oracle(ids))


def test_the_model_gets_its_implementation_back() -> None:
    model = tiny()
    for name in ("sdpa", "eager"):
        model.set_attn_implementation(name)
        with small(model, None) as cache:
            assert model.config._attn_implementation == "tieredkv"
            feed(model, tokens(20), cache)
        assert model.config._attn_implementation == name
        cache.close()
        assert model.config._attn_implementation == name


def test_a_choice_of_the_user_after_the_cache_was_made_stays() -> None:
    model = tiny()
    with small(model, None):
        model.set_attn_implementation("eager")
    assert model.config._attn_implementation == "eager"


def test_a_config_leaves_the_choice_to_the_user() -> None:
    model = tiny()
    with small(model.config, None) as cache:
        assert model.config._attn_implementation == "sdpa"
        feed(model, tokens(20), cache)
        assert cache.mode == "gather"
        assert cache.fallback_reason is not None and "tieredkv" in cache.fallback_reason


@pytest.mark.parametrize("first_closed", [0, 1])
def test_two_caches_take_turns_on_one_model(cold_dir: Path, first_closed: int) -> None:
    model, ids = tiny(), [tokens(150, seed=1), tokens(150, seed=2)]
    caches = [small(model, cold_dir), small(model, cold_dir)]
    got: list[list[torch.Tensor]] = [[], []]
    for start, stop_at in [(0, 70), (70, 71), (71, 100), (100, 101)]:
        for some, cache, logits in zip(ids, caches, got, strict=True):
            logits.append(feed(model, some[:, start:stop_at], cache))
    caches[first_closed].close()
    other = 1 - first_closed
    got[other].append(feed(model, ids[other][:, 101:], caches[other], [1, 20]))
    caches[other].close()
    assert_close(torch.cat(got[other], 1), oracle(ids[other]))
    assert_close(torch.cat(got[first_closed], 1), oracle(ids[first_closed])[:, :101])
    assert model.config._attn_implementation == "sdpa"


def test_a_forward_without_a_cache_between_two_steps(cold_dir: Path) -> None:
    model, ids = tiny(), tokens(100)
    with small(model, cold_dir) as cache, torch.no_grad():
        feed(model, ids[:, :60], cache)
        other = tokens(30, rows=2, seed=4)
        assert_close(model(other, use_cache=False).logits, oracle(other))
        assert_close(feed(model, ids[:, 60:], cache, [1, 20]), oracle(ids)[:, 60:])


# ---- threads, processes and the end


@pytest.mark.parametrize("kind", ["cpu", "simulated"])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_two_caches_in_two_threads(cold_dir: Path, way: str, shared: bool, kind: str) -> None:
    """Of their own stores, or of one that they share after a deep copy."""
    model, start = tiny(), tokens(90)
    device = SimulatedAccelerator(max_delay_seconds=0.001) if kind == "simulated" else None
    first = small(of(model, way), cold_dir, device=device)
    feed(model, start, first)
    second = copy.deepcopy(first) if shared else small(model.config, cold_dir)
    if not shared:
        feed(model, start, second)
    results: dict[int, torch.Tensor] = {}
    failures: list[BaseException] = []

    def work(number: int, cache: tieredkv.TieredCache) -> None:
        try:
            results[number] = feed(model, tokens(120, seed=30 + number), cache, [1] * 60 + [20])
        except BaseException as failure:
            failures.append(failure)

    workers = [threading.Thread(target=work, args=pair) for pair in enumerate((first, second))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures, failures[0]
    for number, logits in results.items():
        wanted = oracle(torch.cat([start, tokens(120, seed=30 + number)], 1))[:, 90:]
        assert_close(logits, wanted, f"thread {number}")
    audit(first, second)
    first.close()
    second.close()


def test_a_cache_that_is_dropped_takes_its_threads_and_its_folder_along(cold_dir: Path) -> None:
    model, before = tiny(), threads()
    cache = small(model.config, cold_dir)
    feed(model, tokens(300), cache)
    assert threads() - before and list(cold_dir.iterdir())
    gc.disable()
    try:
        del cache
        assert eventually(lambda: not list(cold_dir.iterdir())), "not without the cycle collector"
        assert eventually(lambda: threads() <= before)
    finally:
        gc.enable()


@pytest.mark.parametrize("use", ["update", "crop", "reset", "reorder", "demote", "promote", "deepcopy", "pickle"])
def test_a_closed_cache_refuses(cold_dir: Path, use: str) -> None:
    model = tiny()
    cache = small(model.config, cold_dir)
    feed(model, tokens(40), cache)
    cache.close()
    cache.close()
    uses: dict[str, Callable[[], object]] = {
        "update": lambda: feed(model, tokens(1), cache),
        "crop": lambda: cache.crop(-1),
        "reset": cache.reset,
        "reorder": lambda: cache.reorder_cache(torch.tensor([0])),
        "demote": cache.demote,
        "promote": cache.promote,
        "deepcopy": lambda: copy.deepcopy(cache),
        "pickle": lambda: pickle.dumps(cache),
    }
    with pytest.raises(ClosedError):
        uses[use]()
    assert repr(cache)


def test_closing_frees_memory_and_files(cold_dir: Path) -> None:
    model, before = tiny(), threads()
    with small(model, cold_dir) as cache:
        feed(model, tokens(300), cache)
        pool = weakref.ref(store_of(cache).hot.planes[0][0])
    assert threads() <= before
    assert not list(cold_dir.iterdir())
    assert pool() is None


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_is_refused_and_the_parent_goes_on(cold_dir: Path) -> None:
    model, ids = tiny(), tokens(150)
    with small(model, cold_dir) as cache:
        feed(model, ids[:, :120], cache)
        child = os.fork()
        if not child:
            code = 1
            try:
                cache.update(torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8), 0)
            except ClosedError:
                code = 0
            finally:
                del cache
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert_close(feed(model, ids[:, 120:], cache, [1]), oracle(ids)[:, 120:])


@pytest.mark.parametrize("way", WAYS)
def test_a_cache_is_used_again_after_reset(cold_dir: Path, way: str) -> None:
    model = tiny()
    with small(of(model, way), cold_dir) as cache:
        for seed in range(4):
            ids = tokens(60 + 70 * seed, rows=1 + seed % 3, seed=seed)
            if seed % 3 == 2 and way == "gather":
                cache.reset()
            assert_close(feed(model, ids, cache, [40, 1]), oracle(ids), f"round {seed}")
            cache.reset()
            assert cache.get_seq_length() == 0
            assert cache.block_table() == []
            audit(cache)


# ---- lossy codecs


@pytest.mark.parametrize(
    ("codec", "way"), [("fp8", "blocks"), ("fp8", "gather"), ("int8", "blocks"), ("int4", "gather")]
)
def test_lossy_is_deterministic(cold_dir: Path, codec: str, way: str) -> None:
    """Which copies finish first differs from run to run; not one bit of the logits does."""
    model, ids = tiny(), tokens(200, rows=2)
    runs = []
    for seed, delay in [(1, 0.0), (2, 0.002)]:
        device = SimulatedAccelerator(seed=seed, max_delay_seconds=delay)
        with small(of(model, way), cold_dir, codec=codec, device=device) as cache:
            runs.append(feed(model, ids, cache, [120, *[1] * 20, 30, *[1] * 20]))
            assert device.clocks.races == 0
    assert torch.equal(*runs)
    error = (runs[0] - oracle(ids)).abs().max() / oracle(ids).abs().max()
    assert error > 1e-5, "nothing went through the codec"


def test_lossy_is_deterministic_where_blocks_are_dropped_on_their_way(cold_dir: Path) -> None:
    """What is free decides where new blocks go; slots that a copy still holds must not be missing for a while."""
    model, ids = tiny(), tokens(200)
    eager = tieredkv.CacheSettings(write_down_at=0.0)
    sizes = {"hot": "208 tokens", "warm": "160 tokens", "window": 1, "codec": "fp8"}
    runs, places = [], []
    for latency_seconds in (0.0, 0.05):
        device = SimulatedAccelerator(latency_seconds=latency_seconds)
        with small(model, None, device=device, settings=eager, **sizes) as cache:
            feed(model, ids[:, :70], cache, [66])
            if not latency_seconds:
                device.synchronize()
            cache.crop(-50)
            runs.append(feed(model, ids[:, 20:], cache, [130, *[1] * 10, 20]))
            places.append(locations(cache))
    assert places[0] == places[1]
    assert torch.equal(*runs)


@pytest.mark.parametrize("codec", ["fp8", "int8"])
def test_lossy_keys_and_values_are_near_the_exact_ones(cold_dir: Path, codec: str) -> None:
    model, ids = tiny(), tokens(150)
    exact = DynamicCache(config=model.config)
    with small(model.config, cold_dir, codec=codec) as cache:
        for some in (cache, exact):
            feed(model, ids, some, [100, 1, 1])
        pairs = zip(cache.gather_layer(0) or (), (exact.layers[0].keys, exact.layers[0].values), strict=True)
        for got, wanted in pairs:
            assert 0 < difference(got, wanted) <= {"fp8": 0.04, "int8": 0.01}[codec]
