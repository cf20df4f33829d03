"""What limits a run, in plain words, from its figures: each finding has the number that shows it.

Nothing is advised without evidence, and nothing may be what limits.

Imports: sizing, stats.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Literal

from tieredkv.sizing import format_bytes
from tieredkv.stats import CacheStats, PhaseStats

Kind = Literal[
    "bandwidth",
    "checksums",
    "duplicates",
    "failures",
    "fragmentation",
    "gather",
    "graphs",
    "link",
    "lossy",
    "moves",
    "native",
    "nothing",
    "pageable",
    "promotable",
    "room",
    "stall",
    "transfer",
    "waiting",
]

LARGE_SHARE = 0.30
"""Of a forward's time, spent waiting for blocks or moving them: from here on it is what to change first."""
ROOM_SHARE = 0.50
"""Of the bytes written down, by moves that a forward had to wait for."""
NEAR_PEAK = 0.70
"""Of a measured bandwidth: what real access patterns reach of it."""
DUPLICATE_SHARE = 0.10
LEAST_COMPARED = 8
"""Fewer blocks say nothing about duplicates."""
LEAST_FORWARDS = 4
"""Fewer timed forwards say nothing about shares of their time."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that the figures show.

    Args:
        kind: what it is about.
        severity: "fault": something went wrong and was survived; "limit": it costs time or memory, and a setting
            changes that; "note": good to know.
        evidence: the number that shows it, in `unit`.
        unit: of the evidence: "share", "bytes", "bytes/s", "blocks", "reads", "failures", "graphs",
            "pieces", "parts", "forwards".
        text: the finding in a sentence or two.
        change: which setting to change, or None where there is nothing to change.
    """

    kind: Kind
    severity: Literal["fault", "limit", "note"]
    evidence: float
    unit: str
    text: str
    change: str | None = None

    def __str__(self) -> str:
        return self.text if self.change is None else f"{self.text} To change: {self.change}."


def explain(stats: CacheStats) -> list[Finding]:
    """Findings about a run: faults first, then what limits it, then notes. Never empty.

    Args:
        stats: a snapshot, taken when the run is over or well under way.
    """
    found = [finding for look in _LOOKS for finding in look(stats)]
    if not any(finding.severity == "limit" for finding in found):
        found.append(_nothing(stats))
    order = {"fault": 0, "limit": 1, "note": 2}
    return sorted(found, key=lambda finding: order[finding.severity])


def _nothing(stats: CacheStats) -> Finding:
    decode = stats.decode
    if not decode.timed_forwards:
        forwards = stats.prefill.forwards + decode.forwards
        text = f"Nothing is known to limit this run: after {forwards} forwards, no decode step has been timed."
        return Finding("nothing", "note", forwards, "forwards", text)
    text = f"The cache limits nothing here: decode waited {decode.stall_share:.0%} of its time for blocks."
    return Finding("nothing", "note", decode.stall_share, "share", text)


def _checksums(stats: CacheStats) -> Iterator[Finding]:
    if stats.checksum_failures:
        text = (
            f"{stats.checksum_failures} of {stats.verified_blocks + stats.checksum_failures} comparisons of checksums"
            f" failed ({stats.retries} reads were made again). No wrong block was attended, but memory or disk returned"
            " other bytes than were written."
        )
        change = "test the memory and the disk behind the lower tiers"
        yield Finding("checksums", "fault", stats.checksum_failures, "failures", text, change)
    elif stats.retries:
        text = f"{stats.retries} reads had to be made again and were right then."
        yield Finding("checksums", "fault", stats.retries, "reads", text, "test the disk behind the cold tier")


def _failures(stats: CacheStats) -> Iterator[Finding]:
    if stats.tier_failures:
        text = f"{stats.tier_failures} reads or writes of a lower tier failed; the run went on without them."
        change = "look at the log for the reason: a full or read-only disk, or a folder that went away"
        yield Finding("failures", "fault", stats.tier_failures, "failures", text, change)


def _gather(stats: CacheStats) -> Iterator[Finding]:
    if stats.mode != "gather" or not stats.tokens or stats.fallback_reason is None:
        return
    text = (
        f"Whole keys and values are put together for attention ({format_bytes(stats.gather_peak_bytes)} for one"
        f" layer), because of {stats.fallback_reason}."
    )
    change = 'TieredCache(model) instead of TieredCache(model.config), or attn_implementation="tieredkv"'
    yield Finding("gather", "limit", stats.gather_peak_bytes, "bytes", text, change)


def _time(stats: CacheStats) -> Iterator[Finding]:
    for name, phase in (("decode", stats.decode), ("prefill", stats.prefill)):
        if phase.timed_forwards < LEAST_FORWARDS:
            continue
        if phase.stall_share > LARGE_SHARE:
            text = f"Forwards of {name} waited {phase.stall_share:.0%} of their time for blocks on their way up"
            yield Finding("stall", "limit", phase.stall_share, "share", text + _streamed(phase), _less_streaming(stats))
        elif phase.transfer_share > LARGE_SHARE:
            text = (
                f"Bringing blocks up took workers {phase.transfer_share:.0%} of the time of {name}; attention hid all"
                f" but {phase.stall_share:.0%}"
            )
            found = Finding("transfer", "limit", phase.transfer_share, "share", text + _streamed(phase))
            yield dataclasses.replace(found, change=_less_streaming(stats))


def _moves(stats: CacheStats) -> Iterator[Finding]:
    for name, phase in (("decode", stats.decode), ("prefill", stats.prefill)):
        if phase.timed_forwards >= LEAST_FORWARDS and phase.move_wait_share > LARGE_SHARE:
            text = (
                f"Forwards of {name} waited {phase.move_wait_share:.0%} of their time for whole blocks to move: for"
                " room in hot, or until a prompt's blocks were stored below."
            )
            change = f"a larger hot= (now {format_bytes(stats.hot.budget_bytes or 0)}), a lower write_down_at=, or a"
            yield Finding("moves", "limit", phase.move_wait_share, "share", text, change + " larger warm= before cold=")


def _promotable(stats: CacheStats) -> Iterator[Finding]:
    if stats.promotable_blocks and stats.decode.timed_forwards >= LEAST_FORWARDS and stats.decode.streamed_bytes:
        text = f"Each step copies up {stats.promotable_blocks} blocks for which hot has room."
        change = "cache.promote(), or promote(wait=False) as soon as it is known that a sequence goes on"
        yield Finding("promotable", "limit", stats.promotable_blocks, "blocks", text, change)


def _streamed(phase: PhaseStats) -> str:
    return f" ({format_bytes(int(phase.streamed_bytes_per_token))} for each new token)."


def _less_streaming(stats: CacheStats) -> str:
    changes = [f"a larger hot= (now {format_bytes(stats.hot.budget_bytes or 0)}) and window= ({stats.window_tokens})"]
    changes.append("a larger chunk_tokens=")
    if stats.codec == "raw":
        changes.append('a codec below hot such as "int8", which is lossy')
    return ", or ".join(changes)


def _room(stats: CacheStats) -> Iterator[Finding]:
    down = stats.prefill.written_bytes + stats.decode.written_bytes
    waited = stats.moved_bytes.get("room", 0)
    if down and waited / down > ROOM_SHARE:
        text = (
            f"{waited / down:.0%} of the bytes written down ({format_bytes(waited)}) left hot only when a forward"
            " needed the room, and it had to wait."
        )
        change = f"a larger hot= (now {format_bytes(stats.hot.budget_bytes or 0)}), or a lower write_down_at="
        yield Finding("room", "limit", waited / down, "share", text, change)


def _pageable(stats: CacheStats) -> Iterator[Finding]:
    if stats.pin_failures:
        text = (
            f"{len(stats.pin_failures)} pieces of warm memory are pageable, which copies more slowly:"
            f" {stats.pin_failures[0]}."
        )
        change = "a smaller warm=, or a higher limit of locked memory (ulimit -l)"
        yield Finding("pageable", "limit", len(stats.pin_failures), "pieces", text, change)


def _native(stats: CacheStats) -> Iterator[Finding]:
    if stats.native_failures:
        text = f"Without compiled C++ these are slower: {'; '.join(stats.native_failures)}."
        change = "install a C++ compiler with OpenMP (g++), or set CXX to one"
        yield Finding("native", "limit", len(stats.native_failures), "parts", text, change)


def _bandwidth(stats: CacheStats) -> Iterator[Finding]:
    peak, rate = stats.link_bytes_per_second.get("hot", 0.0), stats.attended_bytes_per_second
    if peak and stats.decode.timed_forwards >= LEAST_FORWARDS and rate / peak > NEAR_PEAK:
        text = (
            f"Decode reads keys and values at {format_bytes(int(rate))}/s, {rate / peak:.0%} of what the memory gives:"
            " it is bound by bandwidth, and no setting of the cache changes that."
        )
        change = "a shorter context, or a model with fewer KV heads"
        yield Finding("bandwidth", "limit", rate, "bytes/s", text, change)


def _links(stats: CacheStats) -> Iterator[Finding]:
    for direction in stats.moves:
        share = stats.link_share(direction)
        if share is None:
            continue
        text = f"Copies {direction.replace('_', ' ')} ran at {share:.0%} of the link's measured bandwidth."
        yield Finding("link", "note", share, "share", text)


def _duplicates(stats: CacheStats) -> Iterator[Finding]:
    if stats.compared_blocks < LEAST_COMPARED:
        return
    share = stats.duplicate_blocks / stats.compared_blocks
    if share >= DUPLICATE_SHARE:
        text = (
            f"{stats.duplicate_blocks} of {stats.compared_blocks} stored blocks hold the bytes of another one: rows"
            " begin with the same text."
        )
        change = "prefill the common prefix once, then batch_repeat_interleave it; or take it from a store of prefixes"
        yield Finding("duplicates", "limit", share, "share", text, change)


def _fragmentation(stats: CacheStats) -> Iterator[Finding]:
    if stats.hot.blocks:
        text = (
            f"Fragmentation is never the cause: every slot of a tier has one size, so any free slot fits any block."
            f" Unused are only the ends of the last blocks, {format_bytes(stats.unused_bytes)} of"
            f" {format_bytes(stats.hot.used_bytes)} in hot."
        )
        yield Finding("fragmentation", "note", stats.unused_bytes, "bytes", text)


def _graphs(stats: CacheStats) -> Iterator[Finding]:
    if not stats.graphs:
        return
    if stats.graphs >= stats.graph_cap > 0:
        text = f"{stats.graphs} attention graphs were compiled, the most there may be; plain attention serves the rest."
        change = "steady numbers of rows, and one hot= for all caches"
        yield Finding("graphs", "limit", stats.graphs, "graphs", text, change)
    else:
        text = f"{stats.graphs} attention graphs were compiled, each at its first use, which then took seconds."
        yield Finding("graphs", "note", stats.graphs, "graphs", text)


def _lossy(stats: CacheStats) -> Iterator[Finding]:
    if stats.codec != "raw":
        below = stats.packed.blocks + stats.warm.blocks + stats.cold.blocks
        text = f"Blocks below hot are stored as {stats.codec}, which is lossy: {below} blocks are."
        yield Finding("lossy", "note", below, "blocks", text, 'codec="raw" for exact attention')
    if stats.beyond == "drop":
        text = (
            f'beyond="drop" is lossy: attention sees the first {stats.sinks} tokens and the last {stats.window_tokens};'
            f" {stats.dropped_blocks} blocks were freed and are seen no more."
        )
        yield Finding("lossy", "note", stats.dropped_blocks, "blocks", text, 'beyond="demote" for exact attention')


def _waiting(stats: CacheStats) -> Iterator[Finding]:
    if stats.waiting_moves:
        text = f"{stats.waiting_moves} blocks wait to be copied down ahead of need, for the cache's share of moves."
        yield Finding("waiting", "note", stats.waiting_moves, "blocks", text, "a larger moves_per_forward=")


_LOOKS: tuple[Callable[[CacheStats], Iterator[Finding]], ...] = (
    _checksums,
    _failures,
    _gather,
    _time,
    _moves,
    _promotable,
    _room,
    _pageable,
    _native,
    _bandwidth,
    _duplicates,
    _links,
    _lossy,
    _graphs,
    _waiting,
    _fragmentation,
)
