"""What an engine does, for Prometheus: figures read when they are asked for, and histograms that the engine fills.

Imports: block, stats, engine, timings; prometheus_client.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from tieredkv.block import TIERS
from tieredkv.serving.engine import Engine
from tieredkv.serving.timings import Timings
from tieredkv.stats import CacheStats, TierStats

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class EngineMetrics(Timings, Collector):
    """Metrics of one engine in a registry of its own. No label or value comes from a prompt.

    Make it, give it to the engine as `timings=`, then `watch` the engine.
    """

    content_type = CONTENT_TYPE_LATEST
    """The media type of `text()`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._engine: Engine | None = None
        self._queued = self._histogram("queue_seconds", "From a request's arrival to the beginning of its prompt.")
        self._first = self._histogram("time_to_first_token_seconds", "From a request's arrival to its first token.")
        self._between = self._histogram("time_between_tokens_seconds", "From a token to the next one of a request.")
        self.registry.register(self)

    def watch(self, engine: Engine) -> None:
        """Read this engine's figures from now on."""
        self._engine = engine

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def queued(self, seconds: float) -> None:
        """A request's prompt was begun."""
        self._queued.observe(seconds)

    def first_token(self, seconds: float) -> None:
        """A request's first token came."""
        self._first.observe(seconds)

    def between_tokens(self, seconds: float) -> None:
        """A further token came."""
        self._between.observe(seconds)

    def collect(self) -> Iterator[Metric]:
        """For the registry: the figures as they are now."""
        if self._engine is not None:
            yield from _of_requests(self._engine)
            memory = self._engine.memory()
            yield from _of_tiers(memory)
            yield from _of_moves(memory)

    def _histogram(self, name: str, help: str) -> Histogram:
        return Histogram(f"tieredkv_{name}", help, registry=self.registry, buckets=_SECONDS)


def _of_requests(engine: Engine) -> Iterator[Metric]:
    stats = engine.stats()
    yield _gauge("requests_running", "Requests that decode.", stats.running)
    yield _gauge("requests_waiting", "Requests whose prompt is not read in yet, or not again.", stats.waiting)
    yield _gauge("requests_paused", "Of the waiting, those whose blocks were taken away.", stats.paused)
    yield _counter("preempted", "How often a request's blocks were taken away.", stats.preempted)
    finished = CounterMetricFamily("tieredkv_requests_finished", "Requests that ended.", labels=["reason"])
    for reason, count in sorted(stats.finished.items()):
        finished.add_metric([reason], count)
    yield finished
    yield _counter("prompt_tokens", "Tokens of the prompts that were begun.", stats.prompt_tokens)
    yield _counter("attached_tokens", "Of these, tokens whose blocks were there already.", stats.attached_tokens)
    share = stats.attached_tokens / stats.prompt_tokens if stats.prompt_tokens else 0.0
    yield _gauge("prefix_hit_ratio", "Share of the prompts' tokens that were there already, since the start.", share)
    yield _counter("prefilled_tokens", "Tokens computed for prompts.", stats.prefilled_tokens)
    yield _counter("generated_tokens", "Tokens generated.", stats.new_tokens)
    yield _counter("steps", "Forwards.", stats.steps)
    yield _counter("step_seconds", "Time in steps.", stats.step_seconds)
    yield _counter("model_seconds", "Of this, time in the model.", stats.model_seconds)


def _of_tiers(memory: CacheStats) -> Iterator[Metric]:
    tiers: list[tuple[str, TierStats]] = [(role, getattr(memory, role)) for role in TIERS]
    tiers = [(role, tier) for role, tier in tiers if tier.budget_bytes != 0]
    yield _tiered("tier_blocks", "Blocks held.", [(role, tier.blocks) for role, tier in tiers])
    yield _tiered("tier_used_bytes", "Bytes held.", [(role, tier.used_bytes) for role, tier in tiers])
    yield _tiered("tier_peak_bytes", "Most bytes held at any time.", [(role, tier.peak_bytes) for role, tier in tiers])
    budgets = [(role, tier.budget_bytes) for role, tier in tiers if tier.budget_bytes is not None]
    yield _tiered("tier_budget_bytes", "Most bytes it may hold; absent where the disk limits it.", budgets)
    reads = CounterMetricFamily("tieredkv_block_reads", "Block reads of attention, by where it was.", labels=["tier"])
    for role, tier in tiers:
        reads.add_metric([role], tier.hits)
    yield reads


def _of_moves(memory: CacheStats) -> Iterator[Metric]:
    moved = CounterMetricFamily("tieredkv_moved_bytes", "Bytes moved between tiers.", labels=["direction"])
    for direction, flow in sorted(memory.moves.items()):
        moved.add_metric([direction], flow.bytes)
    yield moved
    upward = memory.prefill.transfer_seconds + memory.decode.transfer_seconds
    hidden = 1 - min(memory.stall_seconds / upward, 1.0) if upward else 1.0
    yield _counter("stall_seconds", "Time that forwards waited for blocks.", memory.stall_seconds)
    yield _counter("transfer_seconds", "Time that blocks were on their way up.", upward)
    yield _gauge("overlap_ratio", "Share of that time behind which forwards computed; 0 on a CPU.", hidden)
    yield _counter("checksum_failures", "Blocks that were not as written.", memory.checksum_failures)
    yield _counter("tier_failures", "Failures of a lower tier that were survived.", memory.tier_failures)


def _gauge(name: str, help: str, value: float) -> Metric:
    return GaugeMetricFamily(f"tieredkv_{name}", help, value=value)


def _counter(name: str, help: str, value: float) -> Metric:
    return CounterMetricFamily(f"tieredkv_{name}", help, value=value)


def _tiered(name: str, help: str, values: Sequence[tuple[str, float]]) -> Metric:
    metric = GaugeMetricFamily(f"tieredkv_{name}", help, labels=["tier"])
    for role, value in values:
        metric.add_metric([role], value)
    return metric
