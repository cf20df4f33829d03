"""Tokens a second of many requests against `generate` and `generate_batch`, whether they are the same tokens, and what
the engine itself takes. Part of the serving question.

Where the time of a whole load is measured, prompts are read in at full pace; the default pace, which keeps answers
flowing meanwhile, is measured beside it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from benchmarks.harness import Row, difference
from benchmarks.serving_load import ANY_PACE, Subject, Watch, greedy, serving
from tieredkv.serving import EngineSettings

REQUESTS = 16
NEW = 32
PAGE = 256
DEFAULT_PACE = "ours, default pace"
FULL_PACE = EngineSettings(prefill_slowdown=ANY_PACE)


@dataclasses.dataclass
class Mixed:
    """Prompts of 64 to 1,000 tokens, 32 new tokens each: what every contestant took and said.

    Args:
        tokens: new tokens of one round.
        seconds: for each contestant, of each round.
        answers: for each contestant the new tokens of each request, of the last round.
        logits: of `generate` and ours, for each request `[new, vocabulary]`.
    """

    tokens: int
    seconds: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    answers: dict[str, list[list[int]]] = dataclasses.field(default_factory=dict)
    logits: dict[str, list[torch.Tensor]] = dataclasses.field(default_factory=dict)

    def over(self, other: str) -> float:
        """Tokens per second of ours over another's, by medians."""
        return statistics.median(self.seconds[other]) / statistics.median(self.seconds["ours"])

    @property
    def detail(self) -> dict[str, Any]:
        """For the JSON."""
        rates = {name: self.tokens / statistics.median(each) for name, each in self.seconds.items()}
        return {"tokens_per_second": rates, "seconds": self.seconds}


def mixed_load(subject: Subject, quick: bool) -> Mixed:
    """Run all three in turns."""
    lengths = [int(x) for x in torch.linspace(16, 100, 4) if quick] or [int(x) for x in torch.linspace(64, 1000, 16)]
    new, rounds = (6, 1) if quick else (NEW, 3)
    prompts = subject.prompts(lengths)
    found = Mixed(tokens=new * len(prompts))
    contestants = {"generate": _sequential, DEFAULT_PACE: _ours_paced, "ours": _ours, "generate_batch": _batch}
    for run in contestants.values():  # what is compiled or loaded at first use
        run(subject, Mixed(0), prompts[:2], 2)
    for round_ in range(rounds):
        for name, run in contestants.items():
            if name == DEFAULT_PACE and round_:
                continue  # no figure depends on it
            found.seconds.setdefault(name, []).append(run(subject, found, prompts, new))
    return found


def _sequential(subject: Subject, found: Mixed, prompts: Sequence[list[int]], new: int) -> float:
    """One after the other through `generate`."""
    outputs = []
    settings = greedy(new, output_logits=True, return_dict_in_generate=True)
    started = time.perf_counter()
    for prompt in prompts:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        outputs.append(subject.model.generate(ids, attention_mask=mask, generation_config=settings))
    seconds = time.perf_counter() - started
    found.logits["generate"] = [torch.cat(out.logits) for out in outputs]
    found.answers["generate"] = [
        out.sequences[0, len(prompt) :].tolist() for prompt, out in zip(prompts, outputs, strict=True)
    ]
    return seconds


def _ours_paced(subject: Subject, found: Mixed, prompts: Sequence[list[int]], new: int) -> float:
    """As `_ours`, with the engine's default settings."""
    return _ours(subject, found, prompts, new, EngineSettings())


def _ours(
    subject: Subject,
    found: Mixed,
    prompts: Sequence[list[int]],
    new: int,
    settings: EngineSettings = FULL_PACE,
) -> float:
    """All at once through the engine, on a store that knows nothing."""
    tokens = sum(map(len, prompts)) + (new + 256) * len(prompts)
    with serving(subject, tokens, settings) as served, Watch(subject.model) as watch:
        started = time.perf_counter()
        handles = [watch.follow(served.engine.submit(prompt, greedy(new))) for prompt in prompts]
        served.run()
        seconds = time.perf_counter() - started
    found.answers["ours"] = [handle.result(0) for handle in handles]
    found.logits["ours"] = [torch.stack(watch.logits[handle.number]) for handle in handles]
    return seconds


def _batch(subject: Subject, found: Mixed, prompts: Sequence[list[int]], new: int) -> float:
    """All at once through transformers' continuous batching, with memory for all of them."""
    pages = sum(-(-(len(prompt) + new) // PAGE) + 1 for prompt in prompts)
    config = ContinuousBatchingConfig(page_size=PAGE, num_blocks=pages, max_batch_tokens=512)
    settings = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    started = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        outputs = subject.model.generate_batch(
            list(prompts), generation_config=settings, continuous_batching_config=config, progress_bar=False
        )
    seconds = time.perf_counter() - started
    found.answers["generate_batch"] = [out.generated_tokens for out in outputs.values()]
    short = [len(answer) for answer in found.answers["generate_batch"] if len(answer) != new]
    if short or len(outputs) != len(prompts):
        raise RuntimeError(f"generate_batch answered {len(outputs)} of {len(prompts)}, lengths {short}")
    return seconds


def over_sequential(found: Mixed) -> Row:
    """Tokens a second over one `generate` after the other."""
    ratio = found.over("generate")
    what = "16 requests, prompts of 64 to 1,000 tokens, 32 new: tokens/s over sequential generate"
    return Row(what, ratio, "x", ">= 2.0 (aim 2.4)", ratio >= 2.0, found.detail)


def over_generate_batch(found: Mixed) -> Row:
    """Tokens a second over transformers' continuous batching."""
    ratio = found.over("generate_batch")
    what = "16 requests, prompts of 64 to 1,000 tokens, 32 new: tokens/s over generate_batch"
    return Row(what, ratio, "x", ">= 2.7 (aim 3.2)", ratio >= 2.7, found.detail)


def same_output(found: Mixed) -> list[Row]:
    """Every request against `generate` alone."""
    alone, ours = found.logits["generate"], found.logits["ours"]
    pairs = list(zip(alone, ours, strict=True))
    largest = max(float((mine - theirs).abs().max()) for theirs, mine in pairs)
    relative = max(difference(mine, theirs) for theirs, mine in pairs)
    other = sum(mine != theirs for theirs, mine in zip(found.answers["generate"], found.answers["ours"], strict=True))
    batch = sum(
        mine != theirs for theirs, mine in zip(found.answers["generate"], found.answers["generate_batch"], strict=True)
    )
    detail = {"largest_difference": largest, "requests": len(pairs), "other_tokens_in_generate_batch": batch}
    return [
        Row(
            "logits of every request against generate alone: largest difference over the largest logit",
            relative,
            "",
            "<= 1e-4",
            relative <= 1e-4,
            detail,
        ),
        Row("requests with other tokens than generate alone", other, "", "0", other == 0),
    ]


def decoding(subject: Subject, quick: bool) -> Row:
    """Short prompts, long answers: tokens a second over one `generate` after the other.

    One after the other takes the same time for each, so a few of them give the rate.
    """
    requests, new, alone = (4, 16, 2) if quick else (REQUESTS, 256, 4)
    prompts = subject.prompts([32] * requests, seed=1)
    _sequential(subject, Mixed(0), prompts[:1], 4)
    _ours(subject, Mixed(0), prompts[:2], 4)
    parts = [_sequential(subject, Mixed(0), prompts[: alone // 2], new)]
    ours = _ours(subject, Mixed(0), prompts, new)
    parts.append(_sequential(subject, Mixed(0), prompts[alone // 2 : alone], new))
    rates = {"generate": alone * new / sum(parts), "ours": requests * new / ours}
    ratio = rates["ours"] / rates["generate"]
    what = "16 requests decoding 256 tokens each after short prompts: tokens/s over sequential generate"
    detail = {"tokens_per_second": rates, "sequential_requests": alone}
    return Row(what, ratio, "x", ">= 5 (aim 7)", ratio >= 5, detail)


def overhead(subject: Subject, quick: bool) -> Row:
    """Time of a step outside the model's forward, while 16 requests decode."""
    rows, steps = (4, 8) if quick else (REQUESTS, 96)
    prompts = subject.prompts([64] * rows, seed=2)
    with serving(subject, rows * (64 + steps + 300)) as served:
        for prompt in prompts:
            served.engine.submit(prompt, greedy(steps + 8))
        while served.engine.stats().running < rows:
            served.engine.step()
        outside = []
        for _ in range(steps):
            before = served.engine.stats()
            served.engine.step()
            after = served.engine.stats()
            outside.append(
                1000 * (after.step_seconds - before.step_seconds - after.model_seconds + before.model_seconds)
            )
        step = (after.step_seconds - before.step_seconds) * 1000
    value = statistics.median(outside)
    what = "engine overhead per step outside the model, 16 rows"
    detail = {"mean_ms": statistics.mean(outside), "p99_ms": sorted(outside)[-1], "last_step_ms": step}
    return Row(what, value, "ms", "<= 3 (aim 1)", value <= 3, detail)
