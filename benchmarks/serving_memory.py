"""What many requests hold, and that nothing is lost: memory against concurrency, sequences at once, a shared prompt, a
soak. Part of the serving question; none of it depends on the model, so it is one of two layers.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

from benchmarks.capacity import CHAT, Length, lengths
from benchmarks.harness import Row
from benchmarks.memory import resident_bytes
from benchmarks.plots import Chart
from benchmarks.serving_load import ANY_PACE, Serving, Subject, greedy, serving
from tieredkv.serving import EngineSettings, Finish, RequestHandle

MIB = 2**20


def _chats(quick: bool) -> tuple[str, list[Length]]:
    """(where they are from, lengths of chats), small ones for a quick run."""
    source, found = lengths(CHAT)
    if quick:
        found = [Length(each.prompt // 16 + 1, each.answer // 16 + 1) for each in found]
    return source, found


def _longest(chats: Sequence[Length]) -> tuple[int, int]:
    """Tokens of the longest, and of the longest but for 1 %."""
    totals = sorted(each.total for each in chats)
    return totals[-1], totals[int(0.99 * (len(totals) - 1))]


def _submit(served: Serving, subject: Subject, chats: Sequence[Length], seed: int) -> list[RequestHandle]:
    prompts = subject.prompts([each.prompt for each in chats], seed)
    return [served.engine.submit(prompt, greedy(each.answer)) for prompt, each in zip(prompts, chats, strict=True)]


def against_concurrency(subject: Subject, quick: bool) -> tuple[list[Row], Chart]:
    """Bytes of keys and values as concurrency rises, over preallocation to the longest; and after the load."""
    source, every = _chats(quick)
    longest, most = _longest(every)
    series: dict[str, list[tuple[float, float]]] = {
        "preallocated to the longest request": [],
        "preallocated to the 99th percentile": [],
        "ours, blocks of running requests": [],
        "ours, with what is kept of ended ones": [],
    }
    after = ratio = resident = 0.0
    running: list[int] = []
    steps = (2, 4) if quick else (8, 16, 32, 64)
    for count in steps:
        chats = random.Random(count).sample(every, count)
        room = sum(each.total for each in chats) + 256 * count
        start = resident_bytes(anew=True)
        # All prompts are read in before the first answer ends, so that all requests do run at once.
        settings = EngineSettings(max_running=count, prefill_slowdown=ANY_PACE, prefill_tokens=room)
        with serving(subject, room, settings) as served:
            handles = _submit(served, subject, chats, seed=count)
            peak = most_running = 0
            while served.engine.step():
                peak, most_running = max(peak, served.requests_bytes), max(most_running, served.engine.stats().running)
            running.append(most_running)
            resident = max(resident_bytes(anew=False) - start, 0)
            token_bytes = served.slot_bytes / served.blocks.block_size
            after = served.requests_bytes / peak
            kept = served.used_bytes / peak
        if any(handle.finish is not Finish.LENGTH for handle in handles):
            raise RuntimeError([handle.finish for handle in handles])
        values = (count * longest * token_bytes, count * most * token_bytes, peak, served.blocks.hot.peak_bytes)
        for points, value in zip(series.values(), values, strict=True):
            points.append((float(count), value / MIB))
        ratio = peak / values[0]
    detail = {
        "source": source,
        "MiB": series,
        "most_decoding_at_once": running,
        "process_bytes": resident,
        "over_99th_percentile": peak / values[1],
    }
    what = f"KV bytes of {steps[-1]} requests at once, Azure chat lengths, over preallocation to the longest"
    title = "Keys and values of requests at once, at their peak"
    chart = Chart("memory", title, "requests at once", "MiB", series, log_x=True, note=f"{source}; a model of 2 layers")
    return [
        Row(what, ratio, "", "<= 0.35", ratio <= 0.35, detail),
        Row("KV bytes of requests after the load, over the peak", after, "", "0", after == 0, {"kept_blocks": kept}),
    ], chart


def at_once(subject: Subject, quick: bool) -> Row:
    """Requests that decode at once while others wait, on the bytes in which preallocation holds four."""
    source, every = _chats(quick)
    longest, _ = _longest(every)
    reserved = 2 if quick else 4
    chats = random.Random(1).sample(every, 40 if quick else 100)
    running, seen = 0, 0
    settings = EngineSettings(max_running=len(chats), prefill_slowdown=ANY_PACE)
    with serving(subject, reserved * longest, settings) as served:
        _submit(served, subject, chats, seed=1)
        while served.engine.step():
            stats = served.engine.stats()
            if stats.waiting:
                running, seen = running + stats.running, seen + 1
        stats = served.engine.stats()
    at_once = running / max(seen, 1)
    detail = {
        "source": source,
        "mean_running": at_once,
        "steps_with_others_waiting": seen,
        "preempted": stats.preempted,
        "prefilled_over_prompt_tokens": stats.prefilled_tokens / stats.prompt_tokens,
        "longest_tokens": longest,
    }
    ratio = at_once / reserved
    what = "sequences at once on equal KV bytes, Azure chat lengths, over preallocation to the longest"
    return Row(what, ratio, "x", ">= 4 (aim 6)", quick or ratio >= 4, detail)


def shared_prompt(subject: Subject, quick: bool) -> list[Row]:
    """Prompt tokens computed over different ones, for requests that begin with one system prompt."""
    count, rows = (12 if quick else 200), []
    for system, must in ((1024, True), (1000, False)):
        (prefix,) = subject.prompts([system], seed=7)
        own = [16 + number % 33 for number in range(count)]
        prompts = [prefix + tail for tail in subject.prompts(own, seed=8)]
        with serving(subject, system + sum(own) + 400 * 64) as served:
            for prompt in prompts:
                served.engine.submit(prompt, greedy(4))
            served.run()
            stats, block = served.engine.stats(), served.blocks.block_size
        ratio = stats.prefilled_tokens / (system + sum(own))
        aside = "" if must else f", not a multiple of a block of {block}"
        what = f"200 requests over a shared system prompt of {system} tokens{aside}: prefilled over distinct tokens"
        detail = {"prefilled": stats.prefilled_tokens, "distinct": system + sum(own), "requests": count}
        rows.append(Row(what, ratio, "", "<= 1.05 (aim 1.0)" if must else "", ratio <= 1.05 if must else None, detail))
    return rows


def soak(subject: Subject, quick: bool) -> list[Row]:
    """Many requests of all lengths, some of them cancelled at any time; blocks and memory are counted as it goes."""
    count = 60 if quick else 2000
    chance = random.Random(9)
    sizes = [Length(chance.randint(1, 300), chance.randint(1, 40)) for _ in range(count)]
    resident: list[float] = []
    unbalanced = 0
    settings = EngineSettings(prefill_slowdown=ANY_PACE)
    with serving(subject, 3_000, settings, warm="1500 tokens", block_size=64) as served:
        handles: list[RequestHandle] = []
        for number, size in enumerate(sizes):
            handles += _submit(served, subject, [size], seed=number)
            for _ in range(chance.randint(0, 3)):
                served.engine.step()
            if chance.random() < 0.2:
                chance.choice(handles[-32:]).cancel()
            if number % max(count // 20, 1) == 0:
                resident.append(resident_bytes(anew=False) / MIB)
                unbalanced += not balanced(served)
        served.run()
        unbalanced += not balanced(served)
        resident.append(resident_bytes(anew=False) / MIB)
        left, stats = served.requests_bytes, served.engine.stats()
    ended = sum(stats.finished.values())
    lost = count - sum(_whole(handle, size) for handle, size in zip(handles, sizes, strict=True))
    # The first quarter fills the pools and what Python and torch keep for themselves.
    first, last = statistics.median(resident[len(resident) // 4 :][:4]), statistics.median(resident[-4:])
    growth = last / first - 1
    detail = {
        "finished": stats.finished,
        "first_error": next((str(handle.error) for handle in handles if handle.error is not None), None),
        "preempted": stats.preempted,
        "steps": stats.steps,
        "resident_MiB": resident,
    }
    return [
        Row(f"soak, {count} requests with cancels: lost", lost + count - ended, "", "0", lost + count == ended, detail),
        Row("soak: growth of the process after the first quarter", 100 * growth, "%", "<= 5", growth <= 0.05),
        Row(
            "soak: times when free + live + in flight was not the total, or a slot held no known block",
            unbalanced + (left > 0),
            "",
            "0",
            unbalanced + left == 0,
        ),
    ]


def balanced(served: Serving) -> bool:
    """Whether every slot of every tier is free, live or in flight, and each that is not free holds a known block."""
    served.blocks.wait_all()
    blocks = {block.id: block for holder in served.blocks.holders for row in holder.table for block in row}.values()
    for role, tier in served.blocks.tiers.items():
        pool, held = tier.slots, [slot for block in blocks if (slot := getattr(block, role)) is not None]
        if pool.free + pool.live + pool.in_flight != pool.total or pool.total - pool.free != len(set(held)):
            return False
    return True


def _whole(handle: RequestHandle, size: Length) -> bool:
    """Whether a request got all of its tokens, or was cancelled as asked."""
    if handle.error is not None:
        return False
    got = len(handle.result(0))
    return got == size.answer if handle.finish is Finish.LENGTH else handle.is_cancelled and got <= size.answer
