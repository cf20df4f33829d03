"""What counts in the cap is seen once at least, whatever another process renames while the folders are looked at."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tieredkv.durable import folder
from tieredkv.durable.folder import ROOT, Census, DurableFolder, quarantine

NAMES = ("0a", "ff")
"""Beginnings of names whose folders the file system may list before that of temporary files, or after it."""


class Meanwhile:
    """Does something once, at the n-th time that a folder is looked at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int, work: Callable[[], object]) -> None:
        self.looks, self._at, self._work = 0, at, work
        for name in ("_listed", "_subfolders"):
            self._watch(monkeypatch, name, getattr(folder, name))

    def _watch(self, monkeypatch: pytest.MonkeyPatch, name: str, real: Callable[[Any], Any]) -> None:
        def looked(path: Any) -> list[Any]:
            found = list(real(path))
            self.looks += 1
            if self.looks == self._at:
                self._work()
            return found

        monkeypatch.setattr(folder, name, looked)


@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize("beginning", NAMES)
@pytest.mark.parametrize("what", ["finished", "set aside"])
def test_a_file_that_is_renamed_meanwhile_is_counted(
    cold_dir: Path, monkeypatch: pytest.MonkeyPatch, what: str, beginning: str, is_new: bool
) -> None:
    looks, at = 1, 0
    while at < looks:
        at += 1
        directory = cold_dir / f"{what} {at}"
        writer, name = DurableFolder(directory, "model"), f"{beginning}block.safetensors"
        writer.make()
        for other in () if is_new else NAMES:
            writer.path(other).parent.mkdir()
        path, descriptor = writer.begin(4096)
        rename: Callable[[], Any] = partial(writer.finish, path, descriptor, name)
        if what == "set aside":
            rename = partial(quarantine, writer.root, rename())
        with monkeypatch.context() as patch:
            meanwhile, census = Meanwhile(patch, at, rename), Census(directory / ROOT)
            census.refresh()
        looks = meanwhile.looks
        assert sum(seen.file_bytes for seen in census.files()) >= 4096, f"renamed at look {at} of {looks}"
        census.refresh()
        assert sum(seen.file_bytes for seen in census.files()) == 4096
    assert looks > 3
