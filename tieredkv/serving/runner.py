"""`Runner`: an engine's steps. Each is one forward: pieces of prompts first, then one token of every decoding request.

Imports: everything to its left; the rest of this package but `engine`.
"""

from __future__ import annotations

import contextlib
import inspect
import time
from typing import Any

import torch

from tieredkv.block import TIERS
from tieredkv.device import sent
from tieredkv.errors import BudgetError, ChecksumError, StepError, TieredKVError, UnsupportedModelError
from tieredkv.hf.layers import TieredLayer
from tieredkv.hf.step import Member, StepCache, StepInput
from tieredkv.kv_store import KVStore
from tieredkv.serving.order import PromptPace, next_to_prefill, victim
from tieredkv.serving.request import Finish, Request
from tieredkv.serving.sampling import largest
from tieredkv.serving.settings import EngineSettings
from tieredkv.serving.stats import EngineStats
from tieredkv.serving.timings import Timings
from tieredkv.store import BlockStore

Piece = tuple[Request, int]
"""A request, and how many of its tokens a step adds to its cache."""


class Runner:
    """Requests of one engine, moved by steps. Used by one thread at a time.

    Args:
        model: a transformers model in eval mode.
        store: where blocks live.
        settings: the engine's.
        timings: is told how long requests take.

    Raises:
        UnsupportedModelError: a model whose requests cannot share a forward.
    """

    def __init__(self, model: Any, store: KVStore, settings: EngineSettings, timings: Timings) -> None:
        self._model, self._store, self._settings, self._timings = model, store, settings, timings
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.blocks, self.capacity_tokens = self._probe()
        self._block_size = self.blocks.block_size
        self._step = StepCache(model.config.get_text_config(decoder=True))
        self._pace = PromptPace(settings.prefill_tokens, settings.prefill_slowdown)
        self.waiting: list[Request] = []
        self._reading: list[Request] = []
        self._decoding: list[Request] = []
        self._full = False  # somebody had to give way, and nobody has ended since
        self.stats = EngineStats()

    @torch.no_grad()
    def _probe(self) -> tuple[BlockStore, int | None]:
        """Find out that blocks serve the model.

        Returns:
            where blocks live, and how many tokens all tiers hold (None: no limit).
        """
        ids = torch.zeros((1, 2), dtype=torch.int64, device=self._model.device)
        with self._store.cache(ids) as cache:
            for _ in range(2):
                self._model(ids[:, :1], past_key_values=cache)
            self._store.publish(cache)  # from here on the store knows that blocks serve
            mode, reason, store = cache.mode, cache.fallback_reason, cache.parts().store
            tiered = all(isinstance(layer, TieredLayer) for layer in cache.layers)
        if mode != "blocks" or store is None or not tiered:
            raise UnsupportedModelError(
                "Requests of this model cannot share a forward.",
                wanted="attention over blocks in every layer",
                got=str(reason or "layers that keep their own K and V or states"),
                change="generate with a cache for each request",
            )
        slots: int | None = sum(store.tiers[role].slots.total for role in TIERS[:-1] if role in store.tiers)
        if store.cold is not None and slots is not None:
            slots = None if store.budget.cold_bytes is None else slots + store.cold.slots.total
        return store, None if slots is None else slots * store.block_size

    def everyone(self) -> list[Request]:
        """Every request that has not ended."""
        return [*self.waiting, *self._reading, *self._decoding]

    def snapshot(self) -> EngineStats:
        """What was done so far, and what is held now."""
        stats = self.stats.copy()
        stats.running, stats.waiting = len(self._decoding), len(self.waiting) + len(self._reading)
        stats.paused = sum(request.preempted > 0 for request in list(self.waiting))
        return stats

    @property
    def native_attention(self) -> str | None:
        """Why attention is not served by C++ on this machine, or None."""
        return self._step.native_attention

    # ---- one step

    @torch.no_grad()
    def step(self) -> bool:
        """Run one forward for whoever has work; False when nobody has."""
        with self._store.same_model():
            return self._step_once()

    def _step_once(self) -> bool:
        started = time.perf_counter()
        for request in [each for each in self.everyone() if each.handle.is_cancelled]:
            self.end(request, Finish.CANCELLED)
        pieces = self._choose()
        given, pieces = self._begin(pieces)
        if given is None:
            return bool(self.everyone())
        prompts = sum(count for request, count in pieces if request in self._reading)
        decoding = sum(request in self._decoding for request, _ in pieces)
        logits = self._forward(given, pieces)
        if logits is not None:
            self._advance(pieces, logits)
        seconds = time.perf_counter() - started
        self._pace.took(seconds, prompts, decoding)
        self.stats.steps += 1
        self.stats.step_seconds += seconds
        return True

    def _choose(self) -> list[Piece]:
        """Whose tokens the step adds: prompts as far as the pace allows, and every decoding request's next."""
        pieces: list[Piece] = []
        room = self._pace.tokens(len(self._decoding))
        if not self._decoding and not self._reading:
            self._full = False
        for request in self._reading:
            count = min(request.missing, room)
            if count:
                pieces.append((request, count))
                room -= count
        if room and not self._full and len(self._reading) + len(self._decoding) < self._settings.max_running:
            ready = next_to_prefill(
                self.waiting, self._reading, self.stats.steps, self._settings.ageing_steps, self._block_size
            )
            for request in ready:
                if not room or len(self._reading) + len(self._decoding) >= self._settings.max_running:
                    break
                self._open(request)
                count = min(request.missing, room)
                pieces.append((request, count))
                room -= count
        return [*pieces, *((request, 1) for request in self._decoding)]

    def _open(self, request: Request) -> None:
        """Give a waiting request a cache, which begins with what the store knows of its tokens."""
        request.cache = self._store.cache(request.known.unsqueeze(0), salt=request.salt)
        request.prefilled = request.cache.get_seq_length()
        request.handle.waits_for = None
        if not request.preempted:
            self.stats.prompt_tokens += request.length
            self.stats.attached_tokens += request.prefilled
            self._timings.queued(time.monotonic() - request.arrived_seconds)
        self.waiting.remove(request)
        self._reading.append(request)

    def _begin(self, pieces: list[Piece]) -> tuple[StepInput | None, list[Piece]]:
        """Plan the step; whoever cannot take part, or has to give way so that others can, is left out."""
        device = self._model.device
        while pieces:
            members = [
                Member(
                    request.cache,
                    request.ids[request.prefilled : request.prefilled + count].to(device, non_blocking=True),
                )
                for request, count in pieces
                if request.cache is not None
            ]
            try:
                given = self._step.begin(members)
            except StepError as error:
                out = self._make_way(pieces[error.member][0], error.cause)
                pieces = [piece for piece in pieces if piece[0] is not out]
                continue
            return given, pieces
        return None, []

    def _make_way(self, request: Request, error: TieredKVError) -> Request:
        """A request's tokens do not fit: it waits if it is only being read in, else the least urgent gives way.

        Returns:
            who is out of this step.
        """
        holding = [*self._reading, *self._decoding]
        if not isinstance(error, BudgetError) or len(holding) == 1:
            self.end(request, Finish.ERROR, error)
            return request
        out = request
        if request in self._decoding:
            out = victim(holding, self.stats.steps, self._settings.ageing_steps) or request
        self._give_up(out, str(error))
        return out

    def _give_up(self, request: Request, reason: str) -> None:
        """Free a request's blocks, which stay findable while there is room; it begins again when somebody has ended."""
        self._let_go(request)
        request.prefilled = 0
        request.preempted += 1
        request.handle.waits_for = f"room for its blocks: {reason}"
        self.stats.preempted += 1
        self._full = True
        self.waiting.append(request)

    def _let_go(self, request: Request) -> None:
        for group in (self.waiting, self._reading, self._decoding):
            if request in group:
                group.remove(request)
        cache, request.cache = request.cache, None
        if cache is not None:
            with contextlib.suppress(TieredKVError):
                self._store.publish(cache)
            cache.close()

    def _forward(self, given: StepInput, pieces: list[Piece]) -> torch.Tensor | None:
        """Logits `[requests whose last known token is in the step, vocabulary]`; None when the step failed."""
        complete = [index for index, (request, count) in enumerate(pieces) if request.missing == count]
        wanted = given.last.index_select(0, sent(complete or [0], given.last.device))
        options = {"logits_to_keep": wanted} if self._keeps_logits else {}
        started = time.perf_counter()
        try:
            out = self._model(given.ids, position_ids=given.positions, past_key_values=self._step, **options)
            self._step.end()
        except TieredKVError as error:
            self._step.abandon()
            for request in self._guilty(pieces, error):
                self.end(request, Finish.ERROR, error)
            return None
        except BaseException:
            self._step.abandon()
            raise
        self.stats.model_seconds += time.perf_counter() - started
        logits: torch.Tensor = out.logits[0]
        return logits if self._keeps_logits else logits[wanted]

    @staticmethod
    def _guilty(pieces: list[Piece], error: TieredKVError) -> list[Request]:
        """The requests that hold the block an error names; all of them when it names none."""
        everyone = [request for request, _ in pieces]
        if not isinstance(error, ChecksumError):
            return everyone
        holding = [
            request
            for request in everyone
            if request.cache is not None
            and any(block.id == error.block for block in request.cache.place.need_holder().table.blocks())
        ]
        return holding or everyone

    def _advance(self, pieces: list[Piece], logits: torch.Tensor) -> None:
        """Choose the next token of every request whose last known token was in the step."""
        complete = []
        for request, count in pieces:
            request.prefilled += count
            if request in self._reading:
                self.stats.prefilled_tokens += count
                grew = (request.prefilled - count) // self._block_size < request.prefilled // self._block_size
                if grew and request.missing and self.waiting and request.cache is not None:
                    self._store.publish(request.cache, durable=False)  # others may be waiting for these blocks
            if not request.missing:
                complete.append(request)
        if not complete:
            return
        greedy = largest(logits)
        for row, request in enumerate(complete):
            if request in self._reading:
                self._reading.remove(request)
                self._decoding.append(request)
                if request.cache is not None:
                    self._store.publish(request.cache)
            try:
                token = greedy[row] if request.sampler.is_greedy else request.sampler.choose(request.known, logits[row])
            except TieredKVError as error:  # this request's own fault: nobody else's answer depends on it
                self.end(request, Finish.ERROR, error)
                continue
            request.add(token)
            self._time(request)
            self.stats.new_tokens += 1
            request.handle.put(token)
            ended = "stop" if request.handle.is_stopped else request.sampler.ended_by(request.known, token)
            if ended is not None:
                self.end(request, Finish(ended))

    def _time(self, request: Request) -> None:
        """A request has a new token."""
        now, last = time.monotonic(), request.last_token_seconds
        if last is None:
            request.first_token_seconds = now
            self._timings.first_token(now - request.arrived_seconds)
        else:
            self._timings.between_tokens(now - last)
        request.last_token_seconds = now

    def end(self, request: Request, finish: Finish, error: TieredKVError | None = None) -> None:
        """Free what a request holds, and tell its caller."""
        self._let_go(request)
        self._full = False
        self.stats.ended(finish.value)
        request.handle.end(finish, error)
