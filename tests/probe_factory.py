"""A factory for the public-report probes: a `TieredCache` whose hot tier holds 64 tokens for each row, in blocks of 16.

Run: `make probes` (needs the probes beside the checkout).
"""

from __future__ import annotations

import tempfile
from typing import Any

import tieredkv

_folder = tempfile.TemporaryDirectory(prefix="tieredkv-probes-")


def factory(config: Any) -> tieredkv.TieredCache:
    """A new cache for a config: 64 tokens hot, 32 warm, the rest in a temporary folder."""
    return tieredkv.TieredCache(config, hot="64 tokens", warm="32 tokens", cold=_folder.name, block_size=16, window=16)
