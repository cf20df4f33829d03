"""Many requests on one model: continuous batching over caches of one store, presets, and an endpoint over HTTP.

`endpoint`, a package of its own, and `metrics` need the packages of the extra `serve`, and are not imported here.

Imports: everything to its left.
"""

from __future__ import annotations

from tieredkv.serving.engine import Engine
from tieredkv.serving.presets import preset
from tieredkv.serving.request import Finish, RequestHandle
from tieredkv.serving.settings import EngineSettings
from tieredkv.serving.stats import EngineStats, Room
from tieredkv.serving.timings import Timings

__all__ = ["Engine", "EngineSettings", "EngineStats", "Finish", "RequestHandle", "Room", "Timings", "preset"]
