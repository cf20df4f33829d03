"""Who comes next, who gives way, and how much of a prompt is read in beside others' tokens. Decides; moves nothing.

Imports: request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from tieredkv.serving.request import Request


def urgency(request: Request, step: int, ageing_steps: int) -> tuple[int, int]:
    """Sorts the most urgent request first: by priority, which rises with the steps it has waited, then by arrival."""
    aged = request.priority + (step - request.arrived_step) // ageing_steps
    return (-aged, request.handle.number)


def next_to_prefill(
    waiting: Iterable[Request], reading: Sequence[Request], step: int, ageing_steps: int, block_size: int
) -> list[Request]:
    """The waiting requests in the order in which they may begin.

    One whose prompt begins like one that is being read in waits for it rather than computing the same blocks again.
    """
    order: list[Request] = []
    for request in sorted(waiting, key=lambda each: urgency(each, step, ageing_steps)):
        shares = any(_shares_blocks(request, other, block_size) for other in (*reading, *order))
        request.handle.waits_for = "the same prompt's prefix, which another request is computing" if shares else None
        if not shares:
            order.append(request)
    return order


def _shares_blocks(request: Request, other: Request, block_size: int) -> bool:
    """Whether another request is computing a full block that this one begins with."""
    if other is request or other.salt != request.salt:
        return False
    most = min(request.length - 1, other.length) // block_size * block_size
    first = other.prefilled // block_size * block_size if other.cache is not None else 0
    if most <= first:
        return False
    return bool(torch.equal(request.ids[: first + block_size], other.ids[: first + block_size]))


def victim(holding: Iterable[Request], step: int, ageing_steps: int) -> Request | None:
    """The request that gives way: the least urgent, and of equals the newest."""
    return max(holding, key=lambda each: urgency(each, step, ageing_steps), default=None)


class PromptPace:
    """How many prompt tokens a step may take beside decoding requests, from what steps took so far.

    Args:
        most_tokens: in one step.
        slowdown: how many times longer than without a prompt a step may take.
    """

    LEAST_TOKENS = 16
    START_TOKENS = 64
    _KEEP = 0.8

    def __init__(self, most_tokens: int, slowdown: float) -> None:
        self._most_tokens, self._slowdown = most_tokens, slowdown
        self._step_seconds: float | None = None
        self._token_seconds: float | None = None

    def tokens(self, decoding: int) -> int:
        """Most prompt tokens of the next step."""
        if not decoding:
            return self._most_tokens
        if self._step_seconds is None or self._token_seconds is None:
            return min(self.START_TOKENS, self._most_tokens)
        room_seconds = (self._slowdown - 1) * self._step_seconds
        return int(min(max(room_seconds / max(self._token_seconds, 1e-9), self.LEAST_TOKENS), self._most_tokens))

    def took(self, seconds: float, prompt_tokens: int, decoding: int) -> None:
        """A step was made."""
        if not prompt_tokens:
            self._step_seconds = self._mean(self._step_seconds, seconds)
        elif self._step_seconds is not None and decoding:
            each = max(seconds - self._step_seconds, 0.0) / prompt_tokens
            self._token_seconds = self._mean(self._token_seconds, each)

    def _mean(self, old: float | None, new: float) -> float:
        return new if old is None else self._KEEP * old + (1 - self._KEEP) * new
