"""Choices of an engine, checked when they are made.

Imports: errors.
"""

from __future__ import annotations

import dataclasses

from tieredkv.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class EngineSettings:
    """Choices of an engine.

    Args:
        max_running: most requests that hold blocks at once.
        max_model_len: most tokens of a request, prompt and new ones; None for what the tiers hold.
        prefill_tokens: most prompt tokens in one step.
        prefill_slowdown: how many times longer a step may take while a prompt is read in beside decoding requests.
        ageing_steps: steps of waiting after which a request's priority rises by one.
    """

    max_running: int = 64
    max_model_len: int | None = None
    prefill_tokens: int = 1024
    prefill_slowdown: float = 1.5
    ageing_steps: int = 256

    def __post_init__(self) -> None:
        if min(self.max_running, self.prefill_tokens, self.ageing_steps) < 1 or self.prefill_slowdown <= 1:
            raise ConfigError(
                "An engine cannot run like that.",
                wanted="max_running, prefill_tokens, ageing_steps >= 1 and prefill_slowdown > 1",
                got=repr(self),
                change="leave them at their defaults",
            )
