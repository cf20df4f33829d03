"""Rows of a batch that hold the same K and V share blocks: beams and returned sequences, whose prompt came in copies.

The cache sees no token ids, so rows are compared by what they hold: block by block as they seal, chained from the
first. A checksum only nominates; bytes of every layer decide.

Imports: errors, block, blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tieredkv.block import LOWER, TIERS, Block, Planes
from tieredkv.errors import TieredKVError
from tieredkv.store.blocks import BlockStore, Holder

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def merge_rows(store: BlockStore, holder: Holder) -> int:
    """Let rows whose next sealed blocks are bitwise equal in every layer share them.

    Call under the store's lock, after sealing. Blocks that were compared once are not compared again.

    Returns:
        how many blocks were let go.
    """
    full = holder.tokens // store.block_size
    first, holder.merged = min(holder.merged, full), full
    rows = holder.table.rows
    if len(rows) < 2:
        return 0
    return sum(_merge_column(store, holder, index) for index in range(first, full))


def _merge_column(store: BlockStore, holder: Holder, index: int) -> int:
    """Merge the blocks at one place of the rows; only of rows that share everything before it."""
    rows, merged = holder.table.rows, 0
    distinct: dict[int, list[Block]] = {}
    for number, row in enumerate(rows):
        block = row[index]
        if not block.sealed:
            continue
        others = distinct.setdefault(row[index - 1].id if index else -1, [])
        same = next((other for other in others if other is block or _equal(store, other, block)), None)
        if same is None:
            others.append(block)
        elif same is not block:
            same.refs += 1
            holder.table.replace(number, index, same)
            merged += 1
    return merged


def _equal(store: BlockStore, one: Block, other: Block) -> bool:
    """Whether two sealed blocks hold the same bytes in every layer."""
    for a, b in zip(one.checksums, other.checksums, strict=True):
        if a is not None and b is not None and a != b:
            return False
    places = _comparable(store, one, other)
    if places is None:
        return False
    try:
        return all(_equal_layer(store, layer, (one, other), places) for layer in range(len(store.layers)))
    except (TieredKVError, OSError):  # a disk that does not answer: two blocks stay two
        return False


def _comparable(store: BlockStore, one: Block, other: Block) -> tuple[str, str] | None:
    """A tier for each of them where both lie in the same encoding; memory before disk."""
    if one.hot is not None and other.hot is not None and not {one.id, other.id} & store.decoded:
        return ("hot", "hot")
    roles = TIERS
    if not store.codec.lossless:
        store.wait_for((one, other))  # else it would depend on a copy whether the two, and so their bits, are shared
        roles = LOWER
    first = next((role for role in roles if getattr(one, role) is not None), None)
    second = next((role for role in roles if getattr(other, role) is not None), None)
    return None if first is None or second is None else (first, second)


def _equal_layer(store: BlockStore, layer: int, blocks: Sequence[Block], places: Sequence[str]) -> bool:
    reads = [(role, getattr(block, role)) for block, role in zip(blocks, places, strict=True) if role != "cold"]

    def compare() -> bool:
        one, other = (stored(store, layer, block, role) for block, role in zip(blocks, places, strict=True))
        return all(_same_bytes(a, b) for a, b in zip(one, other, strict=True))

    return store.device.run(compare, reads=reads, name="compare")


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit, so that zeros of two signs differ and NaN equals itself."""
    bits = _BITS[one.dtype.itemsize]
    return torch.equal(one.view(bits), other.view(bits).to(one.device))


def stored(store: BlockStore, layer: int, block: Block, role: str) -> Planes:
    """One layer of a block as it lies in a tier, tensors `[kv_heads, 1, *inner]`; in memory a view, unverified.

    Raises:
        ColdTierError: the disk does not answer.
    """
    slot, tier = getattr(block, role), store.tiers[role]
    view = tier.run(layer, slot, 1)
    if view is not None:
        return view
    planes = tuple(plane.empty(1) for plane in tier.layers[layer])
    tier.read(layer, [slot], planes)
    return planes
