"""Requests that join, leave, wait and give way: every one gets the tokens and logits of its own cache-free forward."""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from support import TOLERANCE, audit_store, tiny
from transformers import GenerationConfig

import tieredkv
from tieredkv.errors import BudgetError, ClosedError, ConfigError, UnsupportedModelError
from tieredkv.serving import Engine, EngineSettings, Finish, RequestHandle
from tieredkv.serving.request import Request
from tieredkv.serving.runner import Runner

from .prompts import greedy, prompt

pytestmark = pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[torch.Tensor]]:
    """Logits from which each request's tokens were chosen."""
    logits_of: dict[int, list[torch.Tensor]] = defaultdict(list)
    advance = Runner._advance

    def record(self: Runner, pieces: list[tuple[Request, int]], logits: torch.Tensor) -> None:
        complete = [request for request, count in pieces if request.missing == count]
        for request, row in zip(complete, logits, strict=False):
            logits_of[request.handle.number].append(row.clone())
        advance(self, pieces, logits)

    monkeypatch.setattr(Runner, "_advance", record)
    return logits_of


def check(model: Any, ids: list[int], handle: RequestHandle, logits: list[torch.Tensor]) -> None:
    tokens = handle.result(0)
    whole = torch.tensor([ids + tokens])
    with torch.no_grad():
        wanted = model(whole, use_cache=False).logits[0, len(ids) - 1 : -1]
    assert len(logits) == len(tokens)
    assert (torch.stack(logits) - wanted).abs().max() <= TOLERANCE * wanted.abs().max()
    assert tokens == wanted.argmax(-1).tolist()


def run(engine: Engine) -> int:
    steps = 0
    while engine.step():
        steps += 1
        assert steps < 3000
    return steps


@pytest.mark.parametrize("hot", ["4096 tokens", "640 tokens"])
def test_requests_of_any_length_at_any_time(cold_dir: Path, hot: str, seen: dict[int, list[torch.Tensor]]) -> None:
    model = tiny()
    chance = random.Random(1)
    with tieredkv.KVStore(
        model, hot=hot, warm="256 tokens", cold=cold_dir, block_size=16, window=16, durable=False
    ) as store:
        engine = Engine(model, store, EngineSettings(prefill_tokens=48))
        system = prompt(40, 99)
        asked: list[tuple[list[int], RequestHandle]] = []
        for i in range(24):
            ids = (system if i % 3 == 0 else []) + prompt(chance.randint(1, 120), i)
            asked.append((ids, engine.submit(ids, greedy(chance.randint(1, 24)))))
            for _ in range(chance.randint(0, 4)):
                engine.step()
        run(engine)
        for ids, handle in asked:
            assert handle.finish is Finish.LENGTH
            check(model, ids, handle, seen[handle.number])
        stats = engine.stats()
        assert stats.finished == {"length": 24} and not stats.running and not stats.waiting
        assert stats.attached_tokens >= 6 * 32  # the system prompt was computed once, its last block aside
        engine.close()


def test_blocks_run_out_and_somebody_gives_way(seen: dict[int, list[torch.Tensor]]) -> None:
    """Room for three requests of eight: all of them end, in the order of their priority and arrival."""
    model = tiny()
    with tieredkv.KVStore(model, hot="288 tokens", warm=0, block_size=16, window=16, durable=False) as store:
        engine = Engine(model, store, EngineSettings(prefill_tokens=64))
        asked = [(prompt(60, i), engine.submit(prompt(60, i), greedy(40), priority=i // 6)) for i in range(8)]
        order: list[int] = []
        for _, handle in asked:
            handle.listen(lambda token, n=handle.number: order.append(n) if token is None else None)
        waited = False
        while engine.step():
            waited = waited or any(handle.waits_for for _, handle in asked)
        assert waited and engine.stats().preempted > 0
        for ids, handle in asked:
            check(model, ids, handle, seen[handle.number][-len(handle.result()) :])
        assert set(order[:2]) == {6, 7}
        engine.close()
        audit_store(store._shared.store)


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    model = tiny()
    with tieredkv.KVStore(model, hot="160 tokens", warm=0, block_size=16, window=16) as store:
        engine = Engine(model, store, EngineSettings(max_model_len=120))
        with pytest.raises(BudgetError, match="max_model_len"):
            engine.submit(prompt(100, 0), greedy(30))
        with pytest.raises(ConfigError):
            engine.submit([], greedy(3))
        with pytest.raises(ConfigError):
            engine.submit([1, 500], greedy(3))
        with pytest.raises(ConfigError, match="num_beams"):
            engine.submit([1, 5], GenerationConfig(num_beams=3, max_new_tokens=3))
        with pytest.raises(ConfigError):
            engine.submit([1, 5], GenerationConfig(max_length=2))
        large = Engine(model, store)
        with pytest.raises(BudgetError, match="can never fit") as caught:
            large.submit(prompt(400, 0), greedy(30))
        assert "430 tokens" in str(caught.value)
        engine.close()
        with pytest.raises(ClosedError):
            engine.submit([1], greedy(1))
    with tieredkv.KVStore(tiny("gemma3"), hot="512 tokens", warm=0) as store:
        model = store._model
        with pytest.raises(UnsupportedModelError):
            Engine(model, store)


def test_cancelled_requests_free_their_blocks_within_a_step(seen: dict[int, list[torch.Tensor]]) -> None:
    model = tiny()
    with tieredkv.KVStore(model, hot="1024 tokens", warm=0, block_size=16, durable=False) as store:
        engine = Engine(model, store)
        handles = [engine.submit(prompt(30 + i, i), greedy(50)) for i in range(4)]
        for _ in range(5):
            engine.step()
        handles[1].cancel()
        handles[1].cancel()
        late = engine.submit(prompt(9, 9), greedy(4))
        late.cancel()
        engine.step()
        assert handles[1].finish is Finish.CANCELLED and late.finish is Finish.CANCELLED
        assert late.result(0) == [] and 0 < len(handles[1].result(0)) <= 6
        run(engine)
        for i in (0, 2, 3):
            check(model, prompt(30 + i, i), handles[i], seen[handles[i].number])
        engine.close()


def test_one_request_that_fails_leaves_the_others_alone(seen: dict[int, list[torch.Tensor]]) -> None:
    """Warm memory of one request's block is damaged: it ends with a ChecksumError, the others with their tokens."""
    model = tiny()
    settings = tieredkv.CacheSettings(read_in_place=False)
    with tieredkv.KVStore(
        model, hot="192 tokens", warm="1024 tokens", block_size=16, window=16, settings=settings, durable=False
    ) as store:
        engine = Engine(model, store)
        asked = [(prompt(100, i), engine.submit(prompt(100, i), greedy(12))) for i in range(3)]
        for _ in range(60):
            engine.step()
            if all(len(seen[i]) > 3 for i in range(3)):
                break
        request = engine._runner._decoding[1]
        block = next(
            b for b in request.cache.place.need_holder().table.blocks() if b.hot is None and b.warm is not None
        )
        blocks = store._shared.store
        blocks.prefetcher.flush()
        for plane in blocks.warm.run(0, block.warm, 1):
            plane.view(torch.uint8)[..., 0] ^= 1
        run(engine)
        assert asked[1][1].finish is Finish.ERROR
        with pytest.raises(tieredkv.ChecksumError):
            asked[1][1].result(0)
        for i in (0, 2):
            check(model, *asked[i], seen[i])
        engine.close()


def test_sampling_is_the_requests_own_and_stops_where_it_should() -> None:
    model = tiny()
    config = GenerationConfig(max_new_tokens=12, do_sample=True, temperature=1.5, top_k=20, pad_token_id=0)
    with tieredkv.KVStore(model, hot="1024 tokens", warm=0, block_size=16) as store, Engine(model, store) as engine:
        twice = [engine.submit(prompt(20, 1), config, seed=5) for _ in range(2)]
        other = engine.submit(prompt(20, 1), config, seed=6)
        tokens = [list(handle) for handle in (*twice, other)]
        assert tokens[0] == tokens[1] != tokens[2]
        stop = tokens[0][4]
        ended = engine.submit(
            prompt(20, 1), GenerationConfig(**{**config.to_diff_dict(), "eos_token_id": stop}), seed=5
        )
        assert ended.result(60) == tokens[0][: tokens[0].index(stop) + 1] and ended.finish is Finish.STOP


def test_a_model_that_fails_ends_everybody_with_the_reason() -> None:
    model = tiny()
    with tieredkv.KVStore(model, hot="1024 tokens", warm=0, block_size=16) as store, Engine(model, store) as engine:

        def fail(*_: object) -> None:
            raise RuntimeError("no more")

        hook = model.model.layers[1].register_forward_pre_hook(fail)
        handle = engine.submit(prompt(20, 1), greedy(5))
        with pytest.raises(ClosedError, match="no more"):
            handle.result(60)
        hook.remove()
        with pytest.raises(ClosedError):
            engine.submit(prompt(20, 1), greedy(5))


def test_a_prefix_is_computed_once_however_many_ask_for_it(seen: dict[int, list[torch.Tensor]]) -> None:
    """Those who come while it is being read in wait for its blocks, not for the whole prompt."""
    model = tiny()
    common = prompt(160, 0)
    texts = [[*common, *prompt(30 + n, 10 + n)] for n in range(8)]
    settings = EngineSettings(prefill_tokens=32)
    with tieredkv.KVStore(model, hot="4096 tokens", warm=0, block_size=16, durable=False) as store:
        engine = Engine(model, store, settings)
        busy = engine.submit(prompt(20, 99), greedy(60))  # so that prompts are read in pieces
        handles = [engine.submit(text, greedy(4)) for text in texts]
        run(engine)
        for text, handle in zip(texts, handles, strict=True):
            check(model, text, handle, seen[handle.number])
        assert len(busy.result(0)) == 60
        distinct = 20 + 160 + sum(len(text) - 160 for text in texts)
        assert engine.stats().prefilled_tokens <= distinct
        engine.close()
