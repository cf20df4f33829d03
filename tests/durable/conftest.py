"""A folder in memory for tests that sync hundreds of files: what they show does not depend on the disk."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def memory_dir(tmp_path: Path) -> Iterator[Path]:
    """An empty folder in memory, or on disk where there is no such file system."""
    if not Path("/dev/shm").is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tieredkv-test-") as path:
        yield Path(path)
