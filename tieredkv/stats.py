"""What a cache has done, as `cache.stats()` gives it: frozen records, and how they are saved and read back.

Imports: config.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from tieredkv.config import TIERS, Beyond

T = TypeVar("T")
Mode = Literal["blocks", "gather"]


@dataclasses.dataclass(frozen=True)
class TierStats:
    """One tier. Bytes count block data; hot includes the staging buffers.

    Args:
        budget_bytes: most bytes it may ever hold (0: no such tier; None: bounded by the medium alone).
        used_bytes: bytes held now.
        peak_bytes: most bytes held at any time.
        reserved_bytes: bytes of memory or disk taken from the system, used or not.
        blocks: blocks held now.
        peak_blocks: most blocks held at any time.
        hits: block reads by attention that found their block here first, over all layers.
    """

    budget_bytes: int | None
    used_bytes: int
    peak_bytes: int
    reserved_bytes: int
    blocks: int
    peak_blocks: int
    hits: int


NO_TIER = TierStats(0, 0, 0, 0, 0, 0, 0)


@dataclasses.dataclass(frozen=True)
class MoveStats:
    """Traffic in one direction.

    Args:
        bytes: bytes moved, as stored in the lower tier.
        blocks: blocks moved, counted once for all layers (a streamed block counts once each forward).
        seconds: time spent copying, summed over workers.
    """

    bytes: int = 0
    blocks: float = 0.0
    seconds: float = 0.0

    @property
    def bytes_per_second(self) -> float:
        """Mean rate while copying, 0 when nothing was moved."""
        return self.bytes / self.seconds if self.seconds else 0.0


@dataclasses.dataclass(frozen=True)
class PhaseStats:
    """Forwards of one kind: prefill (more than one new token) or decode (one).

    Args:
        forwards: how many.
        tokens: new tokens, over all rows.
        stall_seconds: time the forward waited for blocks; on a CPU, which copies them itself, all of the time below.
        transfer_seconds: time spent bringing blocks up for attention; on a GPU the copies' own.
        written_bytes: bytes written below hot.
        streamed_bytes: bytes brought up through staging.
        step_seconds: time from the begin of a forward to the begin of the next one, over `timed_forwards`.
        timed_forwards: forwards whose time is known: all but the last, and the last before a new prompt.
        attended_blocks: layer pieces of blocks that attention read.
        move_wait_seconds: time forwards waited for whole blocks: for room that others had to leave, for blocks of a
            long prompt that go straight down, and for blocks that were to come up before they begin.
    """

    forwards: int = 0
    tokens: int = 0
    stall_seconds: float = 0.0
    transfer_seconds: float = 0.0
    written_bytes: int = 0
    streamed_bytes: int = 0
    step_seconds: float = 0.0
    timed_forwards: int = 0
    attended_blocks: int = 0
    move_wait_seconds: float = 0.0

    @property
    def seconds_per_forward(self) -> float:
        """Mean time of a forward, all of the model included; 0 while none is known."""
        return self.step_seconds / self.timed_forwards if self.timed_forwards else 0.0

    @property
    def stall_share(self) -> float:
        """Share of a forward's time that it waited for blocks; 0 while no time is known."""
        return self._share(self.stall_seconds)

    @property
    def transfer_share(self) -> float:
        """Time that blocks were on their way up, as a share of the forwards' time; above 1 it cannot be hidden."""
        return self._share(self.transfer_seconds)

    @property
    def move_wait_share(self) -> float:
        """Share of a forward's time that it waited for whole blocks to move; 0 while no time is known."""
        return self._share(self.move_wait_seconds)

    @property
    def written_bytes_per_token(self) -> float:
        """Bytes written below hot for each new token."""
        return self.written_bytes / self.tokens if self.tokens else 0.0

    @property
    def streamed_bytes_per_token(self) -> float:
        """Bytes brought up through staging for each new token."""
        return self.streamed_bytes / self.tokens if self.tokens else 0.0

    def _share(self, seconds: float) -> float:
        whole = self.seconds_per_forward * self.forwards
        return seconds / whole if whole else 0.0


@dataclasses.dataclass(frozen=True)
class CacheStats:
    """A snapshot of one cache; see the field types for units.

    Args:
        mode: "blocks" when every tiered layer is attended over blocks, else "gather".
        fallback_reason: why a layer gathers, or None.
        tokens: tokens of each row.
        rows: batch rows.
        block_size: tokens of a block.
        window_tokens: most recent tokens that stay hot.
        codec: spill codec; everything but "raw" is lossy.
        hot, warm, cold: the tiers.
        moves: per direction ("hot_to_warm", "hot_to_cold", "warm_to_hot", "cold_to_hot", ...).
        verified_blocks: layer pieces of blocks whose checksum was compared.
        checksum_failures: comparisons that failed.
        retries: reads that were made again after a failed comparison or a failed read.
        stall_seconds: time forwards waited for blocks on their way.
        transfer_seconds: time spent moving blocks, both directions.
        prefill, decode: the two phases apart.
        gather_peak_bytes: the largest whole K/V of one layer that gather put on the device, outside the hot budget.
        other_layers_bytes: K/V and states of layers that are not tiered (sliding windows, linear states).
        tier_failures: writes and reads of a lower tier that failed and were survived.
        graphs: compiled attention graphs.
        pinned_bytes: host memory that is pinned.
        position_exempt: forwards whose positions could not be checked.
        tiered_layers: layers whose blocks move between tiers.
        block_bytes: bytes of one block over all of them, unencoded.
        unused_bytes: hot bytes behind the last token of blocks that are not full.
        moved_bytes: bytes moved, by reason (see `MoveRecord`).
        link_bytes_per_second: measured bandwidth, where it was measured (`cache.measure_links()`): by direction, and
            "hot" for reading device memory.
        pin_failures: for each piece of warm memory that is pageable where pinned was wanted: why.
        native_failures: what is served by something slower since its C++ could not be compiled, each with the reason.
        graph_cap: the most graphs that are compiled; further shapes are served without one.
        compared_blocks, duplicate_blocks: stored blocks whose checksums could be compared, and those of equal bytes.
        waiting_moves: copies ahead of need that wait for the cache's share of moves.
        sinks: first tokens of each row that stay hot.
        beyond: what happens to blocks that leave the window: "demote", or "drop", which is lossy.
        dropped_blocks: blocks of the table that were freed because of `beyond="drop"`.
        packed: blocks in device memory as `hot_codec` stores them; its budget is a part of `hot=`, beside that of hot.
        promotable_blocks: blocks that each step copies up although hot has room for them: see `cache.promote()`.
        held_bytes, peak_held_bytes: new K and V of a long prompt that copies on their way down keep alive, now and at
            most so far; device memory beside the hot budget, bounded by `transfer.MAX_HELD_BYTES`.
    """

    mode: Mode
    fallback_reason: str | None
    tokens: int
    rows: int
    block_size: int
    window_tokens: int
    codec: str
    hot: TierStats
    warm: TierStats
    cold: TierStats
    moves: dict[str, MoveStats]
    verified_blocks: int
    checksum_failures: int
    retries: int
    stall_seconds: float
    transfer_seconds: float
    prefill: PhaseStats
    decode: PhaseStats
    gather_peak_bytes: int
    other_layers_bytes: int
    tier_failures: int
    graphs: int
    pinned_bytes: int
    position_exempt: int
    tiered_layers: int = 0
    block_bytes: int = 0
    unused_bytes: int = 0
    moved_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    link_bytes_per_second: dict[str, float] = dataclasses.field(default_factory=dict)
    pin_failures: tuple[str, ...] = ()
    graph_cap: int = 0
    duplicate_blocks: int = 0
    compared_blocks: int = 0
    waiting_moves: int = 0
    sinks: int = 0
    beyond: Beyond = "demote"
    dropped_blocks: int = 0
    packed: TierStats = NO_TIER
    native_failures: tuple[str, ...] = ()
    promotable_blocks: int = 0
    held_bytes: int = 0
    peak_held_bytes: int = 0

    @property
    def lossless(self) -> bool:
        """Whether every token is attended exactly: the codec is raw and nothing is dropped."""
        return self.codec == "raw" and self.beyond == "demote"

    @property
    def overlap_efficiency(self) -> float:
        """1 - stall / transfer of decode: 1 when every copy was hidden behind compute, 1 when nothing moved."""
        seconds = self.decode.transfer_seconds
        return 1.0 - min(self.decode.stall_seconds / seconds, 1.0) if seconds else 1.0

    @property
    def attended_bytes_per_second(self) -> float:
        """Bytes of K and V that attention read in each second of decode, unencoded; 0 while no time is known."""
        if not self.tiered_layers or not self.decode.forwards or not self.decode.step_seconds:
            return 0.0
        per_forward = self.decode.attended_blocks / self.decode.forwards * self.block_bytes / self.tiered_layers
        return per_forward / self.decode.seconds_per_forward

    def link_share(self, direction: str) -> float | None:
        """A direction's rate as a share of its link's measured bandwidth, or None where that was not measured."""
        link, move = self.link_bytes_per_second.get(direction), self.moves.get(direction)
        return None if not link or move is None else move.bytes_per_second / link

    def to_json(self) -> str:
        """The snapshot as a JSON object."""
        return json.dumps(dataclasses.asdict(self), indent=2)

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> CacheStats:
        """A snapshot from what `to_json` wrote; figures that a later version added, or took away, are left out.

        Raises:
            KeyError, TypeError: it is not such a record.
        """
        records: dict[str, Any] = {
            **{name: record_from(TierStats, saved[name]) for name in TIERS if name in saved},
            **{name: record_from(PhaseStats, saved[name]) for name in ("prefill", "decode")},
            "moves": {name: record_from(MoveStats, move) for name, move in saved["moves"].items()},
            **{name: tuple(saved.get(name, ())) for name in ("pin_failures", "native_failures")},
        }
        return record_from(cls, {**saved, **records})


def record_from(kind: type[T], saved: Mapping[str, Any]) -> T:
    """A record of what it knows among what was saved."""
    known = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in saved.items() if name in known})


@dataclasses.dataclass(frozen=True, slots=True)
class MoveRecord:
    """One move, kept when `log_moves` is on.

    Args:
        block: block id.
        source, target: tiers.
        bytes: bytes as stored in the lower of the two.
        seconds: share of the copy's time.
        reason: "window", "watermark", "room", "quota", "prefill", "stream", "request".
        layer: the layer, for moves of one layer; None when all layers moved.
        start_seconds: when the copy started, from the opening of the store.
    """

    block: int
    source: str
    target: str
    bytes: int
    seconds: float
    reason: str
    layer: int | None = None
    start_seconds: float = 0.0
