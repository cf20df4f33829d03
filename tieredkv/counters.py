"""Where the parts of a store count what they do.

Imports: config, stats.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

from tieredkv.config import TIERS
from tieredkv.stats import MoveRecord, MoveStats, PhaseStats, record_from


class Numbered(Protocol):
    """What a move is recorded by: a block of the store."""

    id: int


class Counters:
    """Where the parts of a store count; safe to use from worker threads, which wait for `lock`."""

    def __init__(self, log_moves: bool) -> None:
        self.lock = threading.RLock()  # of which a thread can say that it has it
        self._opened = time.perf_counter()
        self._began = self._opened
        self._moves: dict[str, list[float]] = {}  # bytes, blocks, seconds
        self._reasons: dict[str, int] = {}
        self._phases: dict[str, dict[str, float]] = {"prefill": {}, "decode": {}}
        self._phase = "prefill"
        self._hits_before = 0
        self.hits = dict.fromkeys(TIERS, 0)
        self.verified_blocks = 0
        self.checksum_failures = 0
        self.retries = 0
        self.tier_failures = 0
        self.link_bytes_per_second: dict[str, float] = {}
        self.log: list[MoveRecord] | None = [] if log_moves else None

    def begin_forward(self, new_tokens: int, rows: int) -> None:
        """Open a forward, whose reads were planned; what is counted until the next one belongs to its phase."""
        now, phase = time.perf_counter(), "prefill" if new_tokens > 1 else "decode"
        hits = sum(self.hits.values())
        with self.lock:
            if self._phases[self._phase] and (self._phase, phase) != ("decode", "prefill"):
                # Before a new prompt the time also holds what the caller did in between.
                self._grow("step_seconds", now - self._began)
                self._grow("timed_forwards", 1)
            self._began, self._phase = now, phase
            self._grow("forwards", 1)
            self._grow("tokens", new_tokens * rows)
            self._grow("attended_blocks", hits - self._hits_before)
            self._hits_before = hits

    def moved(
        self,
        source: str,
        target: str,
        blocks: Sequence[Numbered],
        *,
        total_bytes: int,
        seconds: float,
        reason: str,
        layer: int | None = None,
        count: float | None = None,
        started: float | None = None,
    ) -> None:
        """Count a copy of some blocks, when it is done.

        Args:
            source, target: tiers.
            blocks: what moved; it took place side by side, and each is recorded with its share of the time.
            total_bytes: of all of them.
            seconds: of all of them.
            reason: see `MoveRecord`.
            layer: the layer, when only one moved.
            count: the number of blocks when only some layers of them moved, a fraction.
            started: `time.perf_counter()` at the start; by default the copy ends now.
        """
        with self.lock:
            flow = self._moves.setdefault(f"{source}_to_{target}", [0, 0, 0.0])
            flow[0] += total_bytes
            flow[1] += len(blocks) if count is None else count
            flow[2] += seconds
            self._reasons[reason] = self._reasons.get(reason, 0) + total_bytes
            if target != "hot":
                self._grow("written_bytes", total_bytes)
            elif reason == "stream":
                self._grow("transfer_seconds", seconds)
                self._grow("streamed_bytes", total_bytes)
            if self.log is not None and blocks:
                first = (time.perf_counter() - seconds if started is None else started) - self._opened
                size, each = total_bytes // len(blocks), seconds / len(blocks)
                self.log += [
                    MoveRecord(block.id, source, target, size, each, reason, layer, first + index * each)
                    for index, block in enumerate(blocks)
                ]

    def verified(self, blocks: int) -> None:
        """Count comparisons of checksums that held."""
        with self.lock:
            self.verified_blocks += blocks

    def failed(self, *, checksum: int = 0, retries: int = 0, tier: int = 0) -> None:
        """Count what went wrong and was noticed."""
        with self.lock:
            self.checksum_failures += checksum
            self.retries += retries
            self.tier_failures += tier

    def stalled(self, seconds: float) -> None:
        """Count time a forward waited."""
        with self.lock:
            self._grow("stall_seconds", seconds)

    @contextlib.contextmanager
    def waiting(self, is_waited: bool = True) -> Iterator[None]:
        """Inside, a forward waits for whole blocks to move, if it does."""
        if not is_waited:
            yield
            return
        started = time.perf_counter()
        try:
            yield
        finally:
            with self.lock:
                self._grow("move_wait_seconds", time.perf_counter() - started)

    def phases(self) -> tuple[PhaseStats, PhaseStats]:
        """(prefill, decode) so far."""
        with self.lock:
            prefill, decode = (record_from(PhaseStats, self._phases[name]) for name in ("prefill", "decode"))
            return prefill, decode

    def moves(self) -> dict[str, MoveStats]:
        """Traffic per direction so far."""
        with self.lock:
            return {name: MoveStats(int(flow[0]), flow[1], flow[2]) for name, flow in self._moves.items()}

    def moved_bytes(self) -> dict[str, int]:
        """Bytes moved so far, by reason."""
        with self.lock:
            return dict(self._reasons)

    def _grow(self, name: str, amount: float) -> None:
        phase = self._phases[self._phase]
        phase[name] = phase.get(name, 0) + amount
