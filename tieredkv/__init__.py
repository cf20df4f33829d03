"""tieredkv: a KV cache in fixed-size blocks over device memory, host memory and disk, for transformers.

    with tieredkv.TieredCache(model, hot="2GiB", warm="16GiB", cold="/nvme/kv") as cache:
        out = model.generate(**inputs, past_key_values=cache)
        print(cache.stats())

Importing it registers the attention implementation "tieredkv" with transformers, and changes nothing else.
"""

from __future__ import annotations

from tieredkv.advice import Finding
from tieredkv.block_table import TableEntry
from tieredkv.cache import TieredCache
from tieredkv.config import CacheSettings, ColdSettings, Size
from tieredkv.errors import (
    BudgetError,
    ChecksumError,
    ClosedError,
    ColdTierError,
    ConfigError,
    HandleError,
    MismatchError,
    PositionError,
    RaceError,
    SessionError,
    StepError,
    TieredKVError,
    TrainingModeError,
    UnsupportedModelError,
)
from tieredkv.kv_store import KVStore, KVStoreStats
from tieredkv.serving import Engine, EngineSettings, EngineStats, Finish, RequestHandle
from tieredkv.stats import CacheStats, MoveRecord, MoveStats, PhaseStats, TierStats

__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "CacheSettings",
    "CacheStats",
    "ChecksumError",
    "ClosedError",
    "ColdSettings",
    "ColdTierError",
    "ConfigError",
    "Engine",
    "EngineSettings",
    "EngineStats",
    "Finding",
    "Finish",
    "HandleError",
    "KVStore",
    "KVStoreStats",
    "MismatchError",
    "MoveRecord",
    "MoveStats",
    "PhaseStats",
    "PositionError",
    "RaceError",
    "RequestHandle",
    "SessionError",
    "Size",
    "StepError",
    "TableEntry",
    "TierStats",
    "TieredCache",
    "TieredKVError",
    "TrainingModeError",
    "UnsupportedModelError",
    "__version__",
]
