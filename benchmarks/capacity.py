"""How many sequences fit into one KV budget at once? Run: python -m benchmarks.capacity [--quick]

Requests with lengths drawn from a recorded trace wait in line. Four allocators have the same bytes, and admit what
fits; a sequence that cannot grow sends the youngest one back to the head of the line, to be prefilled again once
another has left. No model runs: books of memory are kept token by token, and seconds are computed from `Machine`.
"""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from benchmarks import harness
from benchmarks.allocators import Allocator, Blocks, Concatenated, Preallocated
from benchmarks.harness import Row
from benchmarks.plots import Chart
from tieredkv.eviction.traces import read_trace
from tieredkv.sizing import DEFAULT_BLOCK_SIZE, Rates

TRACES = Path(__file__).parents[2] / "shared" / "traces"
CHAT, CODE = "AzureLLMInferenceTrace_conv.csv", "AzureLLMInferenceTrace_code.csv"

LAYERS = 32
COUNTED_LAYERS = 2
"""Books are kept of two of the 32 layers, with 2/32 of the budget: every layer does the same."""
LAYER_TOKEN_BYTES = 2 * 8 * 128 * 2
"""K and V of one token in one layer: 8 heads of 128 in bf16, as Llama-3-8B."""
BUDGET_BYTES = 8 * 2**30
"""What a 24 GiB card has left beside 16 GB of weights, about."""

LEAST_RATIO = 4.0
CHART_POINTS = 400


@dataclasses.dataclass(frozen=True)
class Machine:
    """From what seconds are computed, the same for every allocator.

    Args:
        weights_bytes: read once in each step: 8.03e9 parameters in bf16.
        flops: of a prefill, 2 x parameters x tokens.
        rates: of the device's memory.
    """

    weights_bytes: float = 16.06e9
    flops: float = 80e12
    rates: Rates = dataclasses.field(default_factory=Rates)

    def seconds(self, kv_bytes: float, prefilled: int) -> float:
        """A step that reads all weights and K/V, and the prefill of as many tokens."""
        read = (self.weights_bytes + kv_bytes) / self.rates.device_bytes_per_second
        return read + self.weights_bytes * prefilled / self.flops


@dataclasses.dataclass(frozen=True)
class Length:
    """One request: tokens of its prompt and of its answer."""

    prompt: int
    answer: int

    @property
    def total(self) -> int:
        """Tokens at its end."""
        return self.prompt + self.answer


@dataclasses.dataclass(frozen=True)
class Sample:
    """One step.

    Args:
        at_seconds: when it began.
        seconds: how long it took.
        running: sequences in memory.
        held_bytes: what they hold.
        used_bytes: what of it holds tokens.
        waiting: whether a request waits that could ever be served.
        tokens: generated since the start.
    """

    at_seconds: float
    seconds: float
    running: int
    held_bytes: int
    used_bytes: int
    waiting: bool
    tokens: int


@dataclasses.dataclass
class Run:
    """What one allocator did with a trace.

    Args:
        samples: one for each step.
        refused: requests that it can never hold.
        sent_back: times that a sequence was sent back to the line.
        prefilled_again: tokens prefilled because of that.
    """

    samples: list[Sample] = dataclasses.field(default_factory=list)
    refused: int = 0
    sent_back: int = 0
    prefilled_again: int = 0

    @property
    def full(self) -> list[Sample]:
        """The steps in which others waited."""
        return [sample for sample in self.samples if sample.waiting] or self.samples

    def mean(self, values: Sequence[float]) -> float:
        """Mean over time of a value of each of `full`."""
        weights = [sample.seconds for sample in self.full]
        return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)

    @property
    def at_once(self) -> float:
        """Sequences in memory, mean over time while others wait."""
        return self.mean([sample.running for sample in self.full])

    @property
    def tokens_per_second(self) -> float:
        """Generated, over the whole run."""
        last = self.samples[-1]
        return last.tokens / (last.at_seconds + last.seconds)


class Line:
    """The requests that wait and run, with one allocator."""

    def __init__(self, allocator: Allocator, requests: Sequence[Length], machine: Machine) -> None:
        self.allocator, self.machine, self.run = allocator, machine, Run()
        # (key, tokens to prefill, tokens still to generate)
        served = [each for each in requests if allocator.serves(each.total)]
        self.run.refused = len(requests) - len(served)
        self.waiting = deque((key, each.prompt, each.answer) for key, each in enumerate(served))
        self.left: dict[int, int] = {}  # running, oldest first: key -> tokens still to generate
        self.seconds, self.tokens, self.prefilled = 0.0, 0, 0
        self.crowded = False  # one was sent back, and none has left since

    def serve(self) -> Run:
        """Step until nothing waits or runs."""
        while self.waiting or self.left:
            self._admit()
            self._step()
        return self.run

    def _admit(self) -> None:
        while self.waiting and not self.crowded:
            key, tokens, left = self.waiting[0]
            reserve = self.allocator.headroom * self.allocator.budget_bytes if self.left else 0
            short = self.allocator.held_bytes + tokens * self.allocator.token_bytes + reserve
            if short > self.allocator.budget_bytes or not self.allocator.admit(key, tokens):
                return
            self.waiting.popleft()
            self.left[key] = left
            self.prefilled += tokens

    def _step(self) -> None:
        for key in list(self.left):
            if key in self.left:
                self._grow(key)
        held, used = self.allocator.held_bytes, self.allocator.used_bytes
        seconds = self.machine.seconds(used * LAYERS / COUNTED_LAYERS, self.prefilled)
        self.run.samples.append(
            Sample(self.seconds, seconds, len(self.left), held, used, bool(self.waiting), self.tokens)
        )
        self.seconds, self.prefilled = self.seconds + seconds, 0
        for key in [key for key, left in self.left.items() if left <= 0]:
            del self.left[key]
            self.allocator.leave(key)
            self.crowded = False
        self.crowded &= bool(self.left)

    def _grow(self, key: int) -> None:
        while not self.allocator.grow(key):
            youngest = next(reversed(self.left))
            self._send_back(youngest)
            if youngest == key:
                return
        self.left[key] -= 1
        self.tokens += 1

    def _send_back(self, key: int) -> None:
        tokens = self.allocator.tokens[key]
        self.allocator.leave(key)
        self.crowded = True
        self.waiting.appendleft((key, tokens, self.left.pop(key)))
        self.run.sent_back += 1
        self.run.prefilled_again += tokens


def lengths(name: str) -> tuple[str, list[Length]]:
    """(where they come from, lengths) of a trace's requests, or of a made-up mix where it is absent."""
    path = TRACES / name
    if path.exists():
        found = [Length(each.input_tokens, each.output_tokens) for each in read_trace(path)]
        return path.stem, [each for each in found if each.prompt and each.answer]
    print(f"{path.name} is not there: lengths are made up")
    drawn = random.Random(0)
    kinds = ((0.6, 400, 150), (0.3, 1500, 250), (0.1, 6000, 400))  # (share, prompt, answer): short, medium, long
    made = []
    for _, prompt, answer in drawn.choices(kinds, [share for share, _, _ in kinds], k=2000):
        made.append(Length(int(prompt * drawn.uniform(0.5, 1.5)), int(answer * drawn.uniform(0.5, 1.5))))
    return "a made-up mix of short, medium and long requests", made


def allocators(requests: Sequence[Length], budget_bytes: int) -> list[Allocator]:
    """The contestants: preallocated to the longest request there is and to the 99th percentile, concatenation, blocks.

    Args:
        requests: all that may come.
        budget_bytes: for all layers.
    """
    budget = budget_bytes * COUNTED_LAYERS // LAYERS
    token_bytes = LAYER_TOKEN_BYTES * COUNTED_LAYERS
    totals = sorted(each.total for each in requests)
    longest, most = totals[-1], totals[int(0.99 * (len(totals) - 1))]
    return [
        Preallocated(budget, token_bytes, longest),
        Preallocated(budget, token_bytes, most),
        Concatenated(budget, token_bytes, 2 * COUNTED_LAYERS),
        Blocks(budget, token_bytes, DEFAULT_BLOCK_SIZE),
    ]


def rows_of(kind: str, allocator: Allocator, run: Run) -> list[Row]:
    """The figures of one allocator."""
    full, budget = run.full, allocator.budget_bytes
    scale = LAYERS / COUNTED_LAYERS
    internal = run.mean([(sample.held_bytes - sample.used_bytes) / budget for sample in full])
    external = run.mean([(budget - sample.held_bytes) / budget for sample in full])
    name = f"{kind}, {allocator.name}"
    detail = {"refused": run.refused, "sent_back": run.sent_back, "prefilled_again_tokens": run.prefilled_again}
    return [
        Row(f"{name}: sequences at once", run.at_once, "", detail=detail),
        Row(f"{name}: held without a token in it (internal)", 100 * internal, "% of the budget"),
        Row(f"{name}: free, and too little for the next one (external)", 100 * external, "% of the budget"),
        Row(f"{name}: peak", max(each.held_bytes for each in run.samples) * scale / 2**30, "GiB"),
        Row(f"{name}: generated (computed seconds)", run.tokens_per_second, "tokens/s"),
        Row(f"{name}: sent back to the line", run.sent_back, "times"),
        Row(f"{name}: refused for their length", run.refused, "requests"),
    ]


def thinned(run: Run) -> list[Sample]:
    """At most so many samples, evenly taken."""
    return run.samples[:: max(1, len(run.samples) // CHART_POINTS)]


def trace_figures(kind: str, name: str, count: int, budget_bytes: int) -> tuple[list[Row], list[Chart]]:
    """Every allocator on one trace, and how blocks compare with preallocation."""
    source, every = lengths(name)
    requests = random.Random(0).sample(every, count)
    contestants = allocators(every, budget_bytes)
    runs = {each.name: Line(each, requests, Machine()).serve() for each in contestants}
    rows = [row for each in contestants for row in rows_of(kind, each, runs[each.name])]
    ours = runs[contestants[-1].name]
    detail = {"source": source, "requests": count, "budget_bytes": budget_bytes}
    for index, longest in enumerate((True, False)):
        reserved = runs[contestants[index].name]
        against = f"blocks over {contestants[index].name}" + ("" if longest else " (99 % of requests)")
        ratio, asked = ours.at_once / reserved.at_once, longest and kind == "chat"
        must, reached = (f">= {LEAST_RATIO:g}", ratio >= LEAST_RATIO) if asked else ("", None)
        rows.insert(2 * index, Row(f"{kind}: sequences at once, {against}", ratio, "x", must, reached, detail))
        faster = ours.tokens_per_second / reserved.tokens_per_second
        rows.insert(2 * index + 1, Row(f"{kind}: tokens a second (computed), {against}", faster, "x"))
    note = (
        f"{count:,} requests of {source}; K/V of Llama-3-8B in bf16, {budget_bytes // 2**30} GiB; seconds are computed"
    )
    shared = {"x_label": "seconds", "note": note, "marks": False}
    at_once = {n: [(each.at_seconds, float(each.running)) for each in thinned(run)] for n, run in runs.items()}
    speed = {n: speeds(run) for n, run in runs.items()}
    return rows, [
        Chart(f"{kind}_at_once", f"{kind}: sequences in memory at once", y_label="sequences", series=at_once, **shared),
        Chart(f"{kind}_speed", f"{kind}: tokens generated a second", y_label="tokens/s", series=speed, **shared),
    ]


def speeds(run: Run, windows: int = 40) -> list[tuple[float, float]]:
    """Tokens a second over stretches of the time."""
    end = run.samples[-1].at_seconds + run.samples[-1].seconds
    points, last = [], run.samples[0]
    for sample in run.samples:
        if sample.at_seconds - last.at_seconds >= end / windows:
            span = sample.at_seconds - last.at_seconds
            points.append((sample.at_seconds, (sample.tokens - last.tokens) / span))
            last = sample
    return points


def figures(quick: bool) -> tuple[list[Row], list[Chart]]:
    """The chat trace, then the code trace."""
    count, budget_bytes = (60, BUDGET_BYTES // 4) if quick else (1000, BUDGET_BYTES)
    chat, chat_charts = trace_figures("chat", CHAT, count, budget_bytes)
    code, code_charts = trace_figures("code", CODE, count, budget_bytes)
    return chat + code, chat_charts + code_charts


def main() -> None:
    """Measure, print, write."""
    harness.answer("capacity", __doc__, figures)


if __name__ == "__main__":
    main()
