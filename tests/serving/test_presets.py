"""Presets: dialogues stay hot and share their system prompt; documents leave at once as int8, questions stay hot."""

from __future__ import annotations

import pytest
from support import audit_store, tiny

import tieredkv
from tieredkv.errors import ConfigError
from tieredkv.serving import Engine, EngineSettings, preset

from .prompts import greedy, prompt

pytestmark = pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
NEW = greedy(20)


def test_a_preset_changes_only_what_it_is_about() -> None:
    base = tieredkv.CacheSettings(hot="1MiB", warm="2MiB", block_size=32, verify="first")
    cache, engine = preset("documents", base, EngineSettings(max_running=5))
    assert (cache.hot, cache.warm, cache.block_size, cache.verify) == ("1MiB", "2MiB", 32, "first")
    assert (cache.codec, cache.placement, cache.window, engine.max_running) == ("int8", "window", 512, 5)
    assert preset("chat")[0].codec == "raw"
    with pytest.raises(ConfigError, match="chat or documents"):
        preset("games")


def test_a_chat_stays_hot_and_its_system_prompt_is_there_once() -> None:
    cache, settings = preset("chat", tieredkv.CacheSettings(hot="2048 tokens", warm="4096 tokens", block_size=16))
    with tieredkv.KVStore(tiny(), settings=cache) as store:
        engine = Engine(store._model, store, settings)
        system = prompt(64, 0)
        first = engine.submit(system + prompt(200, 1), NEW)
        while first.finish is None:
            engine.step()
        others = [engine.submit(system + prompt(200, seed), NEW) for seed in (2, 3)]
        for _ in range(5):
            engine.step()
        assert engine.stats().attached_tokens == 2 * 64
        running = engine._runner.everyone()
        rows = [request.cache.place.need_holder().table.rows[0] for request in running if request.cache]
        assert len(rows) == 2 and rows[0][:4] == rows[1][:4]
        assert {block.location for row in rows for block in row} == {"hot"}
        assert not any(engine.memory().moves.values())
        engine.close()
        assert {handle.finish for handle in others} == {"cancelled"}
        audit_store(engine._runner.blocks)


def test_a_document_leaves_the_device_as_int8_and_its_question_stays() -> None:
    cache, settings = preset("documents", tieredkv.CacheSettings(hot="2048 tokens", warm="4096 tokens", block_size=16))
    with tieredkv.KVStore(tiny(), settings=cache) as store:
        engine = Engine(store._model, store, settings)
        document = prompt(1200, 0)
        asked = engine.submit(document + prompt(30, 1), NEW)
        for _ in range(10):
            engine.step()
        (request,) = engine._runner.everyone()
        assert request.cache is not None
        row = request.cache.place.need_holder().table.rows[0]
        hot = [block.location == "hot" for block in row]
        assert hot == sorted(hot) and 512 // 16 <= sum(hot) <= 512 // 16 + 4  # the newest blocks, and no others
        memory = engine.memory()
        raw = memory.hot.budget_bytes // 2048 if memory.hot.budget_bytes else 0
        stored = memory.warm.used_bytes / (memory.warm.blocks * 16)
        assert stored < 0.5 * raw, "fp32 in int8 takes about a third, with its scales"
        while engine.step():
            pass
        assert len(asked.result()) == 20
        again = engine.submit(document + prompt(30, 2), NEW)
        while engine.step():
            pass
        assert len(again.result()) == 20 and engine.stats().attached_tokens == 1200
        engine.close()
        audit_store(engine._runner.blocks)
