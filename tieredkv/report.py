"""Snapshots of a cache for people: statistics and the printed block table.

Imports: config, block, block_table, stats, tiers, store, attention.
"""

from __future__ import annotations

import dataclasses

from tieredkv.attention.kernels import GRAPH_CAP
from tieredkv.block import TIERS
from tieredkv.block_table import TableEntry
from tieredkv.config import CacheSettings
from tieredkv.stats import NO_TIER, CacheStats, Mode, PhaseStats, TierStats
from tieredkv.store import BlockStore, Holder, requests
from tieredkv.tiers import ColdTier


@dataclasses.dataclass(frozen=True)
class Parts:
    """What a report reads of a cache; see `CacheStats` for the figures.

    Args:
        store: the store, or None before the first forward.
        holder: the cache's blocks in it.
        settings: of the store.
        tiered: the model's index of each tiered layer.
        mode, fallback_reason, tokens, gather_peak_bytes, other_layers_bytes, graphs, position_exempt: what the cache
            knows and its store does not; see `CacheStats`.
        native_attention: why attention is not served by C++, or None.
    """

    store: BlockStore | None
    holder: Holder | None
    settings: CacheSettings
    tiered: tuple[int, ...]
    mode: Mode = "blocks"
    fallback_reason: str | None = None
    tokens: int = 0
    gather_peak_bytes: int = 0
    other_layers_bytes: int = 0
    graphs: int = 0
    native_attention: str | None = None
    position_exempt: int = 0


def stats(parts: Parts) -> CacheStats:
    """What the cache has done and holds; counters are its store's, which deep copies share."""
    store, holder = parts.store, parts.holder
    tiers = {role: NO_TIER if store is None else _tier(store, role) for role in TIERS}
    prefill, decode = (PhaseStats(), PhaseStats()) if store is None else store.counters.phases()
    moves = {} if store is None else store.counters.moves()
    counters = None if store is None else store.counters
    compared, distinct = _distinct(holder)
    return CacheStats(
        mode=parts.mode,
        fallback_reason=parts.fallback_reason,
        tokens=parts.tokens,
        rows=0 if holder is None else len(holder.table),
        block_size=parts.settings.block_size,
        window_tokens=(parts.settings.window or 0) if store is None else store.budget.window_tokens,
        codec=parts.settings.codec,
        hot=tiers["hot"],
        packed=tiers["packed"],
        warm=tiers["warm"],
        cold=tiers["cold"],
        moves=moves,
        verified_blocks=counters.verified_blocks if counters else 0,
        checksum_failures=counters.checksum_failures if counters else 0,
        retries=counters.retries if counters else 0,
        stall_seconds=prefill.stall_seconds + decode.stall_seconds,
        transfer_seconds=sum(move.seconds for move in moves.values()),
        prefill=prefill,
        decode=decode,
        gather_peak_bytes=parts.gather_peak_bytes,
        other_layers_bytes=parts.other_layers_bytes,
        tier_failures=counters.tier_failures if counters else 0,
        graphs=parts.graphs,
        native_failures=_native_failures(parts),
        pinned_bytes=0 if store is None else store.device.pinned_bytes,
        position_exempt=parts.position_exempt,
        tiered_layers=len(parts.tiered),
        block_bytes=0 if store is None else store.hot.slot_bytes,
        unused_bytes=0 if store is None or holder is None else _unused_bytes(store, holder),
        moved_bytes=counters.moved_bytes() if counters else {},
        link_bytes_per_second=dict(counters.link_bytes_per_second) if counters else {},
        pin_failures=() if store is None else store.device.pin_failures,
        graph_cap=GRAPH_CAP,
        duplicate_blocks=compared - distinct,
        compared_blocks=compared,
        waiting_moves=0 if store is None else len(store.waiting),
        sinks=parts.settings.sinks,
        beyond=parts.settings.beyond,
        promotable_blocks=0 if store is None or holder is None else requests.promotable(store, holder),
        held_bytes=0 if store is None else store.mover.held_bytes,
        peak_held_bytes=0 if store is None else store.mover.peak_held_bytes,
        dropped_blocks=0 if holder is None else sum(block.gone for row in holder.table for block in row),
    )


def _native_failures(parts: Parts) -> tuple[str, ...]:
    store = parts.store
    if store is None:
        return ()
    cold = store.tiers.get("cold")
    reads = cold.native_reason if isinstance(cold, ColdTier) else None
    return tuple(filter(None, (parts.native_attention, *store.mover.native_reasons, reads)))


def _unused_bytes(store: BlockStore, holder: Holder) -> int:
    """Hot bytes behind the last token of the rows' last blocks."""
    last = {row[-1].id: row[-1] for row in holder.table if row and row[-1].hot is not None}
    tokens = sum(store.block_size - block.tokens for block in last.values())
    return tokens * store.hot.slot_bytes // store.block_size


def _distinct(holder: Holder | None) -> tuple[int, int]:
    """(blocks with a checksum in every layer, how many different ones): equal bytes have equal checksums."""
    blocks = [] if holder is None else holder.table.blocks()
    sums = [tuple(b.checksums) for b in blocks if b.checksums and None not in b.checksums]
    return len(sums), len(set(sums))


def _tier(store: BlockStore, role: str) -> TierStats:
    tier = store.tiers.get(role)
    if tier is None:
        return NO_TIER
    staging = store.budget.staging_bytes if role == "hot" else 0
    budget = store.budget.hot_bytes - store.budget.packed_bytes if role == "hot" else tier.budget_bytes
    return TierStats(
        budget_bytes=budget,
        used_bytes=tier.used_bytes + staging,
        peak_bytes=tier.peak_bytes + staging,
        reserved_bytes=tier.reserved_bytes + staging,
        blocks=tier.slots.used,
        peak_blocks=tier.slots.peak_live,
        hits=store.counters.hits[role],
    )


def block_table(parts: Parts) -> list[TableEntry]:
    """One entry for each block of each row in each tiered layer."""
    store, holder = parts.store, parts.holder
    if store is None or holder is None:
        return []
    with store.lock:
        tokens = parts.tokens  # with those of a forward that is complete and not yet closed
        return [
            TableEntry(
                row=row_index,
                block_id=block.id,
                layer_id=layer_idx,
                token_range=(index * store.block_size, min((index + 1) * store.block_size, tokens)),
                location=block.location,
                offset=_offset(store, block.location, getattr(block, block.location, None), layer),
                last_access=holder.last_access,
                ref_count=block.refs,
            )
            for row_index, row in enumerate(holder.table)
            for index, block in enumerate(row[: -(-tokens // store.block_size)])
            for layer, layer_idx in enumerate(parts.tiered)
        ]


def _offset(store: BlockStore, location: str, slot: int | None, layer: int) -> int:
    """Bytes from the start of the layer's first plane (in memory) or of a row-ordered file (cold) to the block."""
    if slot is None:
        return -1
    if location == "cold":
        return slot * store.mover.row_bytes[layer]
    plane = store.tiers[location].layers[layer][0]
    return slot * plane.block_bytes // plane.kv_heads
