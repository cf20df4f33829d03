"""Several processes on one directory, and processes that are killed in the middle of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from durable_support import ONE_FILE_BYTES, chain, disk_bytes, hashes, holds, opened, publish

from tieredkv.durable.folder import locked

HERE = Path(__file__).parent


@pytest.mark.parametrize("runs", [pytest.param(10), pytest.param(200, marks=pytest.mark.slow)])
def test_killed_writers_leave_whole_blocks_only_and_two_share_a_directory(memory_dir: Path, runs: int) -> None:
    done = subprocess.run(
        [sys.executable, HERE / "writers.py", memory_dir, "1", str(runs)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *killed, shared = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(killed) == runs
    assert [run for run in killed if run["wrong"]] == []
    # With a cap, what was durable may have made room for what came after it.
    uncapped = [run for run in killed if not run["capped"]]
    reported = sum(run["reported"] for run in uncapped)
    assert reported > runs and sum(run["found"] for run in uncapped) >= 0.99 * reported
    assert sum(run["ended"] == "killed" for run in killed) >= runs // 5  # the others were done before the kill came
    assert shared == {"codes": [0, 0], "places": ["published"]}


def test_what_another_process_publishes_is_seen_without_reopening(cold_dir: Path) -> None:
    reader, writer = opened(cold_dir), opened(cold_dir)
    for number in range(5):
        records = chain(str(number), 1 + number)
        assert reader.find(hashes(records)) == 0
        publish(writer, records)
        assert reader.find(hashes(records)) == len(records) and holds(reader, records)


def test_what_another_process_evicts_is_a_miss_and_can_come_back(cold_dir: Path) -> None:
    reader, writer = opened(cold_dir), opened(cold_dir, cap=2 * ONE_FILE_BYTES)
    records = chain("a", 2)
    publish(writer, records)
    assert reader.find(hashes(records)) == 2
    for name in "bc":
        publish(writer, chain(name, 1))
    assert reader.find(hashes(records)) == 0
    publish(writer, records)
    assert reader.find(hashes(records)) == 2 and holds(reader, records)


def test_looking_for_what_is_nowhere_costs_one_look_at_the_disk(
    cold_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tieredkv.durable.folder._SETTLE_SECONDS", 0.0)
    store = opened(cold_dir)
    publish(store, chain("a", 3))
    store.find(hashes(chain("b", 1)))
    store.find(hashes(chain("b", 1)))
    looks: list[object] = []
    real = os.stat
    with monkeypatch.context() as patch:  # no longer: folders are removed when a test is over
        patch.setattr(os, "stat", lambda path, *args, **kwargs: looks.append(path) or real(path, *args, **kwargs))
        patch.setattr(os, "scandir", lambda path: pytest.fail(f"{path} was listed"))
        assert store.find(hashes(chain("b", 1))) == 0
    assert len(looks) == 1


def test_a_file_being_written_is_seen_by_nobody_and_left_alone(cold_dir: Path) -> None:
    writer, records = opened(cold_dir), chain("a", 2)
    looked: list[int] = []

    def rows(i: int, layer: int) -> Any:
        from durable_support import row

        other = opened(cold_dir)  # it sweeps what dead writers left
        looked.append(other.find(hashes(records)))
        return row(records[i].hash, layer)

    assert writer.publish(records, rows) == 2
    assert looked and not any(looked)
    assert opened(cold_dir).find(hashes(records)) == 2


@pytest.mark.parametrize("settle_seconds", [0.0, 2.0])
def test_what_one_sets_aside_another_can_publish_again(
    cold_dir: Path, monkeypatch: pytest.MonkeyPatch, settle_seconds: float
) -> None:
    """Also when nothing but the missing file shows that it went."""
    monkeypatch.setattr("tieredkv.durable.folder._SETTLE_SECONDS", settle_seconds)
    one, two, records = opened(cold_dir), opened(cold_dir), chain("a", 2)
    publish(one, records)
    assert one.find(hashes(records)) == two.find(hashes(records)) == 2
    one.set_aside(records[0].hash, "test")
    assert publish(two, records) == 2  # under the same name
    assert one.find(hashes(records)) == 2 and holds(one, records)


def test_one_process_at_a_time_makes_room(cold_dir: Path) -> None:
    store, reader, records = opened(cold_dir), opened(cold_dir), chain("a", 2)
    publish(store, chain("b", 1))
    publishing = threading.Thread(target=publish, args=(store, records))
    with locked(cold_dir / "durable"):
        publishing.start()
        publishing.join(0.2)
        assert publishing.is_alive() and not list(cold_dir.glob("durable/*/tmp/*"))
        assert reader.find(hashes(chain("b", 1))) == 1  # who only reads does not wait
    publishing.join(30)
    assert store.find(hashes(records)) == 2


def test_what_another_process_evicted_makes_no_room_a_second_time(cold_dir: Path) -> None:
    cap = ONE_FILE_BYTES
    one, two = opened(cold_dir, cap=cap), opened(cold_dir, cap=cap)
    for store, name in ((one, "a"), (two, "b"), (one, "c"), (two, "d"), (one, "a")):
        assert publish(store, chain(name, 1)) == 1
        assert disk_bytes(cold_dir) == cap
    for view in (one, two):
        assert view.find(hashes(chain("nowhere", 1))) == 0
        assert view.stats().blocks == 1
