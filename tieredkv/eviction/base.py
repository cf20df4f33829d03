"""What an eviction policy is: it names which block of a prefix tree to let go next.

A policy knows keys and which key is whose parent, nothing of memory: the owner of the blocks tells it what comes, what
is used and what has gone, and asks it for a victim when it needs room. It never names a key that has children present:
a block is of no use once the block before it is gone, so leaves go before roots.

Imports: errors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from typing import ClassVar, Generic, TypeVar

from tieredkv.errors import ConfigError

Key = TypeVar("Key", bound=Hashable)


def nothing_in_use(key: Hashable) -> bool:
    """No key is in use."""
    return False


class EvictionPolicy(ABC, Generic[Key]):
    """Orders the keys that are present by how soon they should go.

    Not safe across threads: the owner calls it under its own lock. Needs no capacity: what a policy wants to know of
    it, it takes from the number of keys present when a victim is asked for.

    A path of blocks that is used is touched from its last block to its first, and inserted from its first to its last.
    """

    name: ClassVar[str]

    def __init__(self) -> None:
        self._parents: dict[Key, Key | None] = {}
        # Counted for absent parents too: a parent may come after its child, as when blocks fall from one tier to the
        # next leaves first.
        self._children: dict[Key, int] = {}

    def __len__(self) -> int:
        return len(self._parents)

    def __contains__(self, key: object) -> bool:
        return key in self._parents

    def has_children(self, key: Key) -> bool:
        """Whether a key that is present named this one as its parent."""
        return key in self._children

    def insert(self, key: Key, parent: Key | None = None) -> None:
        """A block came; it counts as used now.

        Args:
            key: the block.
            parent: the block before it in its sequence, present or not; None for the first.

        Raises:
            ConfigError: the key is present, or is its own parent.
        """
        if key in self._parents or key == parent:
            raise ConfigError(
                "A key is inserted once.",
                wanted="a key that is absent, and another key as its parent",
                got=f"{key!r} with parent {parent!r}",
                change="touch(key) what is present, remove(key) what has gone",
            )
        self._parents[key] = parent
        if parent is not None:
            self._children[parent] = self._children.get(parent, 0) + 1
        self._on_insert(key)

    def touch(self, key: Key) -> None:
        """A block that is present was used.

        Raises:
            ConfigError: the key is absent.
        """
        self._check_present(key)
        self._on_touch(key)

    def remove(self, key: Key) -> None:
        """A block has gone, evicted or for another reason. A policy may remember the key, to know it if it returns.

        Raises:
            ConfigError: the key is absent.
        """
        self._check_present(key)
        self._on_remove(key)
        parent = self._parents.pop(key)
        if parent is not None:
            self._children[parent] -= 1
            if not self._children[parent]:
                del self._children[parent]
                if parent in self._parents:
                    self._on_bared(parent)

    @abstractmethod
    def victim(self, in_use: Callable[[Key], bool] = nothing_in_use) -> Key | None:
        """The key to let go next: present, without children, and not in use. It stays present until `remove`.

        Args:
            in_use: whether a key must stay for now; asked of few keys.

        Returns:
            None when every key that is present has children or is in use.
        """

    @abstractmethod
    def _on_insert(self, key: Key) -> None:
        """`key` is present now."""

    @abstractmethod
    def _on_touch(self, key: Key) -> None:
        """`key`, present, was used."""

    @abstractmethod
    def _on_remove(self, key: Key) -> None:
        """`key` is about to go; it is present still."""

    @abstractmethod
    def _on_bared(self, key: Key) -> None:
        """`key`, present, lost its last child: it is a candidate again."""

    def _check_present(self, key: Key) -> None:
        if key not in self._parents:
            raise ConfigError(
                "A key is not present.", wanted="a key that was inserted", got=repr(key), change="insert it"
            )
