"""Runs a load test: how long words are, the load, the server's memory beside it, and the report.

Imports: errors, clock, loops, protocol, records, report, server, settings, shapes, words.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import httpx2

from tieredkv.errors import ConfigError
from tieredkv.loadtest import records, words
from tieredkv.loadtest.clock import Clock
from tieredkv.loadtest.loops import closed_loop, open_loop
from tieredkv.loadtest.protocol import Client
from tieredkv.loadtest.records import Record
from tieredkv.loadtest.report import Report, make_report
from tieredkv.loadtest.server import watch
from tieredkv.loadtest.settings import LoadSettings
from tieredkv.loadtest.shapes import Ask, Part, parts_of
from tieredkv.loadtest.words import WordSize

PROBE_WORDS = (16, 144)


async def run(
    settings: LoadSettings,
    *,
    on_begin: Callable[[int], None] = lambda requests: None,
    on_record: Callable[[Record], None] = lambda record: None,
    clock: Clock | None = None,
    transport: httpx2.AsyncBaseTransport | None = None,
) -> Report:
    """Send a load and report.

    Args:
        settings: what to do.
        on_begin: called with the number of requests, before the first.
        on_record: called with each request that has ended.
        clock: what times are read from.
        transport: of httpx2, for tests.

    Raises:
        ConfigError: the load cannot be sent: its trace, or the server that is not there.
    """
    clock, parts = clock or Clock(), parts_of(settings)
    async with Client(settings, clock, transport) as client:
        model = await client.find_model()
        size, notes = await _measure_words(client, settings.seed)
        on_begin(sum(len(part.asks) for part in parts))
        over = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(watch(client.metrics, clock, over))
            found = []
            try:
                for number, part in enumerate(parts):
                    found.append(await _send_part(number, part, client, size, settings, clock, on_record))
            finally:
                over.set()
        return make_report(settings, model, found, watching.result(), notes)


async def _send_part(
    number: int,
    part: Part,
    client: Client,
    size: WordSize,
    settings: LoadSettings,
    clock: Clock,
    on_record: Callable[[Record], None],
) -> tuple[int | None, Sequence[Record]]:
    async def send(ask: Ask, planned_seconds: float | None) -> Record:
        prompt = words.text(settings.seed, ask.number, size.words(ask.prompt_tokens))
        record = await client.ask(ask, prompt, part=number, planned_seconds=planned_seconds)
        on_record(record)
        return record

    if part.concurrency is None:
        return None, await open_loop(part.asks, send, clock)
    return part.concurrency, await closed_loop(part.asks, send, part.concurrency)


async def _measure_words(client: Client, seed: int) -> tuple[WordSize, list[str]]:
    """Ask twice for one token, and see how many tokens the prompts had."""
    found = []
    for index, count in enumerate(PROBE_WORDS):
        record = await client.ask(Ask(0, count, 1), words.text(seed, -1 - index, count))
        if record.error == records.CANNOT_CONNECT:
            raise ConfigError(
                "The server cannot be reached.", wanted="an answer", got=record.message, change="start it; check --url"
            )
        if record.prompt_tokens is None:
            why = record.message or "it sends no usage"
            return WordSize(), [f"A word is taken for a token: the server did not say how many a prompt has ({why})."]
        found.append(record.prompt_tokens)
    return WordSize.from_two(PROBE_WORDS, (found[0], found[1])), []
