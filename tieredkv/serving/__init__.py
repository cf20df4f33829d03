"""Many requests on one model: continuous batching over caches of one store.

Imports: everything to its left.
"""

from __future__ import annotations

from tieredkv.serving.engine import Engine
from tieredkv.serving.request import Finish, RequestHandle
from tieredkv.serving.settings import EngineSettings
from tieredkv.serving.stats import EngineStats

__all__ = ["Engine", "EngineSettings", "EngineStats", "Finish", "RequestHandle"]
