"""Published blocks on disk: durable, self-describing, found again by hash, shared by processes.

What a running cache spills is the cold tier's (tieredkv.tiers.cold); what is published here outlives it. The format is
told in docs/decisions/0008-published-files.md.

Imports: this package.
"""

from __future__ import annotations

from tieredkv.durable.blocks import DurableBlocks
from tieredkv.durable.identity import BlockRecord, Identity, salt_digest
from tieredkv.durable.reading import Piece
from tieredkv.durable.settings import DurableSettings
from tieredkv.durable.stats import DurableStats

__all__ = [
    "BlockRecord",
    "DurableBlocks",
    "DurableSettings",
    "DurableStats",
    "Identity",
    "Piece",
    "salt_digest",
]
