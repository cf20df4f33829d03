"""Findings: each appears with its evidence and only with it, and real runs give those that they should."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import feed, small, store_of, tiny, tokens

from tieredkv.advice import Finding, explain
from tieredkv.counters import Counters
from tieredkv.device import SimulatedAccelerator
from tieredkv.stats import CacheStats, MoveStats, PhaseStats, TierStats

TIER = TierStats(1 << 20, 1 << 19, 1 << 19, 1 << 19, 8, 8, 100)
DECODE = PhaseStats(forwards=101, tokens=101, step_seconds=10.0, timed_forwards=100, attended_blocks=2020)
QUIET = CacheStats(
    mode="blocks",
    fallback_reason=None,
    tokens=500,
    rows=1,
    block_size=128,
    window_tokens=256,
    codec="raw",
    hot=TIER,
    warm=TIER,
    cold=TIER,
    moves={"warm_to_hot": MoveStats(10**9, 100, 1.0)},
    verified_blocks=1000,
    checksum_failures=0,
    retries=0,
    stall_seconds=0.0,
    transfer_seconds=0.0,
    prefill=PhaseStats(forwards=1, tokens=400),
    decode=DECODE,
    gather_peak_bytes=0,
    other_layers_bytes=0,
    tier_failures=0,
    graphs=0,
    pinned_bytes=0,
    position_exempt=0,
    tiered_layers=10,
    block_bytes=10**6,
    unused_bytes=1000,
    graph_cap=16,
)


def test_what_is_slower_without_a_compiler_is_told() -> None:
    found = changed(native_failures=("attention: no C++ compiler", "checksums: no C++ compiler"))["native"]
    assert (found.severity, found.evidence, found.unit) == ("limit", 2, "parts")
    assert "attention: no C++ compiler" in found.text and "CXX" in (found.change or "")
    assert "native" not in changed()


def changed(**changes: Any) -> dict[str, Finding]:
    """Findings by kind, for a quiet run with other figures."""
    return {finding.kind: finding for finding in explain(dataclasses.replace(QUIET, **changes))}


def decode(**changes: Any) -> PhaseStats:
    return dataclasses.replace(DECODE, **changes)


def test_a_quiet_run_is_limited_by_nothing() -> None:
    found = changed()
    assert set(found) == {"nothing", "fragmentation"}
    assert found["nothing"].severity == "note" and found["nothing"].change is None
    assert "0%" in found["nothing"].text


@pytest.mark.parametrize(
    ("kind", "severity", "evidence", "changes"),
    [
        ("stall", "limit", 0.4, {"decode": decode(stall_seconds=4.04, transfer_seconds=8.0)}),
        ("transfer", "limit", 0.8, {"decode": decode(stall_seconds=0.1, transfer_seconds=8.08)}),
        ("stall", "limit", 0.5, {"prefill": decode(stall_seconds=5.05)}),
        ("room", "limit", 0.75, {"decode": decode(written_bytes=100), "moved_bytes": {"room": 75, "window": 25}}),
        ("moves", "limit", 0.4, {"decode": decode(move_wait_seconds=4.04)}),
        ("promotable", "limit", 3, {"decode": decode(streamed_bytes=1000), "promotable_blocks": 3}),
        ("pageable", "limit", 2, {"pin_failures": ("pinning failed: no memory", "again")}),
        ("bandwidth", "limit", 20e6, {"link_bytes_per_second": {"hot": 25e6}}),
        ("link", "note", 0.5, {"link_bytes_per_second": {"warm_to_hot": 2e9}}),
        ("duplicates", "limit", 0.5, {"duplicate_blocks": 5, "compared_blocks": 10}),
        ("checksums", "fault", 3, {"checksum_failures": 3, "retries": 3}),
        ("checksums", "fault", 1, {"retries": 1}),
        ("failures", "fault", 2, {"tier_failures": 2}),
        ("gather", "limit", 77, {"mode": "gather", "fallback_reason": "a bias", "gather_peak_bytes": 77}),
        ("graphs", "note", 3, {"graphs": 3}),
        ("graphs", "limit", 16, {"graphs": 16}),
        ("lossy", "note", 16, {"codec": "int8"}),
        ("lossy", "note", 9, {"beyond": "drop", "dropped_blocks": 9, "sinks": 4}),
        ("waiting", "note", 4, {"waiting_moves": 4}),
    ],
)
def test_each_figure_gives_its_finding(kind: str, severity: str, evidence: float, changes: dict[str, Any]) -> None:
    found = changed(**changes)
    assert set(found) - {"fragmentation", "nothing"} == {kind}
    finding = found[kind]
    assert (finding.severity, finding.evidence) == (severity, pytest.approx(evidence))
    assert ("nothing" in found) == (severity != "limit")
    assert severity != "limit" or finding.change


@pytest.mark.parametrize(
    "changes",
    [
        {"decode": decode(stall_seconds=2.9, transfer_seconds=3.0)},
        {"decode": decode(stall_seconds=9.0, timed_forwards=3)},
        {"decode": decode(written_bytes=100), "moved_bytes": {"room": 40, "window": 60}},
        {"link_bytes_per_second": {"hot": 40e6}},
        {"duplicate_blocks": 3, "compared_blocks": 4},
        {"duplicate_blocks": 1, "compared_blocks": 100},
        {"mode": "gather", "fallback_reason": "not used yet", "tokens": 0},
    ],
)
def test_below_the_threshold_nothing_is_said(changes: dict[str, Any]) -> None:
    assert set(changed(**changes)) <= {"nothing", "fragmentation"}


def test_faults_come_before_limits_and_notes() -> None:
    found = explain(dataclasses.replace(QUIET, tier_failures=1, graphs=16, codec="int8"))
    assert [finding.severity for finding in found] == ["fault", "limit", "note", "note"]


def test_a_lossless_codec_is_advised_against_only_where_it_is_lossy() -> None:
    stalling = {"decode": decode(stall_seconds=5.0)}
    assert "lossy" in str(changed(**stalling)["stall"])
    assert "lossy" not in str(changed(**stalling, codec="int8")["stall"])


def test_an_empty_cache_knows_nothing() -> None:
    (finding,) = small(tiny().config, None).explain()
    assert (finding.kind, finding.evidence) == ("nothing", 0)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Two threads of one busy core wait for each other, and a step takes longer than the slowest link."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_a_run_that_waits_for_its_link_is_told_so(cold_dir: Path) -> None:
    model = tiny()
    with small(model, cold_dir, device=SimulatedAccelerator(latency_seconds=0.01)) as cache:
        feed(model, tokens(160), cache, [150, *[1] * 8])
        found = {finding.kind: finding for finding in cache.explain()}
        assert found["stall"].evidence > 0.3
        assert "hot=" in str(found["stall"].change)
        stats = cache.stats()  # once: copies may be on their way still
        saved = CacheStats.from_dict(json.loads(stats.to_json()))
        assert explain(saved) == explain(stats)
        assert saved == stats


def test_a_run_that_fits_hot_is_limited_by_nothing() -> None:
    model = tiny()
    with small(model, None, hot="400 tokens", warm=0) as cache:
        feed(model, tokens(60), cache, [50, *[1] * 8])
        found = {finding.kind: finding for finding in cache.explain()}
        assert set(found) == {"nothing", "fragmentation"}
        parts = cache.parts()
        assert parts.holder is not None
        unused = 64 - parts.holder.table.rows[0][-1].tokens - 48
        assert found["fragmentation"].evidence == unused * store_of(cache).hot.slot_bytes / 16


def test_rows_with_one_text_are_found(cold_dir: Path) -> None:
    model = tiny()
    with small(model, cold_dir, window=16) as cache:
        feed(model, tokens(200).repeat(3, 1), cache)
        cache.crop(0)
        found = {finding.kind: finding for finding in cache.explain()}
        assert found["duplicates"].evidence == pytest.approx(2 / 3, abs=0.1)
    with small(model, cold_dir, window=16) as cache:
        feed(model, tokens(200, rows=3), cache)
        cache.crop(0)
        assert "duplicates" not in {finding.kind for finding in cache.explain()}


def test_gathering_is_told_with_its_reason(cold_dir: Path) -> None:
    model = tiny()
    with small(model.config, cold_dir) as cache:
        feed(model, tokens(60), cache, [50])
        found = {finding.kind: finding for finding in cache.explain()}
        assert str(cache.fallback_reason) in found["gather"].text


def test_time_between_turns_is_not_a_step() -> None:
    counters = Counters(log_moves=False)
    for new in (30, 1, 1, 30, 1):
        counters.begin_forward(new, rows=1)
    prefill, decode_ = counters.phases()
    assert (prefill.forwards, prefill.timed_forwards) == (2, 2)
    assert (decode_.forwards, decode_.timed_forwards) == (3, 1), "not the last before a prompt, nor the last"
