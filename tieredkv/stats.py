"""What a cache has done: counters that the parts add to, and the frozen records that `cache.stats()` gives.

Imports nothing of the package.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from typing import Literal

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
        stall_seconds: time the forward waited for a block on its way.
        transfer_seconds: time workers spent bringing blocks up.
        written_bytes: bytes written below hot.
        streamed_bytes: bytes brought up through staging.
    """

    forwards: int = 0
    tokens: int = 0
    stall_seconds: float = 0.0
    transfer_seconds: float = 0.0
    written_bytes: int = 0
    streamed_bytes: int = 0


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
        transfer_seconds: time workers spent moving blocks, both directions.
        prefill, decode: the two phases apart.
        gather_peak_bytes: the largest whole K/V of one layer that gather put on the device, outside the hot budget.
        other_layers_bytes: K/V and states of layers that are not tiered (sliding windows, linear states).
        tier_failures: writes and reads of a lower tier that failed and were survived.
        graphs: compiled attention graphs.
        pinned_bytes: host memory that is pinned.
        position_exempt: forwards whose positions could not be checked.
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

    @property
    def overlap_efficiency(self) -> float:
        """1 - stall / transfer of decode: 1 when every copy was hidden behind compute, 1 when nothing moved."""
        seconds = self.decode.transfer_seconds
        return 1.0 - min(self.decode.stall_seconds / seconds, 1.0) if seconds else 1.0

    def to_json(self) -> str:
        """The snapshot as a JSON object."""
        return json.dumps(dataclasses.asdict(self), indent=2)


@dataclasses.dataclass(frozen=True)
class MoveRecord:
    """One move, kept when `log_moves` is on.

    Args:
        block: block id.
        source, target: tiers.
        bytes: bytes as stored in the lower of the two.
        seconds: share of the copy's time.
        reason: "window", "watermark", "room", "prefill", "stream", "crop", "request".
        layer: the layer, for moves of one layer; None when all layers moved.
    """

    block: int
    source: str
    target: str
    bytes: int
    seconds: float
    reason: str
    layer: int | None = None


class Counters:
    """Where the parts of a store count; safe to use from worker threads."""

    def __init__(self, log_moves: bool) -> None:
        self._lock = threading.Lock()
        self._moves: dict[str, MoveStats] = {}
        self._phases = {"prefill": PhaseStats(), "decode": PhaseStats()}
        self._phase = "prefill"
        self.hits = {"hot": 0, "warm": 0, "cold": 0}
        self.verified_blocks = 0
        self.checksum_failures = 0
        self.retries = 0
        self.tier_failures = 0
        self.log: list[MoveRecord] | None = [] if log_moves else None

    def begin_forward(self, new_tokens: int, rows: int) -> None:
        """Open a forward; what is counted until the next one belongs to its phase."""
        with self._lock:
            self._phase = "prefill" if new_tokens > 1 else "decode"
            self._grow(forwards=1, tokens=new_tokens * rows)

    def moved(
        self,
        source: str,
        target: str,
        block_ids: list[int],
        *,
        total_bytes: int,
        seconds: float,
        reason: str,
        layer: int | None = None,
        blocks: float | None = None,
    ) -> None:
        """Count a copy of some blocks; `blocks` is their number when only some layers of them moved."""
        with self._lock:
            name = f"{source}_to_{target}"
            old = self._moves.get(name, MoveStats())
            count = len(block_ids) if blocks is None else blocks
            self._moves[name] = MoveStats(old.bytes + total_bytes, old.blocks + count, old.seconds + seconds)
            if target == "hot":
                self._grow(transfer_seconds=seconds, streamed_bytes=total_bytes)
            else:
                self._grow(written_bytes=total_bytes)
            if self.log is not None and block_ids:
                each = (total_bytes // len(block_ids), seconds / len(block_ids))
                self.log += [MoveRecord(i, source, target, *each, reason, layer) for i in block_ids]

    def verified(self, blocks: int) -> None:
        """Count comparisons of checksums that held."""
        with self._lock:
            self.verified_blocks += blocks

    def failed(self, *, checksum: int = 0, retries: int = 0, tier: int = 0) -> None:
        """Count what went wrong and was noticed."""
        with self._lock:
            self.checksum_failures += checksum
            self.retries += retries
            self.tier_failures += tier

    def stalled(self, seconds: float) -> None:
        """Count time a forward waited."""
        with self._lock:
            self._grow(stall_seconds=seconds)

    def phases(self) -> tuple[PhaseStats, PhaseStats]:
        """(prefill, decode) so far."""
        with self._lock:
            return self._phases["prefill"], self._phases["decode"]

    def moves(self) -> dict[str, MoveStats]:
        """Traffic per direction so far."""
        with self._lock:
            return dict(self._moves)

    def _grow(self, **amounts: float) -> None:
        phase = self._phases[self._phase]
        grown = {name: getattr(phase, name) + amount for name, amount in amounts.items()}
        self._phases[self._phase] = dataclasses.replace(phase, **grown)
