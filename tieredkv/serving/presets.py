"""Settings that suit a kind of work: chat, or questions about long documents.

Imports: config, errors, settings.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tieredkv.config import CacheSettings
from tieredkv.errors import ConfigError
from tieredkv.serving.settings import EngineSettings

PRESETS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # Dialogues stay on the device as long as there is room, the system prompt longest; it is stored once, as every
    # common prefix is. Nothing is lossy. Short gaps between tokens come before the time to the first one.
    "chat": (
        {"codec": "raw", "placement": "both", "sinks": 512, "write_down_at": 0.75},
        {"prefill_slowdown": 1.3},
    ),
    # A document leaves the device as soon as it is read, in half the bytes; its question and the answer stay.
    "documents": (
        {"codec": "int8", "placement": "window", "window": 512},
        {"prefill_slowdown": 2.0, "prefill_tokens": 2048},
    ),
}
"""By name: what it sets of `CacheSettings`, and of `EngineSettings`."""


def preset(
    name: str, cache: CacheSettings | None = None, engine: EngineSettings | None = None
) -> tuple[CacheSettings, EngineSettings]:
    """Settings for a kind of work, on top of others.

    Args:
        name: "chat": dialogues stay hot, and the system prompt longest; exact. "documents": what lies before the most
            recent 512 tokens, the question and the answer, goes down at once as int8, which is lossy.
        cache, engine: everything else.

    Raises:
        ConfigError: no such preset.
    """
    if name not in PRESETS:
        raise ConfigError("Unknown preset.", wanted=" or ".join(PRESETS), got=repr(name), change="preset=")
    of_cache, of_engine = PRESETS[name]
    return (
        dataclasses.replace(cache or CacheSettings(), **of_cache),
        dataclasses.replace(engine or EngineSettings(), **of_engine),
    )
