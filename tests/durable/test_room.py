"""Caps, floors, retention and eviction, full and read-only disks: fewer blocks, never an exception or half a file."""

from __future__ import annotations

import errno
import logging
import os
import resource
import secrets
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from durable_support import IDENTITY, LAYERS, chain, disk_bytes, files, hashes, holds, opened, publish, quarantined
from durable_support import ONE_FILE_BYTES as ONE
from hypothesis import given, settings
from hypothesis import strategies as st

from tieredkv.config import Size
from tieredkv.durable import DurableSettings, Identity
from tieredkv.errors import ColdTierError, ConfigError

OTHER = Identity("model-2", LAYERS, 16, "raw")


def used_at(path: Path, seconds_ago: float) -> None:
    then = time.time_ns() - int(seconds_ago * 1e9)
    os.utime(path, ns=(then, path.stat().st_mtime_ns))


def written_at(path: Path, seconds_ago: float) -> None:
    then = time.time_ns() - int(seconds_ago * 1e9)
    os.utime(path, ns=(path.stat().st_atime_ns, then))


# ---- the cap


def test_a_cap_of_three_blocks_keeps_the_first_three(cold_dir: Path) -> None:
    """Those that a sequence begins with are of use; dropping them for what follows would leave nothing."""
    store, records = opened(cold_dir, cap=3 * ONE), chain("a", 5)
    assert publish(store, records) == 3
    assert store.find(hashes(records)) == 3 and holds(store, records[:3])
    assert disk_bytes(cold_dir) <= 3 * ONE
    assert store.stats().failures == 1 and store.stats().evicted == 0


@pytest.mark.parametrize("policy", ["lru", "arc", "s3fifo"])
def test_leaves_go_before_roots(cold_dir: Path, policy: str) -> None:
    store, old, new = opened(cold_dir, cap=3 * ONE, policy=policy), chain("a", 3), chain("b", 5)
    publish(store, old)
    for blocks, left in ((1, 2), (2, 1), (3, 0)):
        assert publish(store, new[:blocks]) == blocks
        assert store.find(hashes(old)) == left
        assert disk_bytes(cold_dir) <= 3 * ONE
    assert holds(store, new[:3])
    assert store.stats().evicted == 3 and store.stats().failures == 0


def test_what_is_used_stays(cold_dir: Path) -> None:
    store = opened(cold_dir, cap=4 * ONE, policy="lru")
    used, unused, new = chain("a", 2), chain("b", 2), chain("c", 1)
    publish(store, used)
    publish(store, unused)
    assert store.find(hashes(used)) == 2
    publish(store, new)
    assert (store.find(hashes(used)), store.find(hashes(unused)), store.find(hashes(new))) == (2, 1, 1)


def test_what_was_used_last_is_known_after_a_restart(cold_dir: Path) -> None:
    store = opened(cold_dir, policy="lru")
    for name in "abc":
        publish(store, chain(name, 1))
    by_name = {name: next(p for p in files(cold_dir) if p.name.startswith(chain(name, 1)[0].hash)) for name in "abc"}
    for name, ago in (("a", 7200), ("b", 9000), ("c", 8000)):
        used_at(by_name[name], ago)
    opened(cold_dir).find(hashes(chain("b", 1)))  # reading the headers of the others is no use of them
    fresh = opened(cold_dir, cap=3 * ONE, policy="lru")
    publish(fresh, chain("d", 1))
    assert [fresh.find(hashes(chain(name, 1))) for name in "abcd"] == [1, 1, 0, 1]


def test_a_small_cap_is_shared_by_several_files(cold_dir: Path) -> None:
    """With one file, letting go of anything would let go of everything."""
    cap = 40 * ONE
    publish(opened(cold_dir, cap=cap), chain("a", 40))
    assert len(files(cold_dir)) == 3
    assert all(path.stat().st_size <= cap / 8 for path in files(cold_dir))


def test_a_cap_below_one_block_is_refused_before_anything_is_made(cold_dir: Path) -> None:
    with pytest.raises(ConfigError, match=str(ONE)):
        opened(cold_dir, cap=ONE - 1)
    assert not cold_dir.exists()
    opened(cold_dir, cap=ONE)


def test_a_cap_in_tokens_is_of_this_model() -> None:
    token_bytes = IDENTITY.block_bytes // IDENTITY.block_size
    assert DurableSettings(path="x", cap="320 tokens").cap_bytes(token_bytes) == 20 * IDENTITY.block_bytes
    assert DurableSettings(path="x", cap=Size(bytes_=7)).cap_bytes(token_bytes) == 7
    assert DurableSettings(path="x").cap_bytes(token_bytes) is None


@pytest.mark.parametrize(
    "bad", [{"cap": "many"}, {"free_floor": -1}, {"retention_seconds": 0}, {"deadline_seconds": -1}, {"policy": "x"}]
)
def test_settings_that_cannot_be_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        DurableSettings(path="x", **bad)  # type: ignore[arg-type]


def test_the_cap_counts_what_other_models_and_processes_published(cold_dir: Path) -> None:
    theirs = opened(cold_dir, OTHER)
    publish(theirs, chain("t", 1, identity=OTHER))
    (foreign,) = files(cold_dir)
    one, two = opened(cold_dir, cap=3 * ONE), opened(cold_dir, cap=3 * ONE)
    publish(one, chain("a", 1))
    publish(two, chain("b", 1))
    assert disk_bytes(cold_dir) == 3 * ONE and foreign.exists()
    # Of all of them, what was used longest ago goes.
    used_at(foreign, 7200)
    publish(one, chain("c", 1))
    assert disk_bytes(cold_dir) == 3 * ONE and not foreign.exists()
    publish(two, chain("d", 1))
    assert disk_bytes(cold_dir) == 3 * ONE
    for name in "cd":
        assert one.find(hashes(chain(name, 1))) == two.find(hashes(chain(name, 1))) == 1
    assert theirs.find(hashes(chain("t", 1, identity=OTHER))) == 0


def test_damaged_files_go_first(cold_dir: Path) -> None:
    store = opened(cold_dir, cap=3 * ONE)
    publish(store, chain("a", 1))
    publish(store, chain("b", 1))
    store.set_aside(chain("a", 1)[0].hash, "test")
    publish(store, chain("c", 1))
    assert len(quarantined(cold_dir)) == 1
    publish(store, chain("d", 1))
    assert quarantined(cold_dir) == []
    assert [store.find(hashes(chain(name, 1))) for name in "bcd"] == [1, 1, 1]


@settings(max_examples=25)
@given(
    cap=st.integers(1, 9),
    policy=st.sampled_from(["lru", "arc", "s3fifo"]),
    steps=st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 6), st.booleans()), max_size=12),
)
def test_the_cap_is_hard_and_what_is_found_is_right(
    memory_dir: Path, cap: int, policy: str, steps: list[tuple[str, int, bool]]
) -> None:
    path = memory_dir / secrets.token_hex(8)
    views = [opened(path, cap=cap * ONE, policy=policy) for _ in range(2)]
    for name, blocks, which in steps:
        records, store = chain(name, blocks), views[which]
        durable = publish(store, records)
        assert disk_bytes(path) <= cap * ONE
        assert durable == store.find(hashes(records)) == min(blocks, cap)
        assert holds(store, records[:durable])
        for view in views:
            assert view.find(hashes(records)) == durable
    assert views[0].stats().set_aside == views[1].stats().set_aside == 0


# ---- the floor


def disk_with(free: Callable[[], int]) -> Callable[[object], object]:
    class Disk:
        f_frsize = 1

        @property
        def f_bavail(self) -> int:
            return free()

    return lambda path: Disk()


def test_the_floor_is_kept_by_letting_go(cold_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = 1000 + 3 * ONE + 5
    monkeypatch.setattr(os, "statvfs", disk_with(lambda: whole - disk_bytes(cold_dir)))
    monkeypatch.setattr("tieredkv.durable.writing.MAX_FILE_BLOCKS", 1)
    store = opened(cold_dir, free_floor=1000)
    assert publish(store, chain("a", 5)) == 3
    assert publish(store, chain("b", 2)) == 2
    assert store.find(hashes(chain("a", 5))) == 1
    assert whole - disk_bytes(cold_dir) >= 1000


def test_a_disk_that_others_filled_costs_us_nothing(cold_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When even an empty store would be below the floor, dropping what is there would help nobody."""
    store = opened(cold_dir, free_floor=1000)
    publish(store, chain("a", 3))
    monkeypatch.setattr(os, "statvfs", disk_with(lambda: 0))
    store_with_floor = opened(cold_dir, free_floor="1GiB")
    assert publish(store_with_floor, chain("b", 1)) == 0
    assert store_with_floor.find(hashes(chain("a", 3))) == 3
    assert store_with_floor.stats().failures == 1


def test_nothing_goes_for_what_does_not_fit_in_the_end(cold_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, records, other = opened(cold_dir, free_floor=ONE, cap=20 * ONE), chain("a", 3), chain("b", 1)
    publish(store, records[:2])
    publish(store, other)
    monkeypatch.setattr(os, "statvfs", disk_with(lambda: 0))
    # Two files would have to go: the other one, and one of those that the new one continues.
    assert publish(store, records) == 2
    assert store.find(hashes(other)) == 1
    monkeypatch.setattr(os, "statvfs", disk_with(lambda: ONE))
    assert publish(store, records) == 3
    assert store.find(hashes(other)) == 0


@pytest.mark.parametrize("limit", ["cap", "floor"])
def test_a_file_being_written_has_its_room_already(cold_dir: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    limits = {"cap": ONE * 3 // 2} if limit == "cap" else {"free_floor": 1000}
    if limit == "floor":
        monkeypatch.setattr(os, "statvfs", disk_with(lambda: 1000 + ONE * 3 // 2))
    one, two, records = opened(cold_dir, **limits), opened(cold_dir, **limits), chain("a", 1)
    others: list[int] = []

    def rows(i: int, layer: int) -> torch.Tensor:
        others.append(publish(two, chain("b", 1)))
        return torch.zeros(IDENTITY.row_bytes[layer], dtype=torch.uint8)

    assert one.publish(records, rows) == 1
    assert others == [0, 0]
    assert publish(two, chain("b", 1)) == 1


# ---- retention


def test_what_is_past_its_retention_is_gone(cold_dir: Path) -> None:
    store = opened(cold_dir, retention_seconds=3600)
    for name in "ab":
        publish(store, chain(name, 1))
    old = next(path for path in files(cold_dir) if path.name.startswith(chain("a", 1)[0].hash))
    written_at(old, 3700)
    assert store.find(hashes(chain("a", 1))) == 0 and store.find(hashes(chain("b", 1))) == 1
    publish(store, chain("c", 1))
    assert not old.exists() and len(files(cold_dir)) == 2 and store.stats().evicted == 1
    for path in files(cold_dir):
        written_at(path, 3700)
    assert opened(cold_dir, retention_seconds=3600).find(hashes(chain("b", 1))) == 0
    assert files(cold_dir) == []


def test_using_a_block_does_not_keep_it_longer(cold_dir: Path) -> None:
    store = opened(cold_dir)
    publish(store, chain("a", 1))
    (path,) = files(cold_dir)
    written_at(path, 3700)
    used_at(path, 3700)
    assert opened(cold_dir).find(hashes(chain("a", 1))) == 1
    assert time.time() - path.stat().st_atime < 60
    assert opened(cold_dir, retention_seconds=3600).find(hashes(chain("a", 1))) == 0


@pytest.mark.parametrize("days", [-3000, 3000])
def test_a_clock_set_wrong_is_harmless(cold_dir: Path, monkeypatch: pytest.MonkeyPatch, days: int) -> None:
    """Files from the future are young; those of long ago are used all the same, unless a retention says otherwise."""
    records, later = chain("a", 3), chain("b", 2)
    store = opened(cold_dir, cap=6 * ONE)
    publish(store, records)
    now = time.time_ns() + days * 86400 * 10**9
    monkeypatch.setattr(time, "time_ns", lambda: now)
    for path in cold_dir.rglob("*"):
        if path.is_dir():
            os.utime(path, ns=(now + 10**9, now + 10**9))
    for view in (store, opened(cold_dir, cap=6 * ONE), opened(cold_dir, cap=6 * ONE, retention_seconds=9e9)):
        assert view.find(hashes(records)) == 3 and holds(view, records)
        assert publish(view, later) == 2 and store.find(hashes(later)) == 2
    if days < 0:
        assert opened(cold_dir, retention_seconds=60).find(hashes(records)) == 3


# ---- a disk that refuses


FAILING = ["open", "ftruncate", "pwritev", "fsync", "rename", "mkdir", "statvfs", "unlink"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("call", FAILING)
def test_a_refusal_is_told_once_and_nothing_is_half_there(
    cold_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str, code: int
) -> None:
    store, records, before = opened(cold_dir, cap=8 * ONE), chain("a", 3), chain("b", 3)
    publish(store, before)
    real = getattr(os, call)

    def fail(*args: object, **kwargs: object) -> object:
        reading = call == "open" and not int(str(args[1])) & (os.O_CREAT | os.O_RDWR)
        if reading:
            return real(*args, **kwargs)
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "tieredkv"):
        patch.setattr(os, call, fail)
        durable = [publish(store, records) for _ in range(3)]
        assert store.find(hashes(before)) == 3 and holds(store, before)
    if call in ("unlink", "mkdir"):  # nothing has to go; the folder for these digits may be there
        assert durable[0] in (0, 1, 2, 3)
    else:
        assert durable == [0, 0, 0]
        assert store.stats().failures == 3
        assert sum("not kept" in record.message for record in caplog.records) == 1
    assert publish(store, records) == 3 and holds(store, records)
    fresh = opened(cold_dir, cap=8 * ONE)
    assert fresh.stats().set_aside == 0
    assert fresh.find(hashes(records)) == fresh.find(hashes(before)) == 3
    assert list(cold_dir.glob("durable/*/tmp/*")) == []


def test_a_limit_on_file_sizes_is_a_full_disk(cold_dir: Path) -> None:
    store, records = opened(cold_dir), chain("a", 10)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        assert publish(store, records) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert files(cold_dir) == [] and list(cold_dir.glob("durable/*/tmp/*")) == []
    assert publish(store, records) == 10


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB, where one may be mounted."""
    path = tmp_path / "small"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "none", path], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("a file system cannot be mounted here")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


def test_a_real_full_disk(small_disk: Path) -> None:
    store, records = opened(small_disk), chain("a", 400)
    durable = publish(store, records)
    assert 64 <= durable < 400 and store.stats().failures == 1
    assert store.find(hashes(records)) == durable and holds(store, records[:durable])
    assert list(small_disk.glob("durable/*/tmp/*")) == []
    fresh = opened(small_disk)
    assert fresh.find(hashes(records)) == durable and fresh.stats().set_aside == 0
    # With another sequence, room is made.
    assert publish(fresh, chain("b", 64)) == 64 and fresh.find(hashes(chain("b", 64))) == 64


def test_a_real_remount_read_only(small_disk: Path) -> None:
    store, records = opened(small_disk), chain("a", 3)
    publish(store, records)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    for view in (store, opened(small_disk)):
        assert view.find(hashes(records)) == 3 and holds(view, records)
        assert publish(view, chain("b", 1)) == 0
        view.set_aside(records[2].hash, "test")
        assert view.find(hashes(records)) == 0
        view.close()


def test_an_existing_directory_that_can_only_be_read_serves_reads(
    cold_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    records = chain("a", 3)
    publish(opened(cold_dir), records)
    real = os.open

    def read_only(path: object, flags: int, *args: object, **kwargs: object) -> int:
        if flags & (os.O_RDWR | os.O_WRONLY | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(path, flags, *args, **kwargs)  # type: ignore[arg-type]

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", read_only)
    for call in ("mkdir", "rename", "unlink", "utime"):
        monkeypatch.setattr(os, call, refuse)
    with caplog.at_level(logging.WARNING, "tieredkv"):
        store = opened(cold_dir)
        assert store.find(hashes(records)) == 3 and holds(store, records)
        assert publish(store, chain("a", 4)) == 3
        other = opened(cold_dir, OTHER)
        assert other.find(hashes(records)) == 0 and publish(other, chain("a", 1, identity=OTHER)) == 0
    assert sum("not kept" in record.message for record in caplog.records) == 2


@pytest.mark.parametrize("kind", ["file", "below a file", "dead link"])
def test_a_path_that_is_no_directory_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    if kind == "dead link":
        path.symlink_to(tmp_path / "nowhere" / "x")
        (tmp_path / "nowhere").touch()
    else:
        path.touch()
    with pytest.raises(ColdTierError, match="To change"):
        opened(path / "below" if kind == "below a file" else path)


def test_rows_are_not_asked_for_when_there_is_no_room(cold_dir: Path) -> None:
    store, records = opened(cold_dir, cap=ONE), chain("a", 2)
    asked: list[int] = []

    def rows(i: int, layer: int) -> torch.Tensor:
        asked.append(i)
        return torch.zeros(IDENTITY.row_bytes[layer], dtype=torch.uint8)

    assert store.publish(records, rows) == 1
    assert set(asked) == {0}
