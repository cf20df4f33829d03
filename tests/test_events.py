"""The event log: what is written for each move, in which order, as JSON lines and as a Chrome trace; free when off."""

from __future__ import annotations

import json
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from support import at_rest, feed, small, tiny, tokens

import tieredkv
from tieredkv.block import Block
from tieredkv.counters import Counters
from tieredkv.errors import ClosedError, ConfigError
from tieredkv.events import trace_events, write_events, write_trace
from tieredkv.stats import MoveRecord

LOGGED = tieredkv.CacheSettings(log_moves=True)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_each_move_is_a_line_with_all_that_is_known(cold_dir: Path, tmp_path: Path) -> None:
    model = tiny()
    before = time.perf_counter()
    with small(model, cold_dir, settings=LOGGED) as cache:
        feed(model, tokens(150), cache, [100, 1, 1])
        at_rest(cache).write_events(tmp_path / "moves.jsonl")
        log, total = cache.move_log(), sum(move.bytes for move in cache.stats().moves.values())
    found = lines(tmp_path / "moves.jsonl")
    assert len(found) == len(log) > 10
    names = {"block", "layer", "source", "target", "bytes", "seconds", "reason", "start_seconds"}
    assert all(set(line) == names for line in found)
    assert sum(line["bytes"] for line in found) == total
    starts = [line["start_seconds"] for line in found]
    assert starts == sorted(starts)
    assert starts[0] >= 0.0 and starts[-1] + found[-1]["seconds"] <= time.perf_counter() - before
    assert {line["layer"] for line in found} >= {0, 1}


def test_the_trace_has_a_track_for_each_direction(cold_dir: Path, tmp_path: Path) -> None:
    model = tiny()
    with small(model, cold_dir, settings=LOGGED) as cache:
        feed(model, tokens(150), cache, [100, 1, 1])
        at_rest(cache).write_trace(tmp_path / "trace.json")
        directions = {name.replace("_", " ") for name in cache.stats().moves}
    events = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert set(tracks.values()) == directions
    slices = [e for e in events if e["ph"] == "X"]
    assert slices and {e["tid"] for e in slices} == set(tracks)
    for event in slices:
        assert tracks[event["tid"]] == f"{event['args']['from']} to {event['args']['to']}"
        assert event["dur"] >= 0 and event["ts"] >= 0 and event["args"]["bytes"] > 0


def test_blocks_that_were_copied_together_stand_side_by_side() -> None:
    counters = Counters(log_moves=True)
    counters.moved(
        *("hot", "warm", [Block(7), Block(8)]),
        total_bytes=64,
        seconds=0.5,
        reason="window",
        started=time.perf_counter(),
    )
    assert counters.log is not None
    first, second = counters.log
    assert (first.block, second.block, first.bytes, first.seconds) == (7, 8, 32, 0.25)
    assert second.start_seconds == pytest.approx(first.start_seconds + 0.25)


def test_a_record_becomes_a_slice_in_microseconds() -> None:
    record = MoveRecord(3, "cold", "hot", 100, 0.002, "stream", layer=1, start_seconds=1.5)
    (event,) = [e for e in trace_events([record]) if e["ph"] == "X"]
    assert (event["name"], event["cat"], event["ts"], event["dur"]) == ("block 3 layer 1", "stream", 1.5e6, 2000.0)
    (event,) = [e for e in trace_events([MoveRecord(3, "hot", "warm", 1, 0.0, "room")]) if e["ph"] == "X"]
    assert event["name"] == "block 3"


def test_files_are_in_order_of_the_start_and_not_of_the_end(tmp_path: Path) -> None:
    records = [MoveRecord(number, "hot", "warm", 1, 0.1, "room", start_seconds=3.0 - number) for number in range(3)]
    write_events(records, tmp_path / "moves.jsonl")
    assert [line["block"] for line in lines(tmp_path / "moves.jsonl")] == [2, 1, 0]
    write_trace(records, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    assert [event["args"]["block"] for event in events if event["ph"] == "X"] == [2, 1, 0]


def test_without_a_log_nothing_is_written_and_it_is_said(tmp_path: Path) -> None:
    cache = small(tiny(), None)
    for write in (cache.write_events, cache.write_trace):
        with pytest.raises(ConfigError, match="log_moves=True"):
            write(tmp_path / "moves")
    assert not (tmp_path / "moves").exists()


def test_an_empty_log_is_an_empty_file(tmp_path: Path) -> None:
    cache = small(tiny(), None, settings=LOGGED)
    cache.write_events(tmp_path / "moves")
    assert (tmp_path / "moves").read_text() == ""
    cache.close()
    with pytest.raises(ClosedError):
        cache.write_events(tmp_path / "moves")


def test_a_log_that_is_off_allocates_nothing_for_a_move() -> None:
    blocks = [Block(number) for number in range(64)]

    def grown(log_moves: bool) -> int:
        counters = Counters(log_moves)

        def move() -> None:
            counters.moved("hot", "warm", blocks, total_bytes=64, seconds=0.1, reason="window", started=0.0)

        move()
        tracemalloc.start()
        for _ in range(200):
            move()
        current, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return current

    assert grown(False) < 2000
    assert grown(True) > 200 * 64 * 50
