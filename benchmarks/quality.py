"""What does a codec lose in what a model finds? Run: python -m benchmarks.quality [--quick]

SmolLM2-135M-Instruct reads prose in which facts are planted, through a cache whose full blocks all went through the
codec (as in `benchmarks.codecs`; a cache does better, since what is hot is exact). Needle: one fact, at several depths
and lengths, and whether the model's own answer holds it. Facts: dates and numbers, and whether each digit is the
likeliest next token when the sentence begins again. Error: of attention over a whole prompt, by its length.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks import harness
from benchmarks.codecs import EncodedCache
from benchmarks.harness import Row
from benchmarks.plots import Chart
from tieredkv.cli.model import load
from tieredkv.cli.prompt import python_prose
from tieredkv.codecs import CODEC_NAMES, get_codec

DEPTHS = (0.1, 0.5, 0.9)
NEEDLE = "The secret number of the archive is {number}."
FACTS = (
    "The contract of {name} was signed on {day} {month} {year}.",
    "The invoice of {name} comes to {amount} dollars.",
    "The meter of {name} stood at {amount} units.",
)
MONTHS = ("January", "March", "May", "July", "August", "October")
NAMES = ("Alder", "Birch", "Cedar", "Elm", "Fir", "Hazel", "Larch", "Maple", "Oak", "Pine", "Rowan", "Willow")
MOST_LOSS = 0.0
"""Points of exact recall that int8 may lose against raw."""


@functools.cache
def loaded() -> Any:
    """The model and its tokenizer."""
    return load(None, torch.float32, "cpu")


def ids_of(text: str) -> list[int]:
    """Token ids, without special ones."""
    return list(loaded().tokenizer(text, add_special_tokens=False).input_ids)


def prose(tokens: int) -> list[int]:
    """The first tokens of the prose."""
    return ids_of(python_prose()[: 8 * tokens])[:tokens]


def read(ids: Sequence[int], codec: str) -> tuple[Any, torch.Tensor]:
    """(cache, hidden states of all tokens `[tokens, hidden]`) of one forward through a codec."""
    model = loaded().model
    cache = EncodedCache(model.config, get_codec(codec))
    out = model.model(torch.tensor([list(ids)]), cache=cache, use_cache=True)
    return cache, out.last_hidden_state[0]


def needle_found(tokens: int, depth: float, codec: str) -> bool:
    """Whether the likeliest continuation of the needle's beginning, at the end of the text, is its number."""
    number = str(random.Random(f"{tokens} {depth}").randint(10000, 99999))
    needle, text = ids_of(" " + NEEDLE.format(number=number)), prose(tokens)
    at = int(depth * tokens)
    question = ids_of("\n\n" + NEEDLE.split("{")[0].rstrip())
    return digits_right([*text[:at], *needle, *text[at:], *question], ids_of(f" {number}"), codec) == 1.0


def digits_right(ids: Sequence[int], answer: Sequence[int], codec: str) -> float:
    """Share of the answer's tokens that are the likeliest one, given those before them."""
    _, hidden = read([*ids, *answer[:-1]], codec)
    best = loaded().model.lm_head(hidden[-len(answer) :]).argmax(-1)
    return sum(int(a) == b for a, b in zip(best, answer, strict=True)) / len(answer)


def facts(count: int) -> list[str]:
    """Sentences with dates and numbers, the same at each call."""
    drawn = random.Random(0)
    return [
        FACTS[index % len(FACTS)].format(
            name=f"{NAMES[index % len(NAMES)]} {NAMES[(index * 5 + 3) % len(NAMES)]}",
            day=drawn.randint(1, 28),
            month=drawn.choice(MONTHS),
            year=drawn.randint(1900, 2030),
            amount=drawn.randint(1000, 99999),
        )
        for index in range(count)
    ]


def recall(tokens: int, count: int, codec: str) -> tuple[float, float]:
    """(share of facts recalled whole, share of their tokens) when each sentence is begun again at the end of the text.

    All questions are one forward: each fact's sentence follows the text and the questions before it.
    """
    planted, text = [ids_of(" " + fact) for fact in facts(count)], prose(tokens)
    gap = len(text) // count
    ids = [token for i, fact in enumerate(planted) for token in [*text[i * gap : (i + 1) * gap], *fact]]
    asked = []
    order = list(range(count))
    random.Random(1).shuffle(order)
    ids += ids_of("\n\n")
    for index in order:
        words = facts(count)[index].split(" ")
        shown = next(i for i, word in enumerate(words) if any(c.isdigit() for c in word))
        begin, rest = ids_of(" " + " ".join(words[:shown])), ids_of(" " + " ".join(words[shown:]))
        asked.append((len(ids) + len(begin), rest))
        ids += [*begin, *rest]
    _, hidden = read(ids, codec)
    head, right, whole = loaded().model.lm_head, 0, 0
    for start, rest in asked:
        best = head(hidden[start - 1 : start - 1 + len(rest)]).argmax(-1)
        same = sum(int(a) == b for a, b in zip(best, rest, strict=True))
        right, whole = right + same, whole + (same == len(rest))
    return whole / count, right / sum(len(rest) for _, rest in asked)


def errors(states: Callable[[str], torch.Tensor], lengths: Sequence[int]) -> dict[str, list[tuple[float, float]]]:
    """For each lossy codec (tokens, error): mean distance of hidden states from the exact ones over their mean length.

    Each point is the mean over the 256 tokens before that length.

    Args:
        states: a codec's hidden states `[tokens, hidden]` of one text of the greatest length; a token's depend on those
            before it alone.
        lengths: where to look.
    """
    exact, found = states("raw"), {}
    for codec in CODEC_NAMES[1:]:
        apart, size = (states(codec) - exact).norm(dim=-1), exact.norm(dim=-1)
        found[codec] = [(float(n), float(apart[n - 256 : n].mean() / size[n - 256 : n].mean())) for n in lengths]
    return found


def figures(quick: bool) -> tuple[list[Row], list[Chart]]:
    """Needles, facts, errors."""
    needles, depths = ([256], DEPTHS[1:2]) if quick else ([1024, 3072], DEPTHS)
    rows: list[Row] = []
    shares = {}
    for codec in CODEC_NAMES:
        grid = {f"{n} tokens, depth {d}": needle_found(n, d, codec) for n in needles for d in depths}
        rows.append(Row(f"{codec}: needles found", 100 * sum(grid.values()) / len(grid), "%", detail=grid))
    count, tokens = (2, 256) if quick else (24, 4096)
    for codec in CODEC_NAMES:
        shares[codec], part = recall(tokens, count, codec)
        must, reached = ("", None)
        if codec == "int8" and not quick:
            must, reached = "as raw", shares[codec] >= shares["raw"] - MOST_LOSS
        title = f"{codec}: dates and numbers recalled whole, {count} in {tokens:,} tokens"
        rows.append(Row(title, 100 * shares[codec], "%", must, reached, {"share_of_tokens": part}))
    lengths = [256] if quick else [512, 1024, 2048, 4096, 8192]
    ids = prose(lengths[-1])
    lines = errors(lambda codec: read(ids, codec)[1], lengths)
    rows += [
        Row(f"{name}: error of the last states, {n:,.0f} tokens", e, "")
        for name, line in lines.items()
        for n, e in line
    ]
    note = "mean distance from the exact states over their length, 256 tokens before each point"
    title = "SmolLM2-135M: error of the last hidden states"
    return rows, [Chart("error", title, "tokens", "", lines, log_x=True, log_y=True, note=note)]


def main() -> None:
    """Measure, print, write."""
    harness.answer("quality", __doc__, figures)


if __name__ == "__main__":
    main()
