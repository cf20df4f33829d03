"""The OpenAI protocol from a client's side: one streamed request, the list of models, the metrics page.

Imports: errors, clock, records, settings, shapes; httpx2.
"""

from __future__ import annotations

import dataclasses
import json
from types import TracebackType
from typing import Any

import httpx2

from tieredkv.errors import ConfigError
from tieredkv.loadtest import records
from tieredkv.loadtest.clock import Clock
from tieredkv.loadtest.records import Record
from tieredkv.loadtest.settings import LoadSettings
from tieredkv.loadtest.shapes import Ask

DONE = "[DONE]"
METRICS_SECONDS = 10.0
"""After which a metrics page is taken for absent."""
_MESSAGE_CHARACTERS = 200
_TEXTS = ("content", "reasoning_content", "reasoning", "tool_calls", "function_call")
"""Fields of a chat chunk's delta that carry tokens."""


class StreamFailure(Exception):
    """A stream that is not an answer.

    Args:
        kind: one of the kinds of `records`.
        message: what was seen.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclasses.dataclass(frozen=True)
class Chunk:
    """One event of a stream.

    Args:
        has_text: whether a piece of the answer is in it.
        finish: the reason for the answer's end, in its last chunk.
        prompt_tokens: in the chunk with the usage.
        answer_tokens: likewise.
    """

    has_text: bool
    finish: str | None = None
    prompt_tokens: int | None = None
    answer_tokens: int | None = None

    @classmethod
    def read(cls, data: str) -> Chunk:
        """A chunk of `/v1/chat/completions` or `/v1/completions`.

        Raises:
            StreamFailure: it is none, or it carries an error.
        """
        try:
            chunk = json.loads(data)
            if chunk.get("error"):
                raise StreamFailure(records.SERVER_ERROR, str(chunk["error"]))
            choices, usage = chunk.get("choices") or [], chunk.get("usage") or {}
            delta: dict[str, Any] = (choices[0].get("delta") or {}) if choices else {}
            return cls(
                has_text=bool(choices and choices[0].get("text")) or any(delta.get(name) for name in _TEXTS),
                finish=choices[0].get("finish_reason") if choices else None,
                prompt_tokens=int(usage["prompt_tokens"]) if usage else None,
                answer_tokens=int(usage["completion_tokens"]) if usage else None,
            )
        except (ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
            raise StreamFailure(records.MALFORMED, f"{error!r} in {data}") from error


class Client:
    """Asks one server. Used in one event loop, as `async with Client(...)`.

    Args:
        settings: where and how to ask.
        clock: what times are read from.
        transport: of httpx2, for tests.

    Raises:
        ConfigError: an address or a key that cannot be sent.
    """

    def __init__(
        self, settings: LoadSettings, clock: Clock, transport: httpx2.AsyncBaseTransport | None = None
    ) -> None:
        self._settings, self._clock = settings, clock
        headers = {} if settings.api_key is None else {"Authorization": f"Bearer {settings.api_key}"}
        # Connections are as many as requests: what waits is to wait in the server.
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        try:
            self._http = httpx2.AsyncClient(
                base_url=settings.base_url,
                headers=headers,
                limits=limits,
                timeout=settings.timeout_seconds,
                transport=transport,
                trust_env=False,  # a proxy of the environment would be measured too
            )
        except (httpx2.InvalidURL, UnicodeError) as error:
            raise ConfigError(
                "The server cannot be asked.",
                wanted="an address as http://HOST:PORT, and a key in ASCII",
                got=f"{settings.base_url}: {type(error).__name__}",
                change="check --url and --api-key",
            ) from error
        self.model = settings.model or ""

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def find_model(self) -> str:
        """The model that is asked: the one of the settings, else the first that the server lists.

        Raises:
            ConfigError: the server is not there, or lists none.
        """
        if self.model:
            return self.model
        try:
            response = await self._http.get("/v1/models")
            self.model = str(response.raise_for_status().json()["data"][0]["id"])
        except (httpx2.HTTPError, ValueError, LookupError, TypeError) as error:
            raise ConfigError(
                "The server does not say which models it has.",
                wanted=f"a list at {self._settings.base_url}/v1/models",
                got=repr(error),
                change="check --url and --api-key, or name the model: --model",
            ) from error
        return self.model

    async def metrics(self) -> str | None:
        """The Prometheus page, or None where there is none."""
        try:
            response = await self._http.get("/metrics", timeout=METRICS_SECONDS)
        except httpx2.HTTPError:
            return None
        return response.text if response.status_code == httpx2.codes.OK else None

    async def ask(self, ask: Ask, prompt: str, *, part: int = 0, planned_seconds: float | None = None) -> Record:
        """Send a request and read its answer to the end; a failure is in the record."""
        sent = self._clock.now()
        record = Record(ask, part, sent if planned_seconds is None else planned_seconds, sent)
        try:
            await self._stream(record, self._body(ask, prompt))
        except StreamFailure as error:
            record.error, record.message = error.kind, str(error)
        except httpx2.HTTPError as error:
            record.error, record.message = _kind(error), repr(error)
        record.message = record.message[:_MESSAGE_CHARACTERS]
        record.ended_seconds = self._clock.now()
        return record

    def _body(self, ask: Ask, prompt: str) -> dict[str, Any]:
        what = {"messages": [{"role": "user", "content": prompt}]} if self._settings.chat else {"prompt": prompt}
        return {
            "model": self.model,
            **what,
            "max_tokens": ask.answer_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._settings.extra,
        }

    async def _stream(self, record: Record, body: dict[str, Any]) -> None:
        path = "/v1/chat/completions" if self._settings.chat else "/v1/completions"
        done = False
        async with self._http.stream("POST", path, json=body) as response:
            if response.status_code != httpx2.codes.OK:
                await response.aread()
                raise StreamFailure(f"http {response.status_code}", response.text)
            async for event in httpx2.EventSource(response):
                if event.data == DONE:
                    done = True
                elif event.data:
                    self._take(record, Chunk.read(event.data))
        if not done and record.finish is None:
            raise StreamFailure(records.BROKEN_OFF, "the stream ended before its answer did")

    def _take(self, record: Record, chunk: Chunk) -> None:
        if chunk.has_text:
            record.piece_seconds.append(self._clock.now())
        record.finish = chunk.finish or record.finish
        if chunk.answer_tokens is not None:
            record.prompt_tokens, record.answer_tokens = chunk.prompt_tokens, chunk.answer_tokens


def _kind(error: httpx2.HTTPError) -> str:
    """The kind of a failure of the connection."""
    if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout):
        return records.CANNOT_CONNECT
    if isinstance(error, httpx2.TimeoutException):
        return records.TIMED_OUT
    if isinstance(error, httpx2.SSEError):
        return records.MALFORMED
    if isinstance(error, httpx2.RemoteProtocolError | httpx2.NetworkError):
        return records.BROKEN_OFF
    return records.TRANSPORT
