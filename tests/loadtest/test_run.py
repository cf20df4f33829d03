"""Whole load tests: what the report says against what the server did, and times of a clock that the test turns."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from loadtest.fake_server import TEMPLATE_TOKENS, TOKENS_PER_WORD, Answer, FakeServer, Seen
from support import tiny

import tieredkv
from tieredkv.errors import ConfigError
from tieredkv.loadtest import Clock, LoadSettings, Report, run
from tieredkv.loadtest.server import DEVICE_BYTES, DEVICE_TIER, KV_BYTES, total

URL = "http://server"


class Hand(Clock):
    """A clock that goes on only when somebody sleeps, after all others have done what they can."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def now(self) -> float:
        return self.seconds

    async def sleep(self, seconds: float) -> None:
        for _ in range(500):
            await asyncio.sleep(0)
        self.seconds += seconds


class Timed(httpx2.AsyncBaseTransport):
    """A server without a network: each answer's first token takes `first` seconds, the others `gaps` in turn."""

    def __init__(self, clock: Hand, first: float, gaps: tuple[float, ...]) -> None:
        self.clock, self.first, self.gaps = clock, first, gaps

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if request.url.path == "/v1/models":
            return httpx2.Response(200, json={"data": [{"id": "m"}]})
        if request.url.path == "/metrics":
            return httpx2.Response(404)
        body = json.loads(await request.aread())
        return httpx2.Response(
            200, headers={"Content-Type": "text/event-stream"}, content=self._stream(body["max_tokens"])
        )

    async def _stream(self, tokens: int) -> AsyncIterator[bytes]:
        for number in range(tokens):
            self.clock.seconds += self.first if number == 0 else self.gaps[(number - 1) % len(self.gaps)]
            yield _event({"choices": [{"delta": {"content": "x"}}]})
        yield _event({"choices": [{"delta": {}, "finish_reason": "length"}]})
        yield _event({"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": tokens}})
        yield b"data: [DONE]\n\n"


def _event(chunk: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(chunk)}\n\n".encode()


def timed(first: float, gaps: tuple[float, ...], **options: Any) -> Report:
    clock = Hand()
    return asyncio.run(run(LoadSettings(URL, **options), clock=clock, transport=Timed(clock, first, gaps)))


def test_times_are_those_of_the_server() -> None:
    report = timed(0.5, (0.25, 0.25, 0.25, 1.0), shape="10:5", requests=4, concurrency=1)
    whole = report.whole
    first, between = whole.first_token_seconds, whole.between_tokens_seconds
    assert (first.count, first.least, first.p50, first.p99) == (4, 0.5, 0.5, 0.5)
    assert (between.count, between.p50, between.p90, between.p99, between.most) == (16, 0.25, 1.0, 1.0, 1.0)
    assert between.mean == 1.75 / 4
    assert whole.seconds == 4 * 2.25 and whole.request_seconds.p50 == 2.25
    assert whole.requests_per_second == 4 / 9 and whole.answer_tokens_per_second == 20 / 9
    assert whole.tokens_per_second == (20 + 40) / 9
    assert (whole.peak_concurrency, whole.mean_concurrency) == (1, 1.0)
    assert report.requests[1]["sent_seconds"] == 2.25 and report.requests[3]["ended_seconds"] == 9.0
    assert sum(rate * 9 / len(report.throughput) for _, rate in report.throughput) == pytest.approx(20)


def test_requests_are_sent_at_their_times(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    times = ["00.0", "01.0", "01.0", "30.0"]
    rows = [f"2023-11-16 18:15:{at},20,3" for at in times]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    report = timed(0.0, (0.0,), trace=trace, scale=2.0)
    assert report.is_open and [request["sent_seconds"] for request in report.requests] == [0.0, 2.0, 2.0, 60.0]
    assert report.whole.late_seconds.most == 0.0


def test_a_client_that_comes_late_says_so(tmp_path: Path) -> None:
    """The first answer turns the clock on past the second request's time."""
    trace = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:15:{at},20,3" for at in ("00.0", "01.0")]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    report = timed(4.0, (0.0,), trace=trace)
    assert report.whole.late_seconds.most == 4.0
    assert report.requests[1]["sent_seconds"] == 5.0


# ---- over a network


def against(server: FakeServer, **options: Any) -> Report:
    async def go() -> Report:
        async with server:
            return await run(LoadSettings(server.url, **options))

    return asyncio.run(go())


def test_a_report_has_what_the_server_did() -> None:
    """Of 20 requests two are refused, one breaks off, one is nonsense; the first two are the probes."""

    def behave(number: int, seen: Seen) -> Answer:
        return {
            4: Answer(status=503),
            9: Answer(status=503),
            12: Answer(breaks_after=2),
            15: Answer(malformed_after=1),
        }.get(number, Answer())

    server = FakeServer(behave)
    report = against(server, requests=20, shape="100:4", concurrency=1)
    whole = report.whole
    assert (whole.requests, whole.answered) == (20, 16)
    assert whole.errors == {"broken off": 1, "http 503": 2, "malformed": 1}
    # The probes' two are not counted, and of the malformed answer nobody read the last three.
    assert whole.answer_tokens == 16 * 4 + 2 + 1 == server.answer_tokens - 2 - 3
    assert whole.prompt_lengths.count == whole.answer_lengths.count == 16
    assert whole.prompt_lengths.p50 == 100.0 == TEMPLATE_TOKENS + TOKENS_PER_WORD * server.seen[2].words
    assert [request["error"] for request in report.requests].count(None) == 16
    assert report.requests[2]["error"] == "http 503"
    assert len({str(seen.body["messages"]) for seen in server.seen}) == 22
    assert report.model == "a-model" and "page of metrics" in report.notes[-1]


@pytest.mark.parametrize("count", [1, 5])
def test_so_many_are_kept_going_at_once(count: int) -> None:
    """The server answers nobody until so many are there, and never sees more."""
    server = FakeServer(lambda number, seen: Answer(crowd=1 if number < 2 else count))
    report = against(server, requests=12, shape="20:3", concurrency=count)
    assert server.peak == report.whole.peak_concurrency == count
    assert report.whole.answered == 12


def test_an_open_loop_does_not_wait_for_answers() -> None:
    server = FakeServer(lambda number, seen: Answer(crowd=1 if number < 2 else 6))
    report = against(server, requests=6, shape="20:3", rate=1000.0)
    assert server.peak == 6 and report.whole.answered == 6


def test_a_ramp_is_reported_by_its_parts() -> None:
    server = FakeServer()
    report = against(server, requests=30, ramp=True, concurrency=4)
    assert [part.concurrency for part in report.parts] == [1, 2, 4]
    assert [part.requests for part in report.parts] == [10, 10, 10]
    middles = [part.prompt_lengths.p50 for part in report.parts]
    assert middles == sorted(middles) and sum(part.answer_tokens for part in report.parts) == report.whole.answer_tokens
    assert [request["part"] for request in report.requests] == [0] * 10 + [1] * 10 + [2] * 10


def test_a_server_without_usage_is_reported_as_such() -> None:
    report = against(FakeServer(lambda number, seen: Answer(usage=False)), requests=3, shape="30:5", concurrency=1)
    assert report.whole.answer_tokens == 15 and report.whole.prompt_lengths.count == 0
    assert any("usage" in note for note in report.notes)


def test_several_tokens_in_a_piece_and_short_answers_are_noted() -> None:
    report = against(
        FakeServer(lambda number, seen: Answer(pieces=2, tokens_per_piece=3)), requests=3, shape="30:9", concurrency=1
    )
    assert report.whole.answer_tokens == 18
    assert any("3.00 tokens" in note for note in report.notes)
    assert any("3 of 3 answers ended before" in note for note in report.notes)


def page(kv: float, device: float) -> str:
    lines = [
        f"# HELP {KV_BYTES} bytes of blocks",
        f"# TYPE {KV_BYTES} gauge",
        f'{KV_BYTES}{{tier="hot"}} {kv}',
        f'{KV_BYTES}{{tier="warm"}} 24',
        f"{KV_BYTES}_of_another 7",
    ]
    peaks = [f"{DEVICE_BYTES}{{{DEVICE_TIER}}} {device}", f'{DEVICE_BYTES}{{tier="warm"}} 1e30']
    return "\n".join(lines + peaks) + "\n"


def test_the_servers_memory_is_read_from_its_page() -> None:
    report = against(
        FakeServer(metrics=(page(1000, 5_000_000), page(76, 6_000_000))), requests=3, shape="30:5", concurrency=1
    )
    assert [value for _, value in report.server.kv_bytes][:2] == [1024.0, 100.0]
    assert max(value for _, value in report.server.device_bytes) == 6_000_000
    assert not report.server.missing


def test_a_page_of_another_server_is_said_to_have_nothing() -> None:
    report = against(FakeServer(metrics=("vllm:num_requests_running 3\n",)), requests=2, shape="30:5", concurrency=1)
    assert not report.server.kv_bytes and KV_BYTES in report.server.missing
    report = against(FakeServer(metrics=(f"{KV_BYTES} 8\n",)), requests=2, shape="30:5", concurrency=1)
    assert report.server.kv_bytes and DEVICE_BYTES in report.notes[-1] and KV_BYTES not in report.notes[-1]


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="cannot be reached"):
        asyncio.run(run(LoadSettings("http://127.0.0.1:1", model="m")))


def test_the_names_of_the_metrics_are_those_of_our_server() -> None:
    pytest.importorskip("prometheus_client", reason="our server's metrics need `pip install prometheus_client`")
    from tieredkv.serving import Engine
    from tieredkv.serving.metrics import EngineMetrics

    model = tiny()
    with tieredkv.KVStore(model, hot="512 tokens", warm="64 tokens", block_size=16) as store:
        metrics = EngineMetrics()
        engine = Engine(model, store)
        metrics.watch(engine)
        page = metrics.text().decode()
        engine.close()
    assert total(page, KV_BYTES) is not None
    assert total(page, DEVICE_BYTES, DEVICE_TIER) is not None
