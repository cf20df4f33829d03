"""Settings of a cache: sizes, tiers, window, codec, verification. Frozen; checked when made.

A size is an int of bytes, text such as "512MiB", or "2048 tokens": so many tokens for each batch row, turned into
bytes at the first forward, when the bytes of a token and the rows are known.

Imports: errors only.
"""

from __future__ import annotations

import dataclasses
import os
import re
from typing import Any, Literal, get_args

from tieredkv.errors import ConfigError

Verify = Literal["always", "first", "off"]
Kernel = Literal["auto", "native", "flex", "flash"]
Placement = Literal["both", "window", "watermark"]
Beyond = Literal["demote", "drop"]
"""What happens to a block that leaves the window: it may move down a tier, or (lossy) it is freed."""

Role = Literal["hot", "packed", "warm", "cold"]
TIERS: tuple[str, ...] = get_args(Role)
"""Fastest first. "packed" is device memory too, and holds blocks in the codec of the tiers below it."""

CODEC_NAMES = ("raw", "fp8", "int8", "int4")
"""Encodings of blocks below hot: those that `tieredkv.codecs` has, in its order."""

DEFAULT_WINDOW_TOKENS = 2048
"""What a window is unless it is given, where so much fits."""

BLOCK_MULTIPLE = 16
"""Block sizes are multiples of this: the smallest block FlexAttention serves on every device."""

CHUNK_TOKENS = 4096
"""What a staging buffer holds unless `chunk_tokens` says otherwise."""


@dataclasses.dataclass(frozen=True)
class StagingRule:
    """How much of the hot budget staging buffers take on a kind of device (docs/decisions/0005).

    Args:
        buffers: how many there are.
        one_in: all of them together take at most one part in so many of hot, and at least one block of a layer each.
        chunk_bytes: bytes of a layer that a buffer holds where that is more than `CHUNK_TOKENS`.
    """

    buffers: int
    one_in: int = 8
    chunk_bytes: int = 0

    def chunk_tokens(self, settings: CacheSettings, token_bytes: int) -> int:
        """Most tokens of a buffer, where a token takes `token_bytes` in the largest layer."""
        if settings.chunk_tokens is not None:
            return settings.chunk_tokens
        return max(CHUNK_TOKENS, self.chunk_bytes // token_bytes)


STAGING_ON_CPU = StagingRule(1)
"""Nothing is read ahead."""
STAGING_ASIDE = StagingRule(2)
"""One chunk is attended while the next is on its way."""
STAGING_ON_GPU = StagingRule(3, one_in=4, chunk_bytes=32 * 2**20)
"""A third one is compared with its checksum by the host, which takes about as long as a fast link needs for a chunk."""

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_BYTES = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")
_TOKENS = re.compile(r"\s*(\d+)\s*tokens?\s*", re.IGNORECASE)


def parse_bytes(size: int | str) -> int:
    """Bytes from an int or from text such as "512MiB", "1.5 GB" or "4096".

    Raises:
        ConfigError: negative, or not a size.
    """
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise _bad_size(size)
    if isinstance(size, int):
        if size < 0:
            raise _bad_size(size)
        return size
    match = _BYTES.fullmatch(size)
    if match is None or match[2].upper() not in _UNITS:
        raise _bad_size(size)
    return int(float(match[1]) * _UNITS[match[2].upper()])


def check_codec(name: str) -> None:
    """Refuse what is not one of `CODEC_NAMES`.

    Raises:
        ConfigError: the name is unknown.
    """
    if name not in CODEC_NAMES:
        known = ", ".join(map(repr, CODEC_NAMES))
        raise ConfigError(
            "Unknown codec.", wanted=f"one of {known}", got=repr(name), change="choose one of these names"
        )


def _bad_size(size: object) -> ConfigError:
    return ConfigError(
        "Not a size.",
        wanted='an int of bytes, "512MiB", or "2048 tokens"',
        got=repr(size),
        change="give the size in one of these forms",
    )


@dataclasses.dataclass(frozen=True)
class Size:
    """An amount of memory, in bytes or in tokens for each batch row. Exactly one of the two is set.

    Args:
        bytes_: bytes, whatever the model.
        tokens_per_row: tokens for each batch row.
    """

    bytes_: int | None = None
    tokens_per_row: int | None = None

    @classmethod
    def parse(cls, size: int | str | Size) -> Size:
        """A size from what a user writes.

        Raises:
            ConfigError: not a size.
        """
        if isinstance(size, Size):
            return size
        if isinstance(size, str) and (match := _TOKENS.fullmatch(size)):
            return cls(tokens_per_row=int(match[1]))
        return cls(bytes_=parse_bytes(size))

    def resolve(self, token_bytes: int, rows: int) -> int:
        """Bytes, given the bytes of one token over all tiered layers and the number of batch rows."""
        if self.bytes_ is not None:
            return self.bytes_
        return (self.tokens_per_row or 0) * token_bytes * max(rows, 1)

    def __str__(self) -> str:
        return f"{self.bytes_} bytes" if self.bytes_ is not None else f"{self.tokens_per_row} tokens"


@dataclasses.dataclass(frozen=True)
class ColdSettings:
    """Where the cold tier lives and how much of the disk it may take.

    Args:
        path: folder; made when absent.
        cap: most bytes of block data, as a size; None for no cap.
        free_floor: bytes of free space on that disk that are never touched.
    """

    path: str | os.PathLike[str]
    cap: Size | int | str | None = None
    free_floor: int | str = "1GiB"

    def __post_init__(self) -> None:
        if self.cap is not None:
            Size.parse(self.cap)
        parse_bytes(self.free_floor)

    @property
    def cap_size(self) -> Size | None:
        """The cap as a `Size`, or None."""
        return None if self.cap is None else Size.parse(self.cap)

    @property
    def free_floor_bytes(self) -> int:
        """The floor in bytes."""
        return parse_bytes(self.free_floor)


@dataclasses.dataclass(frozen=True)
class CacheSettings:
    """Every choice of one cache.

    Args:
        hot: device memory for blocks, staging included; None for half of what is free when the cache is made.
        warm: host memory for blocks; None for a quarter of what is free when the cache is made, 0 for no warm tier.
        cold: a path or `ColdSettings`; None (default): nothing touches a disk.
        block_size: tokens of a block, a multiple of 16.
        window: most recent tokens of each row that stay hot; None for 2,048, or what fits hot if that is less.
            A floor: older blocks are written down early, and stay hot while there is room.
        codec: encoding of blocks below hot, "raw" (exact), "fp8", "int8" or "int4" (lossy).
        hot_codec: the name of `codec`, which is lossy, to keep blocks outside the window encoded on the device too, in
            the part of `hot` that the window leaves. None: all blocks on the device are exact.
        verify: when checksums are compared: at every crossing, at a block's first read, or never.
        watermark: share of the hot slots above which blocks outside the window leave hot.
        write_down_at: share of the hot slots above which blocks outside the window are copied down ahead of need.
        read_in_place: attend raw warm blocks where they are when the device can address host memory.
        kernel: "auto" chooses by device, dtype and shape; the others ask for one kernel, and what it cannot serve goes
            down the table of docs/decisions/0003.
        chunk_tokens: most tokens of one row that one staging buffer holds, within an eighth of `hot` for all buffers, a
            quarter on a GPU. None for 4,096, and on a GPU as many as are 32 MiB of a layer if that is more: a chunk
            costs the host some 0.25 ms, in which a fast link moves 12 MB.
        max_tokens: tokens of each row that must fit, checked at the first forward; more may follow.
        log_moves: keep a record of each move (block, from, to, bytes, seconds, reason).
        placement: what makes blocks leave hot: "both" (those outside the window, when hot fills up to the watermark),
            "window" (as soon as they are outside it) or "watermark" (oldest first, with no window).
        sinks: first tokens of each row that stay hot as the window does, in whole blocks; padding counts.
        beyond: "demote", or "drop", which is lossy: blocks that leave the window are freed, and attention sees the
            blocks of sinks and window only, at their true positions. Needs `window`, and attention over blocks.
        hot_quota: hot bytes for the blocks that one cache alone holds, where several share a store; None for all.
        moves_per_forward: blocks of a cache that are copied ahead of need for each of its forwards, saved up for at
            most four; None for no limit. Copies that a forward needs are never held back.
        queue_blocks: blocks that may wait for that, and blocks that may be on their way down at a time, before the
            forward waits for the oldest.

    Raises:
        ConfigError: a value that can never be served.
    """

    hot: Size | int | str | None = None
    warm: Size | int | str | None = None
    cold: ColdSettings | str | os.PathLike[str] | None = None
    block_size: int = 128
    window: int | None = None
    codec: str = "raw"
    hot_codec: str | None = None
    verify: Verify = "always"
    watermark: float = 0.85
    write_down_at: float = 0.5
    read_in_place: bool = True
    kernel: Kernel = "auto"
    chunk_tokens: int | None = None
    max_tokens: int | None = None
    log_moves: bool = False
    placement: Placement = "both"
    sinks: int = 0
    beyond: Beyond = "demote"
    hot_quota: Size | int | str | None = None
    moves_per_forward: int | None = None
    queue_blocks: int = 1024

    def __post_init__(self) -> None:
        for size in (self.hot, self.warm, self.hot_quota):
            if size is not None:
                Size.parse(size)
        check_codec(self.codec)
        if self.hot_codec is not None:
            check_codec(self.hot_codec)
        self._check_placement()
        if isinstance(self.block_size, bool) or self.block_size < BLOCK_MULTIPLE or self.block_size % BLOCK_MULTIPLE:
            raise ConfigError(
                "A block size that cannot be served.",
                wanted=f"a multiple of {BLOCK_MULTIPLE}",
                got=self.block_size,
                change="block_size=16, 32, 64, 128 or 256",
            )
        if self.window is not None and self.window < 1:
            raise ConfigError("A window needs tokens.", wanted="at least 1", got=self.window, change="window=512")
        if self.verify not in ("always", "first", "off"):
            raise ConfigError(
                "Unknown verification.", wanted='"always", "first" or "off"', got=repr(self.verify), change="verify="
            )
        if self.kernel not in ("auto", "native", "flex", "flash"):
            raise ConfigError(
                "Unknown kernel.",
                wanted='"auto", "native", "flex" or "flash"',
                got=repr(self.kernel),
                change='kernel="auto"',
            )
        if not 0 < self.watermark <= 1 or not 0 <= self.write_down_at <= self.watermark:
            raise ConfigError(
                "Shares of the hot tier that cannot be.",
                wanted="0 <= write_down_at <= watermark <= 1",
                got=f"write_down_at={self.write_down_at}, watermark={self.watermark}",
                change="watermark=0.85, write_down_at=0.5",
            )
        if self.chunk_tokens is not None and self.chunk_tokens < 1:
            raise ConfigError(
                "Streaming needs buffers of at least a token.",
                wanted="chunk_tokens >= 1",
                got=f"chunk_tokens={self.chunk_tokens}",
                change="leave it at its default",
            )

    def _check_placement(self) -> None:
        if self.placement not in ("both", "window", "watermark"):
            raise ConfigError(
                "Unknown placement.",
                wanted='"both", "window" or "watermark"',
                got=repr(self.placement),
                change='placement="both"',
            )
        if self.placement == "watermark" and self.window is not None:
            raise ConfigError(
                "A window that nothing heeds.",
                wanted='no window= with placement="watermark"',
                got=f"window={self.window}",
                change='leave window= out, or placement="both"',
            )
        if self.beyond not in ("demote", "drop") or (self.beyond == "drop" and self.window is None):
            raise ConfigError(
                "What lies beyond the window can be demoted, or dropped where a window was given.",
                wanted='"demote", or "drop" with window=',
                got=f"beyond={self.beyond!r}, window={self.window}",
                change='beyond="demote", or give window= and sinks=',
            )
        if self.hot_codec is not None and (self.hot_codec == "raw" or self.hot_codec != self.codec):
            raise ConfigError(
                "What is encoded on the device is stored below it as it is.",
                wanted="hot_codec and codec of one name, and not raw",
                got=f"hot_codec={self.hot_codec!r}, codec={self.codec!r}",
                change='hot_codec="int8", codec="int8"',
            )
        if self.hot_codec is not None and self.beyond == "drop":
            raise ConfigError(
                "What leaves the window is dropped or encoded, not both.",
                wanted='hot_codec= with beyond="demote"',
                got=f'hot_codec={self.hot_codec!r}, beyond="drop"',
                change="leave one of the two out",
            )
        if self.sinks < 0 or self.queue_blocks < 1 or min(self.moves_per_forward or 0, self.max_tokens or 0) < 0:
            raise ConfigError(
                "A number that cannot be.",
                wanted="sinks >= 0, queue_blocks >= 1, moves_per_forward >= 0 or None, max_tokens >= 0 or None",
                got=f"sinks={self.sinks}, queue_blocks={self.queue_blocks}, moves_per_forward={self.moves_per_forward},"
                f" max_tokens={self.max_tokens}",
                change="leave them at their defaults",
            )

    @property
    def sink_blocks(self) -> int:
        """First blocks of each row that hold its sinks."""
        return -(-self.sinks // self.block_size)

    @classmethod
    def chosen(cls, settings: CacheSettings | None, **values: Any) -> CacheSettings:
        """These settings, or the defaults, with the values that are not None in the place of theirs."""
        given = {name: value for name, value in values.items() if value is not None}
        return dataclasses.replace(settings or cls(), **given)

    @property
    def depends_on_rows(self) -> bool:
        """Whether a size is given in tokens for each row."""
        cap = None if self.cold_settings is None else self.cold_settings.cap_size
        sizes = [Size.parse(size) for size in (self.hot, self.warm, self.hot_quota, cap) if size is not None]
        return any(size.tokens_per_row is not None for size in sizes)

    @property
    def cold_settings(self) -> ColdSettings | None:
        """The cold tier's settings, or None when there is none."""
        if self.cold is None or isinstance(self.cold, ColdSettings):
            return self.cold
        return ColdSettings(path=self.cold)
