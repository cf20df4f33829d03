"""Statistics: what is counted, in which phase and direction, and that a snapshot is plain data."""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path

import pytest
from support import DIM, at_rest, feed, generate, small, tiny, tokens

import tieredkv
from tieredkv.block import Block
from tieredkv.counters import Counters
from tieredkv.device import SimulatedAccelerator
from tieredkv.stats import MoveStats

BLOCK, LAYERS = 16, 2
BLOCK_BYTES = BLOCK * 2 * 2 * 2 * DIM * 4  # tokens, layers, K and V, heads, dim, fp32


def moved(counters: Counters, source: str, target: str, ids: list[int], total_bytes: int, seconds: float) -> None:
    blocks = [Block(number) for number in ids]
    reason = "stream" if target == "hot" else "window"
    counters.moved(source, target, blocks, total_bytes=total_bytes, seconds=seconds, reason=reason)


def test_moves_are_counted_per_direction() -> None:
    counters = Counters(log_moves=True)
    moved(counters, "hot", "warm", [1, 2], 100, 0.5)
    moved(counters, "hot", "warm", [3], 50, 0.25)
    moved(counters, "cold", "hot", [3], 50, 0.1)
    assert counters.moves() == {"hot_to_warm": MoveStats(150, 3, 0.75), "cold_to_hot": MoveStats(50, 1, 0.1)}
    assert counters.moves()["hot_to_warm"].bytes_per_second == 200
    assert MoveStats().bytes_per_second == 0
    assert counters.log is not None
    assert [(r.block, r.source, r.target, r.bytes, r.seconds) for r in counters.log] == [
        (1, "hot", "warm", 50, 0.25),
        (2, "hot", "warm", 50, 0.25),
        (3, "hot", "warm", 50, 0.25),
        (3, "cold", "hot", 50, 0.1),
    ]


def test_nothing_is_logged_unasked() -> None:
    counters = Counters(log_moves=False)
    moved(counters, "hot", "warm", [1], 100, 0.5)
    assert counters.log is None


def test_phases_are_apart() -> None:
    counters = Counters(log_moves=False)
    counters.begin_forward(30, rows=2)
    moved(counters, "hot", "warm", [1], 100, 0.5)
    counters.stalled(0.2)
    counters.begin_forward(1, rows=2)
    moved(counters, "warm", "hot", [1], 40, 0.3)
    counters.moved("warm", "hot", [Block(1)], total_bytes=7, seconds=0.1, reason="request")  # nobody attended it
    prefill, decode = counters.phases()
    assert (prefill.forwards, prefill.tokens, prefill.written_bytes, prefill.streamed_bytes) == (1, 60, 100, 0)
    assert (decode.forwards, decode.tokens, decode.written_bytes, decode.streamed_bytes) == (1, 2, 0, 40)
    assert (prefill.stall_seconds, decode.stall_seconds, decode.transfer_seconds) == (0.2, 0.0, 0.3)


def test_counting_from_several_threads_loses_nothing() -> None:
    counters = Counters(log_moves=True)

    def count() -> None:
        for _ in range(500):
            moved(counters, "hot", "warm", [1], 3, 0.0)
            counters.verified(2)
            counters.failed(checksum=1, retries=1, tier=1)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters.moves()["hot_to_warm"] == MoveStats(6000, 2000, 0.0)
    assert counters.verified_blocks == 4000
    assert counters.checksum_failures == counters.retries == counters.tier_failures == 2000


def test_an_empty_cache_has_statistics() -> None:
    stats = small(tiny().config, None).stats()
    assert (stats.tokens, stats.rows, stats.moves) == (0, 0, {})
    assert stats.hot.budget_bytes == 0
    assert stats.overlap_efficiency == 1.0
    json.loads(stats.to_json())


@pytest.mark.parametrize("way", ["blocks", "gather"])
def test_a_conversation_in_three_tiers(cold_dir: Path, way: str) -> None:
    model = tiny()
    with small(model if way == "blocks" else model.config, cold_dir) as cache:
        feed(model, tokens(200, rows=2), cache, [150, *[1] * 10])
        stats = at_rest(cache).stats()
        assert (stats.mode, stats.tokens, stats.rows, stats.block_size) == (way, 200, 2, BLOCK)
        assert (stats.window_tokens, stats.codec) == (16, "raw")
        assert (stats.fallback_reason is None) == (way == "blocks")
        assert (stats.prefill.forwards, stats.prefill.tokens) == (2, 2 * 190)
        assert (stats.decode.forwards, stats.decode.tokens) == (10, 2 * 10)
        assert stats.verified_blocks > 0
        assert stats.checksum_failures == stats.retries == stats.tier_failures == 0
        assert stats.position_exempt == 0
        assert stats.other_layers_bytes == 0
        assert (stats.gather_peak_bytes > 0) == (way == "gather")
        for tier in (stats.hot, stats.warm, stats.cold):
            assert 0 < tier.used_bytes <= tier.peak_bytes <= tier.reserved_bytes
            assert 0 < tier.blocks <= tier.peak_blocks
        for tier in (stats.hot, stats.warm):
            assert tier.budget_bytes is not None and tier.reserved_bytes <= tier.budget_bytes
            assert tier.hits > 0
        assert stats.cold.budget_bytes is None
        assert stats.warm.used_bytes == stats.warm.blocks * BLOCK_BYTES
        down = stats.moves["hot_to_warm"].bytes + stats.moves["hot_to_cold"].bytes
        assert down == stats.prefill.written_bytes + stats.decode.written_bytes
        assert down == (stats.warm.blocks + stats.cold.blocks) * BLOCK_BYTES
        assert stats.moves["hot_to_cold"].blocks == stats.cold.blocks
        up = sum(move.bytes for name, move in stats.moves.items() if name.endswith("_to_hot"))
        assert up == stats.prefill.streamed_bytes + stats.decode.streamed_bytes
        assert stats.transfer_seconds == pytest.approx(sum(move.seconds for move in stats.moves.values()))
        assert stats.stall_seconds == stats.prefill.stall_seconds + stats.decode.stall_seconds
        assert 0.0 <= stats.overlap_efficiency <= 1.0


def test_streaming_over_a_slow_link_shows_as_a_stall(cold_dir: Path) -> None:
    model = tiny()
    device = SimulatedAccelerator(latency_seconds=0.003)
    with small(model, cold_dir, device=device) as cache:
        feed(model, tokens(160), cache, [150, *[1] * 8])
        stats = cache.stats()
        assert stats.decode.stall_seconds > 0.003
        assert stats.decode.streamed_bytes > 0


def test_hits_are_blocks_in_the_tier_that_attention_found_them_in(cold_dir: Path) -> None:
    """150 tokens: 10 blocks; each decode step attends every block of both layers once."""
    model = tiny()
    with small(model, cold_dir) as cache:
        feed(model, tokens(150), cache)
        before = cache.stats()
        feed(model, tokens(4, seed=2), cache, [1, 1, 1])
        after = cache.stats()
        found = {r: getattr(after, r).hits - getattr(before, r).hits for r in ("hot", "warm", "cold")}
        assert sum(found.values()) == 4 * 10 * LAYERS
        assert min(found.values()) > 0


def test_other_layers_are_reported(cold_dir: Path) -> None:
    model = tiny("gemma3")
    with small(model, cold_dir) as cache:
        feed(model, tokens(40), cache, [30])
        assert cache.stats().other_layers_bytes >= 7 * 2 * 2 * 8 * 4


@pytest.mark.parametrize("verify", ["always", "first", "off"])
def test_verification_is_counted(cold_dir: Path, verify: tieredkv.config.Verify) -> None:
    model = tiny()
    counts = []
    with small(model, cold_dir, verify=verify) as cache:
        for _ in range(3):
            feed(model, tokens(150 if not counts else 1), cache)
            cache.crop(0)  # ends the forward, and so waits for what was written straight down
            counts.append(cache.stats().verified_blocks)
    if verify == "off":
        assert counts == [0, 0, 0]
    elif verify == "first":
        assert 0 < counts[0] <= counts[1] == counts[2]
    else:
        assert 0 < counts[0] < counts[1] < counts[2]


def test_a_snapshot_is_frozen_and_plain(cold_dir: Path) -> None:
    model = tiny()
    with small(model, cold_dir) as cache:
        generate(model, tokens(100), cache, 5)
        stats = cache.stats()
        with pytest.raises(dataclasses.FrozenInstanceError):
            stats.tokens = 5  # type: ignore[misc]
        copied = json.loads(stats.to_json())
        assert copied == json.loads(json.dumps(dataclasses.asdict(stats)))
        assert copied["hot"]["budget_bytes"] == stats.hot.budget_bytes
        assert copied["moves"]["hot_to_warm"]["bytes"] == stats.moves["hot_to_warm"].bytes
        tokens_then = stats.tokens
        feed(model, tokens(1), cache)
        assert stats.tokens == tokens_then


def test_the_move_log(cold_dir: Path) -> None:
    model = tiny()
    with small(model, cold_dir, settings=tieredkv.CacheSettings(log_moves=True)) as cache:
        feed(model, tokens(150), cache, [100, 1, 1])
        log = at_rest(cache).move_log()
        assert {record.source for record in log} >= {"hot", "cold"}
        total = sum(record.bytes for record in log)
        assert total == sum(move.bytes for move in cache.stats().moves.values())
        assert all(record.seconds >= 0 and record.reason for record in log)
    with small(model, cold_dir) as cache:
        feed(model, tokens(150), cache)
        assert cache.move_log() == []
