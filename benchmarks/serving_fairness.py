"""What requests do to each other: a long prompt beside chats, a hog among equals. Part of the serving question."""

from __future__ import annotations

import itertools
import statistics
import time

from benchmarks.harness import Row
from benchmarks.serving_load import Subject, Watch, greedy, percentile, serving

CHATS = 8


def long_prefill(subject: Subject, quick: bool) -> Row:
    """Time between tokens of short chats while one long prompt is read in, over the same without it.

    One run: steps without, then the prompt from its arrival to its first token, then steps without again.
    """
    tokens, quiet, most = (300, 10, 400) if quick else (6144, 120, 3000)
    prompts = subject.prompts([64] * CHATS, seed=3)
    (document,) = subject.prompts([tokens], seed=4)
    with serving(subject, tokens + CHATS * (most + 600) + 1000) as served, Watch() as watch:
        chats = [watch.follow(served.engine.submit(prompt, greedy(most))) for prompt in prompts]
        while served.engine.stats().running < CHATS:
            served.engine.step()
        for _ in range(10):
            served.engine.step()
        times = [time.perf_counter()]
        for _ in range(quiet):
            served.engine.step()
        times.append(time.perf_counter())
        long = watch.follow(served.engine.submit(document, greedy(1)))
        while not long.finish:
            served.engine.step()
        times.append(time.perf_counter())
        for _ in range(quiet):
            served.engine.step()
        times.append(time.perf_counter())
        for chat in chats:
            chat.cancel()
    gaps: dict[str, list[float]] = {"without": [], "with": []}
    for chat in chats:
        for before, after in itertools.pairwise(watch.seconds[chat.number]):
            if times[0] <= before and after <= times[3]:
                gaps["with" if times[1] <= before and after <= times[2] else "without"].append(after - before)
    p99 = {name: percentile(each, 0.99) for name, each in gaps.items()}
    ratio = p99["with"] / p99["without"]
    detail = {
        "p99_seconds": p99,
        "p50_seconds": {name: statistics.median(each) for name, each in gaps.items()},
        "tokens": {name: len(each) for name, each in gaps.items()},
        "long_prompt_seconds": times[2] - times[1],
    }
    what = f"p99 time between tokens of {CHATS} short chats while a prompt of 6K tokens is read in, over without"
    return Row(what, ratio, "x", "<= 2 (aim 1.3)", ratio <= 2, detail)


def hog(subject: Subject, quick: bool) -> Row:
    """Jain's index of the tokens a second of 8 equal requests, beside one with 8 times their tokens."""
    prompt, new = (16, 12) if quick else (64, 96)
    equals = subject.prompts([prompt] * CHATS, seed=5)
    (large,) = subject.prompts([8 * prompt], seed=6)
    with serving(subject, 16 * (prompt + new) + CHATS * 300 + 1000) as served, Watch() as watch:
        started = time.perf_counter()
        one = served.engine.submit(large, greedy(8 * new))
        handles = [watch.follow(served.engine.submit(each, greedy(new))) for each in equals]
        while not all(handle.finish for handle in handles):
            served.engine.step()
        one.cancel()
    rates = [new / (watch.ended[handle.number] - started) for handle in handles]
    index = sum(rates) ** 2 / (len(rates) * sum(rate**2 for rate in rates))
    what = "one hog with 8 times the tokens among 8 equals: Jain index of tokens/s of the equals"
    return Row(what, index, "", ">= 0.95 (aim 0.98)", index >= 0.95, {"tokens_per_second": rates})
