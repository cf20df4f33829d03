"""The store owns blocks apart from caches, and alone coordinates their moves.

blocks: the store itself. holders: the caches that hold blocks of it. opening: sizes and tiers. planner: begin, commit,
roll back, seal a forward. reads and writes: where its tokens are read and written. gather: whole K/V of a layer.
requests: reserve, demote, promote.

Imports: everything to its left.
"""

from __future__ import annotations

from tieredkv.store.blocks import BlockStore, Holder
from tieredkv.store.gather import gather, read_layer
from tieredkv.store.reads import steady
from tieredkv.store.writes import check_tensors, write

__all__ = ["BlockStore", "Holder", "check_tensors", "gather", "read_layer", "steady", "write"]
