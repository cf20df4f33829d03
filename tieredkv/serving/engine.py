"""`Engine`: continuous batching. Every step is one forward of all decoding requests' tokens and a piece of a prompt.

Requests join and leave at any step. Nothing is reserved for a maximum length: blocks come as tokens do, and when they
run out the least urgent request gives its own up and waits. What it computed stays findable in the store as long as
there is room, so that it goes on from there.

Imports: everything to its left.
"""

from __future__ import annotations

import collections
import itertools
import logging
import threading
from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig

from tieredkv import report
from tieredkv.block import TIERS
from tieredkv.errors import BudgetError, ClosedError, ConfigError
from tieredkv.kv_store import KVStore
from tieredkv.serving.request import Finish, Request, RequestHandle
from tieredkv.serving.runner import Runner
from tieredkv.serving.sampling import Sampler
from tieredkv.serving.settings import EngineSettings
from tieredkv.serving.stats import EngineStats, Room
from tieredkv.serving.timings import Timings
from tieredkv.stats import CacheStats

logger = logging.getLogger("tieredkv")


class Engine:
    """Runs many requests on one model.

    Use `start()` for a thread of its own, or call `step()` yourself.

    Args:
        model: a transformers model in eval mode, all of whose layers are attended over blocks.
        store: where blocks live, made for this model; the engine does not close it.
        settings: choices.
        tokenizer: needed for stop strings.
        timings: is told how long requests take.

    Raises:
        UnsupportedModelError: a model whose requests cannot share a forward; says why.
        BudgetError: the store cannot hold a block.
    """

    def __init__(
        self,
        model: Any,
        store: KVStore,
        settings: EngineSettings | None = None,
        *,
        tokenizer: Any = None,
        timings: Timings | None = None,
    ) -> None:
        self.settings = settings or EngineSettings()
        self._model, self._store, self._tokenizer = model, store, tokenizer
        self._runner = Runner(model, store, self.settings, timings or Timings())
        self._arrivals: collections.deque[Request] = collections.deque()
        self._numbers = itertools.count()
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing = False

    # ---- callers

    def submit(
        self,
        prompt_ids: torch.Tensor | Sequence[int],
        generation_config: GenerationConfig | None = None,
        *,
        priority: int = 0,
        salt: str = "",
        seed: int | None = None,
    ) -> RequestHandle:
        """Ask for a continuation of a prompt. From any thread.

        Args:
            prompt_ids: token ids, `[tokens]` or `[1, tokens]`.
            generation_config: as for `generate`; one sequence, one token at a time.
            priority: high comes first; waiting requests rise with time.
            salt: prefixes are shared within one salt.
            seed: of its sampling.

        Raises:
            ConfigError: an empty prompt, ids beyond the vocabulary, or a way of decoding that a request cannot have.
            BudgetError: it can never fit, with the numbers.
            ClosedError: the engine is closed.
        """
        ids = torch.as_tensor(prompt_ids, dtype=torch.int64).reshape(-1).cpu()
        vocabulary = self._model.config.get_text_config(decoder=True).vocab_size
        if not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
            raise ConfigError(
                "Not a prompt of this model.",
                wanted=f"at least one token id, from 0 to {vocabulary - 1}",
                got=f"{len(ids)} ids" + (f" from {int(ids.min())} to {int(ids.max())}" if len(ids) else ""),
                change="tokenize with the model's own tokenizer",
            )
        sampler = Sampler(self._model, generation_config, len(ids), self._tokenizer, seed)
        self._check_fits(len(ids), sampler.most_tokens)
        with self._wake:
            if self._closing:
                raise ClosedError("The engine is closed.", wanted="an open engine", got="closed", change="make another")
            handle = RequestHandle(next(self._numbers), len(ids))
            self._arrivals.append(Request(handle, ids, len(ids), sampler, priority, salt, self._runner.stats.steps))
            self._wake.notify()
        return handle

    def _check_fits(self, prompt: int, new: int) -> None:
        limit, length = self.settings.max_model_len, prompt + new
        if limit is not None and length > limit:
            raise BudgetError(
                "The request is longer than the engine allows.",
                wanted=f"at most {limit} tokens (max_model_len)",
                got=f"a prompt of {prompt} and {new} new tokens",
                change="a shorter prompt, fewer max_new_tokens, or a larger max_model_len",
                tier="hot",
            )
        capacity = self._runner.capacity_tokens
        if capacity is not None and length > capacity:
            raise BudgetError(
                "The request can never fit.",
                wanted=f"{length} tokens: a prompt of {prompt} and {new} new ones",
                got=f"{capacity} tokens in all tiers together",
                change="enlarge warm= or cold= of the store, or ask for less",
                tier="cold",
            )

    def stats(self) -> EngineStats:
        """What was done so far, and what is held now."""
        stats = self._runner.snapshot()
        stats.waiting += len(self._arrivals)
        return stats

    def memory(self) -> CacheStats:
        """The tiers and their traffic, over all requests; figures of one cache (rows, tokens) are 0."""
        store = self._runner.blocks
        tiered = tuple(range(len(store.layers)))
        native = self._runner.native_attention
        return report.stats(report.Parts(store, None, store.settings, tiered, native_attention=native))

    def room(self) -> Room:
        """How many tokens fit where."""
        store = self._runner.blocks
        tokens: dict[str, int | None] = {
            role: store.tiers[role].slots.total * store.block_size for role in TIERS if role in store.tiers
        }
        if store.cold is not None and store.budget.cold_bytes is None:
            tokens["cold"] = None
        return Room(store.hot.slot_bytes // store.block_size, tokens, self._runner.capacity_tokens)

    @property
    def is_open(self) -> bool:
        """Whether it takes requests: it was neither closed nor stopped by an error."""
        return not self._closing

    # ---- life

    def start(self) -> Engine:
        """Run steps on a thread of the engine's own until `close`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
            self._thread.start()
        return self

    def close(self, *, drain: bool = False) -> None:
        """Accept no more requests, and end those there are: cancelled, or finished first with `drain`.

        May be called again.
        """
        with self._wake:
            self._closing = True
            if not drain:
                for request in [*self._arrivals, *self._runner.everyone()]:
                    request.handle.cancel()
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        while self.step():
            pass

    def __enter__(self) -> Engine:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def step(self) -> bool:
        """Run one forward for whoever has work; False when nobody has. Not while a thread runs the engine."""
        while self._arrivals:
            self._runner.waiting.append(self._arrivals.popleft())
        return self._runner.step()

    def _run(self) -> None:
        try:
            while self._has_work():
                self.step()
        except Exception as error:
            # Whatever the model raised: nobody is to wait for an engine that has stopped.
            logger.exception("tieredkv: the engine stopped")
            with self._wake:
                self._closing = True
            stopped = ClosedError(
                "The engine stopped.", wanted="a model that runs", got=repr(error), change="see the log; make a new one"
            )
            for request in [*self._arrivals, *self._runner.everyone()]:
                self._runner.end(request, Finish.ERROR, stopped)

    def _has_work(self) -> bool:
        """Wait for a request; False when there will be none."""
        with self._wake:
            while not self._arrivals and not self._runner.everyone():
                if self._closing:
                    return False
                self._wake.wait()
        return True
