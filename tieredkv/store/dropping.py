"""Blocks that are freed because they left the window for good (`beyond="drop"`, which is lossy).

Imports: errors, block, blocks.
"""

from __future__ import annotations

from tieredkv.block import Block
from tieredkv.errors import ConfigError
from tieredkv.store.blocks import BlockStore, Holder


def gone_block(store: BlockStore) -> Block:
    """What stands in a table for a full block that is seen no more; it has no slot, and is sealed with the others."""
    block = store.new_block()
    block.gone, block.tokens = True, store.block_size
    return block


def drop_hidden(store: BlockStore, holder: Holder) -> None:
    """Free the blocks that no forward from here on sees. Call under the store's lock, between two forwards."""
    if store.visibility is None:
        return
    hidden = store.visibility.droppable(holder.tokens)
    for index, row in enumerate(holder.table):
        for number in range(max(hidden.start, holder.table.dropped), hidden.stop):
            if not row[number].gone:
                stand_in = gone_block(store)
                stand_in.sealed = row[number].sealed
                holder.table.replace(index, number, stand_in)
    holder.table.dropped = max(holder.table.dropped, hidden.stop)


def check_seen(store: BlockStore, holder: Holder, tokens: int) -> None:
    """Refuse a cut to `tokens` tokens after which the next query would see some that were dropped.

    Raises:
        ConfigError: it would.
    """
    if store.visibility is None or not tokens:
        return
    first = store.visibility.hidden(tokens).stop
    last = -(-tokens // store.block_size)
    if any(block.gone for row in holder.table for block in row[first:last]):
        raise ConfigError(
            "Tokens that the next one would see were dropped.",
            wanted=f'with beyond="drop", a crop that keeps the window of {store.settings.window} tokens',
            got=f"a crop from {holder.tokens} to {tokens} tokens",
            change='crop less, reset the cache and prefill again, or beyond="demote"',
        )


def refuse_dropped(store: BlockStore) -> None:
    """Refuse to put all K and V together where some are to be seen no more.

    Raises:
        ConfigError: blocks beyond the window are dropped.
    """
    if store.visibility is not None:
        raise ConfigError(
            'beyond="drop" needs attention over blocks: there are no whole K and V.',
            wanted='the attention implementation "tieredkv" in every layer, from the first forward on',
            got="whole K and V asked for: another attention, gather_layer, or pickle",
            change='TieredCache(model) instead of TieredCache(model.config), or beyond="demote"',
        )
