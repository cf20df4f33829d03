"""Private folders: locked while their owner lives, swept when it is gone, whatever the order of events."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tieredkv.block import Plane
from tieredkv.errors import ColdTierError
from tieredkv.tiers import ColdTier, cold_folder
from tieredkv.tiers.cold_folder import LOCK_NAME, SpillFolder

REPOSITORY = Path(__file__).parents[2]

OWNER = """
import gc, os, sys, warnings
import torch
from tieredkv.block import Plane
from tieredkv.errors import ClosedError
from tieredkv.tiers import ColdTier
warnings.simplefilter("ignore")
layers = [(Plane("k", torch.uint8, 1, (16, 1)),)]
tier = ColdTier(sys.argv[1], layers, block_size=16, codec="raw", fingerprint="m")
rows = torch.full((1, 16), 7, dtype=torch.uint8)
slot = tier.slots.allocate()
tier.write_rows(0, [slot], rows)
child = os.fork()
if child == 0:
    try:
        tier.write_rows(0, [slot], rows)
        os._exit(1)
    except ClosedError:
        pass
    tier.close()
    del tier
    gc.collect()
    sys.exit(42)  # runs finalizers at exit
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
assert tier.read_rows(0, [slot]).tolist() == rows.tolist()
assert tier.folder.is_dir()
print(tier.folder, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("end", ["killed", "exits"])
def test_folders_of_the_living_stay_and_of_the_dead_go(cold_dir: Path, end: str) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(cold_dir)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    with owner:
        assert owner.stdin is not None
        assert owner.stdout is not None
        folder = Path(owner.stdout.readline().strip())
        assert folder.parent == cold_dir
        living = SpillFolder(cold_dir)
        assert living.swept == 0
        assert folder.is_dir()
        living.remove()
        if end == "killed":
            owner.send_signal(signal.SIGKILL)
        else:
            owner.stdin.close()
        owner.wait(timeout=60)
    assert folder.is_dir() == (end == "killed")
    after = SpillFolder(cold_dir)
    assert after.swept == (end == "killed")
    assert list(cold_dir.iterdir()) == [after.path]
    after.remove()


def test_two_in_one_process_leave_each_other_alone(cold_dir: Path) -> None:
    first, second = SpillFolder(cold_dir), SpillFolder(cold_dir)
    assert (first.swept, second.swept) == (0, 0)
    second.remove()
    assert list(cold_dir.iterdir()) == [first.path]
    first.remove()
    first.remove()
    assert list(cold_dir.iterdir()) == []


def dead_folder(parent: Path, name: str = "spill-1-0123456789abcdef") -> Path:
    folder = parent / name
    (folder / "0000").mkdir(parents=True)
    (folder / "0000" / "00000000.safetensors").write_bytes(b"x")
    (folder / LOCK_NAME).touch()
    return folder


def test_what_a_sweep_that_died_left_is_swept(cold_dir: Path) -> None:
    dead_folder(cold_dir)
    (cold_dir / "spill-2-0123456789abcdef").mkdir()
    made = SpillFolder(cold_dir)
    assert made.swept == 2
    assert list(cold_dir.iterdir()) == [made.path]
    made.remove()


def test_what_is_not_ours_is_not_swept(cold_dir: Path, tmp_path: Path) -> None:
    elsewhere = dead_folder(tmp_path / "elsewhere", "data")
    cold_dir.mkdir()
    kept = [
        dead_folder(cold_dir, "spill-1-notours"),
        dead_folder(cold_dir, "my-spill-1-0123456789abcdef"),
        cold_dir / "spill-1-0000000000000000",  # a link
        cold_dir / "spill-1-1111111111111111",  # a file
    ]
    kept[2].symlink_to(elsewhere)
    kept[3].touch()
    unlocked = cold_dir / "spill-1-2222222222222222"  # being made: a folder with files has a lock first
    unlocked.mkdir()
    (unlocked / "something").touch()
    made = SpillFolder(cold_dir)
    assert made.swept == 0
    assert all(path.exists() for path in [*kept, unlocked, elsewhere / LOCK_NAME])
    made.remove()


def test_links_in_a_dead_folder_are_not_followed(cold_dir: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    (dead_folder(cold_dir) / "link").symlink_to(outside)
    made = SpillFolder(cold_dir)
    assert made.swept == 1
    assert (outside / "kept").exists()
    made.remove()


@pytest.mark.parametrize("moment", ["before the lock file", "before the lock", "while the sweeper removes"])
def test_a_folder_swept_while_it_is_made_is_made_again(
    cold_dir: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    swept: list[int] = []
    sweepers: list[int] = []
    real_open, real_lock = os.open, cold_folder.try_lock

    def sweep() -> None:
        swept.append(1)
        monkeypatch.setattr(os, "open", real_open)
        monkeypatch.setattr(cold_folder, "try_lock", real_lock)
        assert SpillFolder(cold_dir).swept == 1

    def sweep_then_open(path: Path, flags: int, mode: int = 0o777) -> int:
        if not swept and flags & os.O_CREAT:
            sweep()
        return real_open(path, flags, mode)

    def sweep_then_lock(descriptor: int) -> bool:
        if moment == "before the lock":
            sweep()
        else:  # the sweeper holds the lock and has not removed the folder yet
            swept.append(1)
            monkeypatch.setattr(cold_folder, "try_lock", real_lock)
            [folder] = cold_dir.iterdir()
            sweepers.append(real_open(folder / LOCK_NAME, os.O_RDWR))
            fcntl.flock(sweepers[0], fcntl.LOCK_EX)
        return real_lock(descriptor)

    if moment == "before the lock file":
        monkeypatch.setattr(os, "open", sweep_then_open)
    else:
        monkeypatch.setattr(cold_folder, "try_lock", sweep_then_lock)
    made = SpillFolder(cold_dir)
    assert swept == [1]
    assert (made.path / LOCK_NAME).exists()
    for sweeper in sweepers:
        os.close(sweeper)
    other = SpillFolder(cold_dir)
    assert made.path.is_dir()
    other.remove()
    made.remove()


def test_a_file_system_without_locks_is_refused_and_left_clean(cold_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int, how: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(ColdTierError, match="No locks"):
        SpillFolder(cold_dir)
    assert list(cold_dir.iterdir()) == []


def test_a_folder_that_cannot_be_removed_is_no_error(cold_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = dead_folder(cold_dir)

    def fail(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(cold_folder, "_remove", fail)
        made = SpillFolder(cold_dir)
        assert made.swept == 0
        made.remove()
    assert SpillFolder(cold_dir).swept == 2
    assert not dead.exists()


def test_the_home_directory_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    made = SpillFolder("~/kv")
    assert made.path.parent == tmp_path / "kv"
    made.remove()


def test_the_tier_sweeps(cold_dir: Path) -> None:
    dead = dead_folder(cold_dir)
    layers = [(Plane("k", torch.uint8, 1, (16, 1)),)]
    tier = ColdTier(cold_dir, layers, block_size=16, codec="raw", fingerprint="m")
    assert not dead.exists()
    tier.close()
