"""The tree of errors; every one says what was wanted, what was got, and what to change.

TieredKVError
├── ConfigError            a setting that cannot be served (also a ValueError)
├── BudgetError            a tier is too small for what was asked (also a MemoryError)
├── UnsupportedModelError  a model or layer type that the cache refuses (also a TypeError)
├── MismatchError          tensors that do not belong to this cache (also a ValueError)
├── PositionError          positions that do not continue the cache (also a ValueError)
├── TrainingModeError      gradients were asked for
├── HandleError            a layer handle was returned and never attended
├── ClosedError            the cache was closed, or used after a fork
├── ChecksumError          stored bytes are not the bytes that were written
├── SessionError           a saved session cannot be written, read, or is damaged (also an OSError)
├── StepError              one cache of a step of several could not take its tokens
├── ColdTierError          the cold directory cannot be used (also an OSError)
└── RaceError              two accesses to one slot without an order between them

Imports nothing of the package.
"""

from __future__ import annotations


class TieredKVError(Exception):
    """Base of every error raised by tieredkv.

    Args:
        what: what happened, one sentence.
        wanted: the value or state that was needed.
        got: the value or state that was found.
        change: what the caller can do about it.
    """

    def __init__(self, what: str, *, wanted: object, got: object, change: str) -> None:
        self.what, self.wanted, self.got, self.change = what, wanted, got, change
        super().__init__(f"{what} Wanted: {wanted}. Got: {got}. To change: {change}")

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.wanted, self.got, self.change, self.__dict__))


def _rebuild(
    kind: type[TieredKVError], what: str, wanted: object, got: object, change: str, state: dict[str, object]
) -> TieredKVError:
    # `kind.__new__` is the one of MemoryError there, which Python refuses for a class of another layout.
    error: TieredKVError = Exception.__new__(kind) if issubclass(kind, MemoryError) else kind.__new__(kind)
    TieredKVError.__init__(error, what, wanted=wanted, got=got, change=change)
    error.__dict__.update(state)
    return error


class ConfigError(TieredKVError, ValueError):
    """A setting that cannot be served, found before anything was written."""


class BudgetError(TieredKVError, MemoryError):
    """A tier is too small; raised before a forward's first write, and the cache stays usable.

    Args:
        tier: the tier to enlarge ("hot", "warm" or "cold").
    """

    def __init__(self, what: str, *, wanted: object, got: object, change: str, tier: str) -> None:
        self.tier = tier
        super().__init__(what, wanted=wanted, got=got, change=change)


class UnsupportedModelError(TieredKVError, TypeError):
    """A model or a layer type that the cache refuses on purpose."""


class MismatchError(TieredKVError, ValueError):
    """Tensors of another model, batch, dtype or device were given to the cache."""


class PositionError(TieredKVError, ValueError):
    """The positions of a forward do not continue what the cache holds."""


class TrainingModeError(TieredKVError):
    """Keys that need gradients were given to the cache, which stores values only."""


class HandleError(TieredKVError):
    """A layer's handle was returned by `update` and no attention claimed it."""


class ClosedError(TieredKVError):
    """The cache was closed, or was made in the parent of this process."""


class ChecksumError(TieredKVError):
    """Stored bytes are not the bytes that were written, and no other copy of the block is left.

    Args:
        block: block id.
        layer: layer index.
        tier: the tier the bytes were read from.
    """

    def __init__(self, *, block: int, layer: int, tier: str, wanted: int, got: int) -> None:
        self.block, self.layer, self.tier = block, layer, tier
        super().__init__(
            f"Block {block}, layer {layer} read from {tier} has a wrong checksum.",
            wanted=f"{wanted & (2**64 - 1):#018x}",
            got=f"{got & (2**64 - 1):#018x}",
            change="the block is lost: reset the cache and prefill again; check the memory or disk behind that tier",
        )


class StepError(TieredKVError):
    """One cache of a step of several could not take its tokens; no cache was changed.

    Args:
        member: which.
        cause: why.
    """

    def __init__(self, member: int, cause: TieredKVError) -> None:
        super().__init__(cause.what, wanted=cause.wanted, got=cause.got, change=cause.change)
        self.member, self.cause = member, cause


class ColdTierError(TieredKVError, OSError):
    """The cold directory cannot be created, locked, written or read."""


class SessionError(TieredKVError, OSError):
    """A saved session cannot be written or read, or its bytes are not those that were written."""


class RaceError(TieredKVError):
    """Two accesses to one slot, at least one a write, without an order between them."""
