"""What an engine has done: counters and sums that it adds to, as a record.

Imports nothing of the package.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class EngineStats:
    """Counts since the engine was made, and what it holds now.

    Args:
        running: requests that decode.
        waiting: requests that wait for their prompt to be read in, preempted ones too.
        paused: of these, the ones whose blocks were taken away.
        steps: forwards.
        prompt_tokens: tokens of the prompts whose prefill was begun.
        attached_tokens: of these, how many were found in the store.
        prefilled_tokens: tokens computed for prompts, and again for preempted requests.
        new_tokens: tokens generated.
        finished: requests that ended, by reason.
        preempted: how often a request's blocks were taken away.
        step_seconds: time in steps.
        model_seconds: of this, time in the model's forward.
    """

    running: int = 0
    waiting: int = 0
    paused: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    attached_tokens: int = 0
    prefilled_tokens: int = 0
    new_tokens: int = 0
    finished: dict[str, int] = dataclasses.field(default_factory=dict)
    preempted: int = 0
    step_seconds: float = 0.0
    model_seconds: float = 0.0

    def ended(self, reason: str) -> None:
        """Count a request that ended."""
        self.finished[reason] = self.finished.get(reason, 0) + 1

    def copy(self) -> EngineStats:
        """The same figures, which no longer change."""
        return dataclasses.replace(self, finished=dict(self.finished))


@dataclasses.dataclass(frozen=True)
class Room:
    """How many tokens fit.

    Args:
        token_bytes: K and V of one token, over all layers, as the device holds them.
        tier_tokens: tokens that each tier holds; None where the disk alone limits it.
        capacity_tokens: of all tiers together, or None.
    """

    token_bytes: int
    tier_tokens: dict[str, int | None]
    capacity_tokens: int | None

    def sequences(self, tokens: int) -> int | None:
        """How many sequences of so many tokens fit at once; None where the disk alone limits them."""
        return None if self.capacity_tokens is None else self.capacity_tokens // tokens
