"""The system forgets what it holds of files, where it can, and it is noticed where it does not."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest

from benchmarks import page_cache

MEMORY = Path("/dev/shm")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux alone tells, and forgets on request")


def written(folder: Path) -> Path:
    """A file that its system holds, and whose last page is not full."""
    file = folder / "data"
    file.write_bytes(os.urandom(2**20 + 100))
    return file


def test_files_on_a_disk_are_dropped(tmp_path: Path) -> None:
    if page_cache.file_system(tmp_path) in {"tmpfs", "ramfs"}:
        pytest.skip("temporary files lie in memory")
    file = written(tmp_path)
    assert page_cache.held_share([file]) == 1
    page_cache.drop([file])
    assert page_cache.held_share([file]) == 0
    with open(file, "rb", buffering=0) as raw:
        raw.read(1)
    assert 0 < page_cache.held_share([file]) < 1


def test_files_in_memory_are_not() -> None:
    if not MEMORY.is_dir() or page_cache.file_system(MEMORY) != "tmpfs":
        pytest.skip("no file system in memory here")
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        file = written(Path(folder))
        page_cache.drop([file])
        assert page_cache.held_share([file]) == 1


def test_no_file_and_an_empty_one_hold_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    page_cache.drop([tmp_path / "empty"])
    assert page_cache.held_share([tmp_path / "empty"]) == page_cache.held_share([]) == 0
