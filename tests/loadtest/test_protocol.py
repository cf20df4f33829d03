"""Single requests against a server that answers, refuses, breaks off and talks nonsense."""

from __future__ import annotations

import asyncio
import socket

import pytest
from loadtest.fake_server import TEMPLATE_TOKENS, TOKENS_PER_WORD, Answer, FakeServer, Seen

from tieredkv.errors import ConfigError
from tieredkv.loadtest import records
from tieredkv.loadtest.clock import Clock
from tieredkv.loadtest.protocol import Chunk, Client, StreamFailure
from tieredkv.loadtest.records import Record
from tieredkv.loadtest.settings import LoadSettings
from tieredkv.loadtest.shapes import Ask

PROMPT = "four words are here"


def ask_one(answer: Answer, *, timeout_seconds: float = 60.0, chat: bool = True) -> tuple[Record, Seen]:
    async def go() -> tuple[Record, Seen]:
        async with FakeServer(lambda number, seen: answer) as server:
            settings = LoadSettings(server.url, chat=chat, timeout_seconds=timeout_seconds, api_key="key")
            async with Client(settings, Clock()) as client:
                await client.find_model()
                return await client.ask(Ask(3, 19, 6), PROMPT), server.seen[0]

    return asyncio.run(go())


@pytest.mark.parametrize("chat", [True, False])
def test_an_answer_is_counted(chat: bool) -> None:
    record, seen = ask_one(Answer(tokens_per_piece=2), chat=chat)
    assert (record.error, record.finish, len(record.piece_seconds)) == (None, "length", 6)
    assert record.prompt_tokens == TEMPLATE_TOKENS + TOKENS_PER_WORD * 4
    assert record.answer_tokens == record.new_tokens == 12
    assert seen.path == ("/v1/chat/completions" if chat else "/v1/completions")
    assert seen.headers["authorization"] == "Bearer key"
    assert seen.body["model"] == "a-model" and seen.body["max_tokens"] == 6
    assert seen.body["stream"] and seen.body["stream_options"] == {"include_usage": True}


def test_without_a_usage_pieces_are_counted() -> None:
    record, _ = ask_one(Answer(usage=False))
    assert (record.error, record.prompt_tokens, record.answer_tokens, record.new_tokens) == (None, None, None, 6)


def test_an_answer_of_no_tokens_is_whole() -> None:
    record, _ = ask_one(Answer(pieces=0))
    assert (record.error, record.new_tokens, record.first_token_seconds) == (None, 0, None)


@pytest.mark.parametrize(
    ("answer", "kind", "pieces"),
    [
        (Answer(status=503), "http 503", 0),
        (Answer(status=429), "http 429", 0),
        (Answer(breaks_after=0), records.BROKEN_OFF, 0),
        (Answer(breaks_after=4), records.BROKEN_OFF, 4),
        (Answer(ends_early=True), records.BROKEN_OFF, 6),
        (Answer(malformed_after=2), records.MALFORMED, 2),
        (Answer(kind="text/html"), records.MALFORMED, 0),
        (Answer(fails_after=3), records.SERVER_ERROR, 3),
    ],
)
def test_failures_by_kind(answer: Answer, kind: str, pieces: int) -> None:
    record, _ = ask_one(answer)
    assert (record.error, len(record.piece_seconds)) == (kind, pieces)
    assert record.message


def test_a_server_that_says_nothing_is_given_up() -> None:
    record, _ = ask_one(Answer(holds=True), timeout_seconds=0.2)
    assert record.error == records.TIMED_OUT


def test_nobody_listens() -> None:
    with socket.socket() as held:  # bound and not listening: nobody else takes the port
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}"

        async def go() -> Record:
            async with Client(LoadSettings(url, model="m"), Clock()) as client:
                assert await client.metrics() is None
                return await client.ask(Ask(0, 5, 5), PROMPT)

        record = asyncio.run(go())
    assert record.error == records.CANNOT_CONNECT and record.ended_seconds >= record.sent_seconds


def test_a_server_without_a_model() -> None:
    async def go() -> None:
        async with FakeServer(models=()) as server, Client(LoadSettings(server.url), Clock()) as client:
            await client.find_model()

    with pytest.raises(ConfigError, match="which models"):
        asyncio.run(go())


@pytest.mark.parametrize("options", [{"url": "http://host:port"}, {"api_key": "\u043a"}])
def test_what_cannot_be_sent(options: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="cannot be asked"):
        Client(LoadSettings(**{"url": "http://127.0.0.1:1", **options}), Clock())


@pytest.mark.parametrize("data", ["[]", "3", '{"choices": [3]}', '{"choices": {"a": 1}}', '{"usage": {"a": 1}}', "{"])
def test_chunks_that_are_none(data: str) -> None:
    with pytest.raises(StreamFailure) as caught:
        Chunk.read(data)
    assert caught.value.kind == records.MALFORMED
