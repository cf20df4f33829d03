"""What do many requests on one model get? Run: python -m benchmarks.serving [--quick] [--only NAME]

In one process on `tieredkv.Engine`, without HTTP; `tieredkv stress` measures servers. Speed and fairness are those of
SmolLM2-135M in fp32, contestants in turns; memory, sharing and the soak count bytes, blocks and tokens, which are the
same for every model, on one of two layers.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import torch

from benchmarks import harness
from benchmarks import serving_fairness as fairness
from benchmarks import serving_memory as memory
from benchmarks import serving_speed as speed
from benchmarks.harness import Row
from benchmarks.plots import Chart
from benchmarks.serving_load import Subject, small, smollm2
from tieredkv.loadtest.markdown import number

Measured = tuple[list[Row], list[Chart]]


def mixed(real: Subject, tiny: Subject, quick: bool) -> Measured:
    """Prompts of all lengths: over `generate`, over `generate_batch`, and whether they say the same."""
    found = speed.mixed_load(real, quick)
    rows = [speed.over_sequential(found), speed.over_generate_batch(found), *speed.same_output(found)]
    return rows, []


def decoding(real: Subject, tiny: Subject, quick: bool) -> Measured:
    """Long answers after short prompts."""
    return [speed.decoding(real, quick)], []


def concurrency(real: Subject, tiny: Subject, quick: bool) -> Measured:
    """Bytes as concurrency rises."""
    rows, chart = memory.against_concurrency(tiny, quick)
    return rows, [chart]


def at_once(real: Subject, tiny: Subject, quick: bool) -> Measured:
    """Sequences at once on equal bytes."""
    return [memory.at_once(tiny, quick)], []


def long_prefill(real: Subject, tiny: Subject, quick: bool) -> Measured:
    """Short chats beside a long prompt."""
    return [fairness.long_prefill(real, quick)], []


def hog(real: Subject, tiny: Subject, quick: bool) -> Measured:
    """Equals beside a hog."""
    return [fairness.hog(real, quick)], []


def shared_prompt(real: Subject, tiny: Subject, quick: bool) -> Measured:
    """A shared system prompt."""
    return memory.shared_prompt(tiny, quick), []


def overhead(real: Subject, tiny: Subject, quick: bool) -> Measured:
    """What the engine takes outside the model."""
    return [speed.overhead(real, quick)], []


def soak(real: Subject, tiny: Subject, quick: bool) -> Measured:
    """Many requests with cancels."""
    return memory.soak(tiny, quick), []


PARTS: dict[str, Callable[[Subject, Subject, bool], Measured]] = {
    part.__name__: part
    for part in (mixed, decoding, concurrency, at_once, long_prefill, hog, shared_prompt, overhead, soak)
}


def figures(quick: bool, only: list[str] | None = None) -> Measured:
    """Every part, or those named."""
    tiny = small()
    real = tiny if quick else smollm2()
    rows: list[Row] = []
    charts: list[Chart] = []
    for name in only or PARTS:
        started = time.perf_counter()
        more, drawn = PARTS[name](real, tiny, quick)
        print(f"{name}: {time.perf_counter() - started:.0f} s", file=sys.stderr)
        rows += more
        charts += drawn
        if only:
            for row in more:
                print(row.measure, number(row.value), row.unit, row.must, row.detail, flush=True)
    return rows, charts


def main() -> None:
    """Measure, print, write; a part alone is printed."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--only", nargs="+", choices=PARTS)
    chosen, rest = parser.parse_known_args()
    sys.argv[1:] = rest
    if not chosen.only:
        harness.answer("serving", __doc__, figures)
        return
    with torch.no_grad():
        figures("--quick" in rest, chosen.only)


if __name__ == "__main__":
    main()
