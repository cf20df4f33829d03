"""What is asked: lengths of prompts and answers, and when each is sent.

Imports: errors, eviction's trace readers, settings.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from tieredkv.errors import ConfigError
from tieredkv.eviction.traces import read_trace
from tieredkv.loadtest.settings import MIX, LoadSettings

KINDS = ((0.6, 400, 150), (0.3, 1500, 250), (0.1, 6000, 400))
"""Of the built-in mix: (share, tokens of the prompt, of the answer) of short, medium and long requests. Each length is
drawn from half to one and a half of it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ask:
    """One request that is to be sent.

    Args:
        number: of the request, from 0.
        prompt_tokens: length of its prompt.
        answer_tokens: most tokens of its answer.
        at_seconds: when it is sent in an open loop, since the start.
    """

    number: int
    prompt_tokens: int
    answer_tokens: int
    at_seconds: float = 0.0

    @property
    def tokens(self) -> int:
        """Of prompt and answer together."""
        return self.prompt_tokens + self.answer_tokens


@dataclasses.dataclass(frozen=True)
class Part:
    """Requests that are sent under one rule.

    Args:
        asks: in the order of sending.
        concurrency: how many are kept going at once; None where each is sent at its time.
    """

    asks: Sequence[Ask]
    concurrency: int | None


def parts_of(settings: LoadSettings) -> list[Part]:
    """All that is to be sent: one part, or those of a ramp.

    Raises:
        ConfigError: the trace cannot be read, or no request of it is short enough.
    """
    asks = _asks(settings)
    if settings.is_open:
        return [Part(_timed(asks, settings), None)]
    return ramp(asks, settings.at_once) if settings.ramp else [Part(asks, settings.at_once)]


def ramp(asks: Sequence[Ask], most: int) -> list[Part]:
    """From short and few to long and many: 1, 2, 4 … requests at once, with the same number of requests each."""
    counts = [2**power for power in range(most.bit_length()) if 2**power < most] + [most]
    ordered = sorted(asks, key=lambda ask: ask.tokens)
    borders = [len(ordered) * index // len(counts) for index in range(len(counts) + 1)]
    return [
        Part(ordered[first:last], count)
        for count, first, last in zip(counts, borders, borders[1:], strict=False)
        if first < last
    ]


def _asks(settings: LoadSettings) -> list[Ask]:
    drawn = random.Random(settings.seed)
    found: list[Ask] = []
    if settings.trace is not None:
        recorded = read_trace(settings.trace)
        found = [Ask(0, each.input_tokens, each.output_tokens, each.at_seconds) for each in recorded]
        found = [ask for ask in found if ask.prompt_tokens and ask.answer_tokens]
    elif settings.shape == MIX:
        # More than are wanted, since those that are too long are left out.
        for _, prompt, answer in drawn.choices(KINDS, [share for share, _, _ in KINDS], k=10 * settings.requests):
            found.append(Ask(0, int(prompt * drawn.uniform(0.5, 1.5)), int(answer * drawn.uniform(0.5, 1.5))))
    else:
        prompt, answer = (int(tokens) for tokens in settings.shape.split(":"))
        found = [Ask(0, prompt, answer)] * settings.requests
    kept = [ask for ask in found if settings.longest is None or ask.tokens <= settings.longest][: settings.requests]
    if not kept:
        raise ConfigError(
            "There is nothing to send.",
            wanted=f"requests of at most {settings.longest} tokens",
            got=f"{len(found)} longer ones",
            change="raise --longest, or pass another trace or shape",
        )
    return [dataclasses.replace(ask, number=number) for number, ask in enumerate(kept)]


def _timed(asks: Sequence[Ask], settings: LoadSettings) -> list[Ask]:
    if settings.rate is None:
        start = asks[0].at_seconds
        return [dataclasses.replace(ask, at_seconds=(ask.at_seconds - start) * settings.scale) for ask in asks]
    drawn, at, timed = random.Random(settings.seed), 0.0, []
    for ask in asks:
        timed.append(dataclasses.replace(ask, at_seconds=at))
        at += drawn.expovariate(settings.rate)
    return timed
