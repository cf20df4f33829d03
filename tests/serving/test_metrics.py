"""Metrics are those of the engine, in a registry of their own, and the dashboard asks for no others."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support import tiny

import tieredkv
from tieredkv.serving import Engine, EngineSettings

from .endpoint.conftest import needs_packages
from .prompts import greedy, prompt

pytestmark = [needs_packages, pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")]

DASHBOARD = Path(__file__).parents[2] / "integrations" / "serving" / "grafana.json"
NEW = greedy(40)


def values(metrics: Any) -> dict[str, float]:
    """Name with labels -> value."""
    lines = metrics.text().decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


@pytest.fixture
def seen(cold_dir: Path) -> tuple[Any, Engine, dict[str, float]]:
    """Metrics after requests that shared a prefix, ran out of room and were preempted."""
    from tieredkv.serving.metrics import EngineMetrics

    metrics = EngineMetrics()
    sizes: dict[str, Any] = {"hot": "256 tokens", "warm": "128 tokens", "cold": cold_dir, "window": 16}
    with tieredkv.KVStore(tiny(), **sizes, block_size=16) as store:
        engine = Engine(store._model, store, EngineSettings(prefill_tokens=64), timings=metrics)
        assert "tieredkv_steps_total" not in values(metrics)
        metrics.watch(engine)
        for seed in range(6):
            engine.submit(prompt(64, 0) + prompt(60, seed), NEW)
        engine.submit(prompt(10, 9), NEW).cancel()
        while engine.step():
            pass
        engine._runner.blocks.device.synchronize()
        found = values(metrics)
        engine.close()
    return metrics, engine, found


def test_metrics_are_what_the_engine_did(seen: tuple[Any, Engine, dict[str, float]]) -> None:
    _, engine, found = seen
    stats = engine.stats()
    assert found['tieredkv_requests_finished_total{reason="length"}'] == 6
    assert found['tieredkv_requests_finished_total{reason="cancelled"}'] == 1
    assert found["tieredkv_requests_running"] == found["tieredkv_requests_waiting"] == 0
    assert found["tieredkv_prompt_tokens_total"] == stats.prompt_tokens == 6 * 124
    assert found["tieredkv_attached_tokens_total"] == stats.attached_tokens > 0
    assert found["tieredkv_prefix_hit_ratio"] == stats.attached_tokens / stats.prompt_tokens
    assert found["tieredkv_generated_tokens_total"] == stats.new_tokens == 6 * 40
    assert found["tieredkv_preempted_total"] == stats.preempted
    assert found["tieredkv_steps_total"] == stats.steps
    assert 0 < found["tieredkv_model_seconds_total"] < found["tieredkv_step_seconds_total"]
    assert found["tieredkv_queue_seconds_count"] == found["tieredkv_time_to_first_token_seconds_count"] == 6
    assert found["tieredkv_time_between_tokens_seconds_count"] == 6 * 39
    assert found["tieredkv_time_to_first_token_seconds_sum"] >= found["tieredkv_queue_seconds_sum"]


def test_metrics_of_tiers_are_those_of_the_store(seen: tuple[Any, Engine, dict[str, float]]) -> None:
    _, _, found = seen
    for tier in ("hot", "warm"):
        used, budget = (found[f'tieredkv_tier_{what}_bytes{{tier="{tier}"}}'] for what in ("used", "budget"))
        peak = found[f'tieredkv_tier_peak_bytes{{tier="{tier}"}}']
        assert 0 < used <= peak <= budget
        assert found[f'tieredkv_block_reads_total{{tier="{tier}"}}'] > 0
    assert 'tieredkv_tier_budget_bytes{tier="cold"}' not in found  # nothing but the disk limits it
    assert found['tieredkv_tier_blocks{tier="warm"}'] > 0
    assert found['tieredkv_moved_bytes_total{direction="hot_to_warm"}'] > 0
    assert found["tieredkv_stall_seconds_total"] >= 0 and 0 <= found["tieredkv_overlap_ratio"] <= 1


def test_two_engines_do_not_share_metrics() -> None:
    from prometheus_client import REGISTRY

    from tieredkv.serving.metrics import EngineMetrics

    first, second = EngineMetrics(), EngineMetrics()
    first.first_token(1.0)
    assert values(first)["tieredkv_time_to_first_token_seconds_count"] == 1
    assert values(second)["tieredkv_time_to_first_token_seconds_count"] == 0
    assert not [metric for metric in REGISTRY.collect() if metric.name.startswith("tieredkv")]


def test_a_paused_request_is_counted_as_waiting() -> None:
    with tieredkv.KVStore(tiny(), hot="288 tokens", warm=0, block_size=16, window=16) as store:
        engine = Engine(store._model, store, EngineSettings(prefill_tokens=64))
        for seed in range(8):
            engine.submit(prompt(60, seed), NEW)
        most = 0
        while engine.step():
            stats = engine.stats()
            assert stats.paused <= stats.waiting
            most = max(most, stats.paused)
        assert most > 0 and engine.stats().paused == 0
        engine.close()


def test_the_dashboard_asks_for_all_metrics_and_no_others(seen: tuple[Any, Engine, dict[str, float]]) -> None:
    _, _, found = seen
    exported = {name.split("{")[0] for name in found}
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [entry["query"] for entry in dashboard["templating"]["list"] if entry["type"] == "query"]
    asked = set(re.findall(r"\btieredkv_\w+", " ".join(queries)))
    assert asked <= exported
    of_histograms = {name for name in exported if re.search(r"_(count|sum|created)$", name)}
    assert exported - of_histograms - asked == set()
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
