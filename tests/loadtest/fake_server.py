"""A small server that speaks the OpenAI protocol as told: it can be slow, refuse, break off, or talk nonsense.

Standard library only. It counts what it did, for comparison with what a load test reports.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

TOKENS_PER_WORD = 3
TEMPLATE_TOKENS = 7


@dataclasses.dataclass(frozen=True)
class Answer:
    """How one request is answered.

    Args:
        pieces: of the answer; None for as many as were asked for.
        tokens_per_piece: what the usage says of each.
        status: other than 200, and nothing else is sent.
        breaks_after: pieces after which the connection is dropped.
        malformed_after: pieces after which a chunk is no JSON.
        fails_after: pieces after which an error is sent as a chunk.
        ends_early: the stream ends in good order without a reason to finish and without [DONE].
        usage: whether a usage is sent.
        kind: content type.
        holds: never answer.
        crowd: answer only when so many requests are under way.
    """

    pieces: int | None = None
    tokens_per_piece: int = 1
    status: int = 200
    breaks_after: int | None = None
    malformed_after: int | None = None
    fails_after: int | None = None
    ends_early: bool = False
    usage: bool = True
    kind: str = "text/event-stream"
    holds: bool = False
    crowd: int = 1


@dataclasses.dataclass
class Seen:
    """One request as the server saw it."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]

    @property
    def words(self) -> int:
        """Words of its prompt."""
        messages = self.body.get("messages")
        return len((messages[0]["content"] if messages else self.body["prompt"]).split())

    @property
    def prompt_tokens(self) -> int:
        """Tokens of its prompt, as this server counts."""
        return TEMPLATE_TOKENS + TOKENS_PER_WORD * self.words


class FakeServer:
    """`async with FakeServer(...) as server` in an event loop.

    Args:
        behave: (number of the request, from 0; what was asked) -> how to answer. The first two requests of a load test
            are its probes.
        metrics: pages of /metrics, one after the other, the last again and again; none for 404.
        models: names that are listed.
    """

    def __init__(
        self,
        behave: Callable[[int, Seen], Answer] = lambda number, seen: Answer(),
        *,
        metrics: tuple[str, ...] = (),
        models: tuple[str, ...] = ("a-model",),
    ) -> None:
        self._behave, self._metrics, self._models = behave, list(metrics), models
        self.seen: list[Seen] = []
        self.under_way = self.peak = self.answer_tokens = 0
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> FakeServer:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        except asyncio.CancelledError:
            pass  # the end of the test
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        path = head[0].split()[1]
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if path == "/v1/models":
            await _send(writer, 200, "application/json", json.dumps({"data": [{"id": m} for m in self._models]}))
        elif path == "/metrics":
            page = (self._metrics.pop(0) if len(self._metrics) > 1 else self._metrics[0]) if self._metrics else ""
            await _send(writer, 200 if page else 404, "text/plain", page)
        else:
            return await self._answer(Seen(path, headers, json.loads(body)), writer)
        return True

    async def _answer(self, seen: Seen, writer: asyncio.StreamWriter) -> bool:
        answer = self._behave(len(self.seen), seen)
        self.seen.append(seen)
        async with self._changed:
            self.under_way += 1
            self.peak = max(self.peak, self.under_way)
            self._changed.notify_all()
            await self._changed.wait_for(lambda: self.peak >= answer.crowd)
        try:
            if answer.holds:
                await asyncio.Event().wait()
            if answer.status != 200:
                await _send(writer, answer.status, "application/json", '{"error": "no"}')
                return True
            return await self._stream(seen, answer, writer)
        finally:
            self.under_way -= 1

    async def _stream(self, seen: Seen, answer: Answer, writer: asyncio.StreamWriter) -> bool:
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: {answer.kind}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        chat = "messages" in seen.body
        count = seen.body["max_tokens"] if answer.pieces is None else answer.pieces
        if chat:
            _event(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
        for number in range(count + 1):
            if number == answer.breaks_after:
                await writer.drain()
                return False
            if number == answer.malformed_after:
                _chunk(writer, 'data: {"choices": [{"del\n\n')
            if number == answer.fails_after:
                _event(writer, {"error": {"message": "the server gave up"}})
            if number < count:
                piece = {"delta": {"content": "word "}} if chat else {"text": "word "}
                _event(writer, {"choices": [piece | {"finish_reason": None}], "usage": None})
                self.answer_tokens += answer.tokens_per_piece
        if not answer.ends_early:
            last: dict[str, Any] = {"delta": {}} if chat else {"text": ""}
            _event(writer, {"choices": [last | {"finish_reason": "length"}]})
            if answer.usage:
                usage = {"prompt_tokens": seen.prompt_tokens, "completion_tokens": count * answer.tokens_per_piece}
                _event(writer, {"choices": [], "usage": usage})
            _chunk(writer, "data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True


def _event(writer: asyncio.StreamWriter, chunk: dict[str, Any]) -> None:
    _chunk(writer, f"data: {json.dumps(chunk)}\n\n")


def _chunk(writer: asyncio.StreamWriter, text: str) -> None:
    data = text.encode()
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))


async def _send(writer: asyncio.StreamWriter, status: int, kind: str, text: str) -> None:
    data = text.encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await writer.drain()


class ServerThread:
    """`with ServerThread(...) as server`: a FakeServer in a thread, for callers with an event loop of their own."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._make = lambda: FakeServer(*arguments, **options)
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    async def _run(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        async with self._make() as self._server:
            self._ready.set()
            await self._over.wait()

    def __enter__(self) -> FakeServer:
        self._thread.start()
        assert self._ready.wait(30)
        return self._server

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()
