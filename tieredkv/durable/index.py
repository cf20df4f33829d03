"""Which block lies in which file, in memory, and which file goes first when room is needed.

What is evicted is a file. Its blocks follow each other, and the file that holds the block before them is its parent,
so that a policy that lets leaves go before roots keeps every block reachable. Two files may hold one block, when two
processes published it at once; the first one known serves, and the other one takes its place when it goes.

Not safe across threads: the owner calls it under its lock.

Imports: eviction, durable.format.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tieredkv.durable.format import StoredFile
from tieredkv.eviction import EvictionPolicy


class Index:
    """Files and their blocks.

    Args:
        policy: an empty policy; its keys are file names.
    """

    def __init__(self, policy: EvictionPolicy[Any]) -> None:
        self.files: dict[str, StoredFile] = {}
        self.file_bytes = 0
        self._policy = policy
        self._blocks: dict[str, StoredFile] = {}
        self._spares: dict[str, list[StoredFile]] = {}

    @property
    def blocks(self) -> int:
        """Different blocks in all files."""
        return len(self._blocks)

    def holder(self, hash: str) -> StoredFile | None:
        """The file that holds a block."""
        return self._blocks.get(hash)

    def leading(self, hashes: Sequence[str]) -> int:
        """How many of the first hashes are present without a gap."""
        return next((n for n, hash in enumerate(hashes) if hash not in self._blocks), len(hashes))

    def add(self, files: Iterable[StoredFile]) -> None:
        """Take in files that are whole; the later a file comes, the later it was used."""
        new = [file for file in files if file.name not in self.files]
        waiting = {hash: file for file in new for hash in file.hashes}
        for file in new:
            path: dict[StoredFile, None] = {}
            above: StoredFile | None = file
            while above is not None and above.name not in self.files and above not in path:
                path[above] = None
                above = waiting.get(above.parent)
            for one in reversed(path):  # parents first: the policy is told who they are
                self._add(one)

    def forget(self, name: str) -> StoredFile | None:
        """A file has gone, evicted or otherwise."""
        file = self.files.pop(name, None)
        if file is None:
            return None
        self.file_bytes -= file.file_bytes
        for hash in file.hashes:
            spares = self._spares.get(hash, [])
            if self._blocks[hash] is not file:
                spares.remove(file)
            elif spares:
                self._blocks[hash] = spares.pop(0)
            else:
                del self._blocks[hash]
            if not spares:
                self._spares.pop(hash, None)
        self._policy.remove(name)
        return file

    def touch(self, files: Sequence[StoredFile]) -> None:
        """A path of files was used, given from its first to its last."""
        for file in reversed(files):
            if file.name in self.files:
                self._policy.touch(file.name)

    def victim(self, kept: set[str]) -> StoredFile | None:
        """The file to let go next, none of the names in `kept`; it stays until `forget`."""
        name = self._policy.victim(kept.__contains__)
        return None if name is None else self.files[name]

    def _add(self, file: StoredFile) -> None:
        self.files[file.name] = file
        self.file_bytes += file.file_bytes
        for hash in file.hashes:
            if self._blocks.setdefault(hash, file) is not file:
                self._spares.setdefault(hash, []).append(file)
        parent = self._blocks.get(file.parent)
        self._policy.insert(file.name, None if parent is None or parent is file else parent.name)
