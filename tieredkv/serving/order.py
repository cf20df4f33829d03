"""Who comes next, who gives way, and how much of a prompt is read in beside others' tokens. Decides; moves nothing.

Imports: request.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from tieredkv.serving.request import Request


def urgency(request: Request, step: int, ageing_steps: int) -> tuple[int, int]:
    """Sorts the most urgent request first: by priority, which rises with the steps it has waited, then by arrival."""
    aged = request.priority + (step - request.arrived_step) // ageing_steps
    return (-aged, request.handle.number)


def next_to_prefill(
    waiting: Iterable[Request], reading: Sequence[Request], step: int, ageing_steps: int, block_size: int
) -> Iterator[Request]:
    """The waiting requests in the order in which they may begin; take as many as there is room for.

    One whose prompt begins like one that is being read in, or was yielded before, waits for it rather than computing
    the same blocks again.
    """
    computing: dict[tuple[str, bytes], list[Request]] = {}
    for request in reading:
        computing.setdefault(request.head(block_size), []).append(request)
    for request in sorted(waiting, key=lambda each: urgency(each, step, ageing_steps)):
        alike = computing.setdefault(request.head(block_size), [])
        shares = any(_shares_blocks(request, other, block_size) for other in alike)
        request.handle.waits_for = "the same prompt's prefix, which another request is computing" if shares else None
        if not shares:
            alike.append(request)
            yield request


def _shares_blocks(request: Request, other: Request, block_size: int) -> bool:
    """Whether another request, with the same salt, is computing a full block that this one begins with."""
    if other is request:
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

    What a step takes without a prompt has to be seen to be known: now and then, and when many more requests decode, one
    step takes no prompt tokens.

    Args:
        most_tokens: in one step.
        slowdown: how many times longer than without a prompt a step may take.
    """

    LEAST_TOKENS = 8
    START_TOKENS = 64
    STALE_STEPS = 32
    """Steps with a prompt after which one without is due."""
    STALE_GROWTH = 1.25
    """Growth of the decoding requests after which one is."""
    _KEEP = 0.8

    def __init__(self, most_tokens: int, slowdown: float) -> None:
        self._most_tokens, self._slowdown = most_tokens, slowdown
        self._step_seconds: float | None = None
        self._step_decoding = 0
        self._since = 0
        self._token_seconds: float | None = None

    def tokens(self, decoding: int) -> int:
        """Most prompt tokens of the next step; 0 where it is to be seen what a step takes without."""
        if not decoding:
            return self._most_tokens
        grown = decoding > self.STALE_GROWTH * self._step_decoding
        if self._step_seconds is None or grown or self._since >= self.STALE_STEPS:
            return 0
        if self._token_seconds is None:
            return min(self.START_TOKENS, self._most_tokens)
        room_seconds = (self._slowdown - 1) * self._step_seconds
        return int(min(max(room_seconds / max(self._token_seconds, 1e-9), self.LEAST_TOKENS), self._most_tokens))

    def took(self, seconds: float, prompt_tokens: int, decoding: int) -> None:
        """A step was made."""
        if not decoding:
            return
        if not prompt_tokens:
            known = None if decoding > self.STALE_GROWTH * self._step_decoding else self._step_seconds
            self._step_seconds = self._mean(known, seconds)
            self._step_decoding, self._since = decoding, 0
            return
        self._since += 1
        if self._step_seconds is not None:
            each = max(seconds - self._step_seconds, 0.0) / prompt_tokens
            self._token_seconds = self._mean(self._token_seconds, each)

    def _mean(self, old: float | None, new: float) -> float:
        return new if old is None else self._KEEP * old + (1 - self._KEEP) * new
