"""The tiers that hold blocks: hot (device), warm (host) and cold (disk), behind one interface.

Imports: its own modules.
"""

from __future__ import annotations

from tieredkv.tiers.base import Empty, SlotRun, Tier, copy_blocks, runs, slot_bytes
from tieredkv.tiers.cold import ColdTier, blocks_per_file, cold_bytes
from tieredkv.tiers.hot import HotTier
from tieredkv.tiers.native_moves import NativeMoves
from tieredkv.tiers.populate import Populating
from tieredkv.tiers.rows import check_rows, pack_rows, row_bytes, unpack_rows
from tieredkv.tiers.slots import SlotPool
from tieredkv.tiers.warm import WarmTier

__all__ = [
    "ColdTier",
    "Empty",
    "HotTier",
    "NativeMoves",
    "Populating",
    "SlotPool",
    "SlotRun",
    "Tier",
    "WarmTier",
    "blocks_per_file",
    "check_rows",
    "cold_bytes",
    "copy_blocks",
    "pack_rows",
    "row_bytes",
    "runs",
    "slot_bytes",
    "unpack_rows",
]
