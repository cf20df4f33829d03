"""Where published blocks lie, how much of the disk they may take, and how long a read may last. Frozen.

Imports: errors, config, eviction.
"""

from __future__ import annotations

import dataclasses
import os

from tieredkv.config import Size, parse_bytes
from tieredkv.errors import ConfigError
from tieredkv.eviction import DEFAULT_POLICY, policy


@dataclasses.dataclass(frozen=True)
class DurableSettings:
    """Settings of a directory of published blocks.

    Args:
        path: the directory; made when absent. Several processes and models may use it at once.
        cap: the most that all published files in it may take together, other models' and damaged ones included; a
            size in tokens counts tokens of this model. None for no cap.
        free_floor: bytes of free space on that disk that are never touched.
        retention_seconds: files written longer ago are deleted, whether used or not; None to keep them.
        deadline_seconds: a read that lasts longer counts as a miss, so that the caller recomputes; None to wait.
        policy: which files go when room is needed (see tieredkv.eviction).

    Raises:
        ConfigError: a value that can never be served.
    """

    path: str | os.PathLike[str]
    cap: Size | int | str | None = None
    free_floor: int | str = "1GiB"
    retention_seconds: float | None = None
    deadline_seconds: float | None = None
    policy: str = DEFAULT_POLICY

    def __post_init__(self) -> None:
        if self.cap is not None:
            Size.parse(self.cap)
        parse_bytes(self.free_floor)
        policy(self.policy)
        for name in ("retention_seconds", "deadline_seconds"):
            seconds = getattr(self, name)
            if seconds is not None and not seconds > 0:
                raise ConfigError(
                    f"{name} cannot be served.", wanted="seconds above 0, or None", got=seconds, change=f"set {name}"
                )

    @property
    def free_floor_bytes(self) -> int:
        """The floor in bytes."""
        return parse_bytes(self.free_floor)

    def cap_bytes(self, token_bytes: int) -> int | None:
        """The cap in bytes, given those of one token over all layers as stored."""
        return None if self.cap is None else Size.parse(self.cap).resolve(token_bytes, rows=1)
