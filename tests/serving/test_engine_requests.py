"""What one request asks for or suffers is its own affair: faults of sampling, stops from outside, its times."""

from __future__ import annotations

import pytest
from support import DIM, audit_store, tiny
from transformers import GenerationConfig

import tieredkv
from tieredkv.errors import ConfigError
from tieredkv.serving import Engine, EngineSettings, Finish, Timings

from .prompts import greedy, prompt

pytestmark = pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")


@pytest.mark.parametrize(
    "spoiled",
    [
        GenerationConfig(max_new_tokens=9, sequence_bias={(5000,): 1.0}, pad_token_id=0),
        GenerationConfig(max_new_tokens=9, do_sample=True, temperature=1e-45, pad_token_id=0),
    ],
    ids=["bias beyond the vocabulary", "no probability is a number"],
)
def test_settings_that_leave_no_token_end_their_request_and_no_other(spoiled: GenerationConfig) -> None:
    with tieredkv.KVStore(tiny(), hot="1024 tokens", warm=0, block_size=16) as store:
        engine = Engine(store._model, store)
        alone = engine.submit(prompt(30, 0), greedy(12))
        while engine.step():
            pass
        fine, bad = engine.submit(prompt(30, 0), greedy(12)), engine.submit(prompt(30, 1), spoiled)
        while engine.step():
            pass
        assert bad.finish is Finish.ERROR
        with pytest.raises(ConfigError, match="No token can be chosen"):
            bad.result()
        assert fine.result() == alone.result()
        assert engine.stats().finished == {"length": 2, "error": 1}
        engine.close()
        audit_store(engine._runner.blocks)


def test_a_listener_can_end_its_request_with_the_token_it_has_seen() -> None:
    with tieredkv.KVStore(tiny(), hot="1024 tokens", warm=0, block_size=16) as store:
        engine = Engine(store._model, store)
        handle = engine.submit(prompt(30, 0), greedy(12))
        seen: list[int | None] = []

        def listen(token: int | None) -> None:
            seen.append(token)
            if len(seen) == 4:
                handle.stop()

        handle.listen(listen)
        while engine.step():
            pass
        assert handle.finish is Finish.STOP and len(handle.result()) == 4
        assert seen == [*handle.result(), None]
        engine.close()


class Told(Timings):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.waits: list[float] = []
        self.firsts: list[float] = []
        self.gaps: list[float] = []

    def queued(self, seconds: float) -> None:
        self.waits.append(seconds)

    def first_token(self, seconds: float) -> None:
        self.firsts.append(seconds)

    def between_tokens(self, seconds: float) -> None:
        self.gaps.append(seconds)


def test_times_are_told_once_for_each_request_and_token_though_some_are_preempted() -> None:
    told = Told()
    with tieredkv.KVStore(tiny(), hot="288 tokens", warm=0, block_size=16, window=16) as store:
        engine = Engine(store._model, store, EngineSettings(prefill_tokens=64), timings=told)
        for seed in range(8):
            engine.submit(prompt(60, seed), greedy(40))
        while engine.step():
            pass
        assert engine.stats().preempted > 0
        assert (len(told.waits), len(told.firsts), len(told.gaps)) == (8, 8, 8 * 39)
        assert min(told.waits + told.firsts + told.gaps) >= 0
        assert all(wait <= first for wait, first in zip(sorted(told.waits), sorted(told.firsts), strict=True))
        engine.close()


def test_an_engine_tells_what_fits() -> None:
    sizes = {"hot": "1024 tokens", "warm": "512 tokens"}
    with tieredkv.KVStore(tiny(), **sizes, block_size=16) as store:  # type: ignore[arg-type]
        engine = Engine(store._model, store)
        room = engine.room()
        assert room.token_bytes == 2 * 2 * 2 * DIM * 4  # K and V, layers, heads, dim, fp32
        assert set(room.tier_tokens) == {"hot", "warm"} and room.tier_tokens["warm"] == 512
        assert room.capacity_tokens == sum(tokens or 0 for tokens in room.tier_tokens.values())
        assert engine.memory().hot.budget_bytes == 1024 * room.token_bytes
        assert engine.is_open
        engine.close()
        assert not engine.is_open
