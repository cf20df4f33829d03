"""Turns an engine's tokens into what transformers' handlers stream: text, reasoning and tool calls, in a queue.

Imports: request, stop_strings; transformers' serving app.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

from tokenizers.decoders import DecodeStream
from transformers import GenerationConfig
from transformers.cli.serving import utils as seam

from tieredkv.serving.request import Finish, RequestHandle
from tieredkv.serving.stop_strings import StopStrings

UNPARSED = "The model's answer cannot be parsed."


class TextOf:
    """Text of a request's tokens up to a stop string, one token at a time.

    Args:
        tokenizer: a fast tokenizer of transformers.
        stop: strings that end the answer.
        skip_special_tokens: leave out tokens that are no text.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...], *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer._tokenizer
        self._decoder = DecodeStream([], skip_special_tokens=skip_special_tokens)
        self._stop = StopStrings(stop)

    def put(self, token: int) -> str:
        """What the token adds, which may be nothing yet."""
        text = self._decoder.step(self._tokenizer, token)
        return self._stop.feed(text) if text else ""

    def finish(self) -> str:
        """What was held back, when there are no more tokens."""
        return self._stop.finish()

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string was seen."""
        return self._stop.is_found


def note_stop(handle: RequestHandle, text: TextOf, config: GenerationConfig) -> None:
    """Let transformers' handlers say "stop" of an answer that was stopped at its last token.

    They say "length" of one that has as many tokens as its config allows.
    """
    if handle.finish is Finish.STOP or text.is_stopped:
        config.max_new_tokens = None


class EngineStreamer:
    """What transformers' handlers hold of a stream: `total_tokens` and `cancel()`. It fills their queue.

    Args:
        text: of the request's tokens.
        queue: of transformers' handler, on the running event loop.
        parser: finds reasoning and tool calls in the text, or None.
        config: of the request, from which the handlers tell why it ended, see `note_stop`.
    """

    def __init__(self, text: TextOf, queue: asyncio.Queue[Any], parser: Any, config: GenerationConfig) -> None:
        self._text, self._queue, self._parser, self._config = text, queue, parser, config
        self._loop = asyncio.get_running_loop()
        self._handle: RequestHandle | None = None
        self._failed = False
        self.total_tokens = 0

    def follow(self, handle: RequestHandle) -> None:
        """Stream a request."""
        self._handle = handle
        if self._parser is not None:
            self._put(*seam.response_events_to_chunks(self._parser.initial_events))
        handle.listen(self._take)

    def cancel(self) -> None:
        """The client has gone."""
        if self._handle is not None:
            self._handle.cancel()

    def _take(self, token: int | None) -> None:
        """A token, on the engine's thread; None at the end."""
        handle = self._handle
        if handle is None or self._failed:
            return
        try:
            self._take_from(handle, token)
        except Exception as error:
            # A parser that cannot make sense of what the model wrote must not stop the engine, which calls this.
            self._failed = True
            handle.cancel()
            self._fail(f"{UNPARSED} Got: {type(error).__name__}")

    def _take_from(self, handle: RequestHandle, token: int | None) -> None:
        if token is None:
            self._end(handle)
            return
        if self._text.is_stopped:  # a token that came before the stop was told
            return
        self.total_tokens += 1
        text = self._text.put(token)
        if self._text.is_stopped:
            handle.stop()
        self._say(text)

    def _say(self, text: str) -> None:
        if text:
            self._put(*([text] if self._parser is None else seam.response_events_to_chunks(self._parser.feed(text))))

    def _end(self, handle: RequestHandle) -> None:
        if handle.finish in (Finish.ERROR, Finish.CANCELLED):
            self._fail(str(handle.error or "the request was cancelled, as the server stops"))
            return
        note_stop(handle, self._text, self._config)
        self._say(self._text.finish())
        if self._parser is not None:
            # An answer that was cut short in the middle of a tool call has no last part.
            with contextlib.suppress(ValueError, RuntimeError):
                self._put(*seam.response_events_to_chunks(self._parser.finalize()[1]))
        self._put(None)

    def _fail(self, what: str) -> None:
        self._put(seam._StreamError(json.dumps(what)[1:-1]))  # transformers writes it into JSON as it is

    def _put(self, *items: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has gone, and with it everybody who would read
            for item in items:
                self._loop.call_soon_threadsafe(self._queue.put_nowait, item)
