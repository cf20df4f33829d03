"""What happens when a causal LM class is given a `TieredCache`: run from a table, judged against a cache-free forward.

Each class is built tiny (see shrink.py) and made to prefill, decode, take a chunk, reorder its rows and crop, with
transformers' own cache and with ours in both attention ways. Hot holds 64 tokens of each row, warm 32, the disk the
rest.

Imports: the tests' support, tieredkv, torch, transformers.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
import tempfile
import time
from collections import Counter
from typing import Any, Literal

import torch
from models.shrink import FIRST_SPECIAL, SMALL, WIDE, tiny_config, tiny_model
from support import TOLERANCE, audit, difference, locations
from transformers import DynamicCache, PreTrainedModel

import tieredkv

SIZES: dict[str, Any] = {"hot": "64 tokens", "warm": "32 tokens", "block_size": 16, "window": 16}
PREFILL = 100
ROUNDING = 2e-4
"""Up to so much, transformers' own cache may differ from the cache-free forward and still count as exact: linear
attention in pieces rounds otherwise than in one go. Ours must then stay within four times what stock differs by."""
SENSITIVE = 1e-3
"""A model whose last logits change less than this when its first tokens change cannot show an error."""

Verdict = Literal["blocks", "gather", "untiered", "refused", "stock fails", "not built", "wrong", "error"]
Scores = dict[str, float | str]
"""The largest error of each kind of step as a share of the largest logit, or the exception's text."""


@dataclasses.dataclass
class Run:
    """One cache through the whole script.

    Args:
        scores: by kind of step.
        mode: `TieredCache.mode`.
        reason: `fallback_reason`, or why the cache was refused.
        refused: at construction.
        spilled: blocks were on disk at the end.
    """

    scores: Scores = dataclasses.field(default_factory=dict)
    mode: str = ""
    reason: str | None = None
    refused: bool = False
    spilled: bool = False


@dataclasses.dataclass
class Outcome:
    """Everything about one class.

    Args:
        model_type: transformers' name of the model type.
        name: the class, "" where it could not be built.
        layers: what transformers' cache makes of the config.
        stock: transformers' own cache.
        runs: ours, by way.
        sensitivity: how far the last logits move when the first tokens change.
        seconds: all of it.
        failure: why it was not built.
    """

    model_type: str
    name: str = ""
    layers: str = ""
    stock: Scores = dataclasses.field(default_factory=dict)
    runs: dict[str, Run] = dataclasses.field(default_factory=dict)
    sensitivity: float = 0.0
    seconds: float = 0.0
    failure: str = ""

    @property
    def stock_exact(self) -> bool:
        """Whether prefill and decode with transformers' own cache equal the cache-free forward."""
        return not self.failure and stock_is_exact(self.stock)

    def differs(self, step: str) -> bool:
        """Whether transformers' own cache fails or is not exact in a kind of step."""
        score = self.stock.get(step)
        return not isinstance(score, float) or score > ROUNDING

    @property
    def verdict(self) -> Verdict:
        """One word for the class."""
        if self.failure:
            return "not built"
        runs = list(self.runs.values())
        if runs and all(run.refused for run in runs):
            return "refused"
        if not self.stock_exact:
            return "stock fails"
        right = [step for step in self.stock if not self.differs(step)]
        for run in runs:
            scores = [run.scores.get(step, "not reached") for step in right]
            if run.refused or any(isinstance(score, str) for score in scores):
                return "error"
            if any(not self._exact(step, score) for step, score in zip(right, scores, strict=True)):
                return "wrong"
        if not any(run.spilled for run in runs):
            return "untiered"
        return "blocks" if self.runs["blocks"].mode == "blocks" else "gather"

    def _exact(self, step: str, score: float | str) -> bool:
        stock = self.stock[step]
        return isinstance(score, float) and isinstance(stock, float) and score <= max(TOLERANCE, 4 * stock)


def stock_is_exact(scores: Scores) -> bool:
    """Whether prefill and decode with transformers' own cache equal the cache-free forward."""
    main = [scores.get(step) for step in ("prefill", "decode")]
    return all(isinstance(score, float) and score <= ROUNDING for score in main)


Step = tuple[str, str, Any]
"""The kind of step that it counts for, what to do, and with what."""

PLAIN: list[Step] = [
    ("prefill", "feed", PREFILL),
    *[("decode", "feed", 1)] * 3,
    ("reorder", "reorder", [1, 0]),
    *[("reorder", "feed", 1)] * 2,
    ("reorder", "reorder", [1, 1]),
    ("reorder", "feed", 1),
    ("chunk", "feed", 7),
]
CROPPING: list[Step] = [
    ("crop", "record", None),
    ("crop", "feed", PREFILL),
    ("crop", "crop", 0),
    ("crop", "feed", 5),
    ("crop", "crop", 3),
    ("crop", "feed", 1),
    ("crop", "crop", 0),
    ("crop", "feed", 4),
    ("crop", "crop", 4),
    ("crop", "feed", 1),
]
"""What speculation does: rejected tokens are cropped, and crop(0) comes where none was."""


class Oracle:
    """Logits without any cache; each text is computed once.

    Args:
        model: the one without a cache.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        names = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in names
        self.cache_name = next((name for name in ("cache", "cache_params") if name in names), "past_key_values")
        self._known: dict[bytes, torch.Tensor] = {}

    def positions(self, length: int, count: int) -> dict[str, torch.Tensor]:
        """What generate would pass for the last `count` of `length` tokens in two rows, if the model takes it."""
        if not self._takes_positions:
            return {}
        return {"position_ids": torch.arange(length - count, length).expand(2, count)}

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """[2, tokens, vocabulary]."""
        key = ids.numpy().tobytes()
        if key not in self._known:
            length = ids.shape[1]
            self._known[key] = self.model(ids, use_cache=False, **self.positions(length, length)).logits
        return self._known[key]


class Script:
    """Feeds one model and one cache, and holds each step's logits against a model of its own without a cache.

    Args:
        model: sees the cache.
        oracle: the same weights; never sees one.
        cache: what is tested.
    """

    def __init__(self, model: PreTrainedModel, oracle: Oracle, cache: Any) -> None:
        self.model, self.oracle, self.cache = model, oracle, cache
        self.ids = torch.empty(2, 0, dtype=torch.int64)
        self.scores: Scores = {}

    def run(self, steps: list[Step]) -> Scores:
        """All steps; the first exception ends them, and stands where the error would."""
        for kind, action, argument in steps:
            try:
                error = getattr(self, action)(argument)
            except Exception as failure:
                lines = str(failure).splitlines() or [""]
                self.scores[kind] = f"{type(failure).__name__}: {lines[0]}"[:300]
                break
            self.scores[kind] = max(float(self.scores.get(kind, 0.0)), error or 0.0)
        return self.scores

    def feed(self, count: int) -> float:
        """New tokens in both rows; the largest error of their logits."""
        new = some_ids(count, seed=self.ids.shape[1])
        self.ids = torch.cat([self.ids, new], 1)
        keywords = {self.oracle.cache_name: self.cache, **self.oracle.positions(self.ids.shape[1], count)}
        got = self.model(new, use_cache=True, **keywords).logits
        return difference(got[:, -count:], self.oracle.logits(self.ids)[:, -count:])

    def reorder(self, rows: list[int]) -> None:
        """As beam search does."""
        self.cache.reorder_cache(torch.tensor(rows))
        self.ids = self.ids[rows]

    def record(self, _: None) -> None:
        """Announce that crops will come."""
        self.cache.activate_past_recording()

    def crop(self, tokens: int) -> None:
        """Remove the last tokens."""
        if not self.cache.is_croppable:
            raise ValueError("the cache says that it cannot be cropped")
        self.cache.crop(-tokens)
        self.ids = self.ids[:, : self.ids.shape[1] - tokens]


def some_ids(count: int, seed: int) -> torch.Tensor:
    """Random ids of text, [2, count]."""
    return torch.randint(3, FIRST_SPECIAL, (2, count), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def examine(model_type: str) -> Outcome:
    """Build a class and run the script with transformers' cache and with ours, in both ways."""
    started = time.perf_counter()
    outcome = Outcome(model_type)
    built: tuple[PreTrainedModel, Oracle] | None = None
    for sizes, scale in itertools.product((WIDE, SMALL), (8.0, 1.0)):
        try:
            model = tiny_model(tiny_config(model_type, sizes), scale)
            outcome.name, oracle = type(model).__name__, Oracle(in_float64(model))
            moved, stock = sensitivity(oracle), with_stock(model, oracle, outcome)
        except Exception as failure:
            outcome.failure = f"{type(failure).__name__}: {failure}"[:300]
            continue
        built, outcome.sensitivity, outcome.stock = (model, oracle), moved, stock
        if stock_is_exact(stock):
            break
    if built is None:
        return outcome
    (model, oracle), outcome.failure = built, ""
    for way in ("gather", "blocks"):
        outcome.runs[way] = run_way(copy.deepcopy(model), oracle, way)
    outcome.seconds = time.perf_counter() - started
    return outcome


def in_float64(model: PreTrainedModel) -> PreTrainedModel:
    """A copy that rounds nothing, so that what is measured is each cache's own error; of its dtype where the class does
    not run in float64."""
    exact = copy.deepcopy(model).double()
    if hasattr(exact, "set_experts_implementation") and "Experts" in repr(exact):
        exact.set_experts_implementation("eager")  # the grouped one knows fp32 and less
    try:
        exact(some_ids(4, seed=0), use_cache=False)
    except Exception:
        return copy.deepcopy(model)
    return exact


def with_stock(model: PreTrainedModel, oracle: Oracle, outcome: Outcome) -> Scores:
    """The scripts with transformers' own cache."""
    scores: Scores = {}
    for steps in (PLAIN, CROPPING):
        try:
            cache = DynamicCache(config=model.config)
        except Exception as failure:
            return {"prefill": f"{type(failure).__name__}: {failure}"[:300]}
        outcome.layers = layers_of(cache)
        scores |= Script(model, oracle, cache).run(steps)
    return scores


def sensitivity(oracle: Oracle) -> float:
    """How far the last logits move when the first sixteen tokens change, as a share of the largest."""
    ids = some_ids(PREFILL, seed=0)
    other = torch.cat([some_ids(16, seed=99), ids[:, 16:]], 1)
    return difference(oracle.logits(other)[:, -1], oracle.logits(ids)[:, -1])


def layers_of(cache: DynamicCache) -> str:
    """The layers of transformers' cache for a config: "2 full, 2 sliding"."""
    names = {
        "DynamicLayer": "full",
        "DynamicSlidingWindowLayer": "sliding",
        "LinearAttentionLayer": "linear",
        "LinearAttentionAndFullAttentionLayer": "linear and full",
        "LinearAttentionAndSlidingWindowAttentionLayer": "linear and sliding",
        "DynamicIndexedLayer": "indexed",
        "DummyLayer": "none of its own",
    }
    kinds = Counter(names.get(type(layer).__name__, type(layer).__name__) for layer in cache.layers)
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items())


def run_way(model: PreTrainedModel, oracle: Oracle, way: str) -> Run:
    """The script with a `TieredCache` of the model (blocks) or of its config (gather)."""
    run = Run()
    for steps in (PLAIN, CROPPING):
        with tempfile.TemporaryDirectory(prefix="tieredkv-models-") as folder:
            try:
                cache = tieredkv.TieredCache(model if way == "blocks" else model.config, cold=folder, **SIZES)
            except tieredkv.UnsupportedModelError as refusal:
                return Run(refused=True, reason=f"{refusal.what} Got: {refusal.got}.")
            with cache:
                run.scores |= Script(model, oracle, cache).run(steps)
                run.mode, run.reason = cache.mode, run.reason or cache.fallback_reason
                if cache.parts().store is not None:
                    run.spilled = run.spilled or "cold" in locations(cache)
                    audit(cache)
    return run
