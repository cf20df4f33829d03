"""Eviction: which block of a prefix tree goes when room is needed.

| name | what goes first |
|---|---|
| lru | the leaf that was used longest ago |
| arc | of leaves used once or of those used again, whichever was missed less |
| s3fifo | leaves that were not used again soon after they came |
| lhd | the leaf that is expected to bring the fewest hits for the time it would stay (default) |

Imports: errors, and this package.
"""

from __future__ import annotations

from typing import Any

from tieredkv.errors import ConfigError
from tieredkv.eviction.arc import ArcPolicy
from tieredkv.eviction.base import EvictionPolicy, nothing_in_use
from tieredkv.eviction.lhd import LhdPolicy
from tieredkv.eviction.lru import LruPolicy
from tieredkv.eviction.s3fifo import S3FifoPolicy

__all__ = [
    "DEFAULT_POLICY",
    "POLICY_NAMES",
    "ArcPolicy",
    "EvictionPolicy",
    "LhdPolicy",
    "LruPolicy",
    "S3FifoPolicy",
    "nothing_in_use",
    "policy",
]

_POLICIES: tuple[type[EvictionPolicy[Any]], ...] = (LruPolicy, ArcPolicy, S3FifoPolicy, LhdPolicy)

POLICY_NAMES: tuple[str, ...] = tuple(kind.name for kind in _POLICIES)
"""The names that `policy` knows."""

DEFAULT_POLICY = "lhd"
"""What a store takes when none is named."""


def policy(name: str = DEFAULT_POLICY) -> EvictionPolicy[Any]:
    """A new, empty policy of that name.

    Raises:
        ConfigError: the name is unknown.
    """
    for kind in _POLICIES:
        if kind.name == name:
            return kind()
    known = ", ".join(repr(known) for known in POLICY_NAMES)
    raise ConfigError(
        "Unknown eviction policy.", wanted=f"one of {known}", got=repr(name), change="choose one of these"
    )
