"""Our side of the seam in transformers' serving app: what it asks to generate goes to an `Engine`.

Imports: tieredkv.errors, request, engine and this package's client, errors, streamer; transformers' serving app.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

from transformers import GenerationConfig
from transformers.cli.serving import utils as seam

from tieredkv.errors import TieredKVError
from tieredkv.serving.endpoint.client import CLIENT
from tieredkv.serving.endpoint.errors import GONE, RefusedError
from tieredkv.serving.endpoint.streamer import UNPARSED, EngineStreamer, TextOf, note_stop
from tieredkv.serving.engine import Engine
from tieredkv.serving.request import Finish, RequestHandle


class EngineManager(seam.BaseGenerateManager):
    """Generates with an engine.

    Args:
        engine: runs elsewhere, on its own thread.
        default_tokens: most new tokens of a request that says nothing of it.
    """

    def __init__(self, engine: Engine, default_tokens: int) -> None:
        self._engine, self._default_tokens = engine, default_tokens

    def generate_streaming(
        self,
        model: Any,
        processor: Any,
        inputs: Any,
        gen_config: GenerationConfig,
        request_id: str,
        response_parser: Any = None,
    ) -> tuple[asyncio.Queue[Any], Any]:
        """Begin a request; see the base class.

        Raises:
            TieredKVError: it is refused, before anything was sent.
        """
        text = TextOf(processor, CLIENT.get().asked.stop, skip_special_tokens=response_parser is None)
        queue: asyncio.Queue[Any] = asyncio.Queue()
        streamer = EngineStreamer(text, queue, response_parser, gen_config)
        streamer.follow(self._submit(inputs, gen_config))
        return queue, streamer

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: GenerationConfig, request_id: str
    ) -> tuple[str, int, list[int]]:
        """Run a request to its end; see the base class.

        Raises:
            TieredKVError: it is refused, or ended with an error.
        """
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        stop = CLIENT.get().asked.stop
        text = TextOf(processor, stop, skip_special_tokens=True)
        handle = self._submit(inputs, gen_config)
        parts: list[str] = []
        faults: list[Exception] = []

        def end() -> None:
            if not ended.done():
                ended.set_result(None)

        def take(token: int | None) -> None:
            if token is None:
                with contextlib.suppress(RuntimeError):  # the loop has gone
                    loop.call_soon_threadsafe(end)
            elif stop and not text.is_stopped and not faults:
                try:
                    parts.append(text.put(token))
                except Exception as error:  # a decoder that fails must not stop the engine, which calls this
                    faults.append(error)
                    handle.cancel()
                if text.is_stopped:
                    handle.stop()

        handle.listen(take)
        try:
            await ended
        finally:
            handle.cancel()  # of no effect where it has ended
        if faults:
            raise _unparsed(faults[0]) from faults[0]
        tokens = _tokens_of(handle)
        note_stop(handle, text, gen_config)
        if CLIENT.get().is_chat:
            _check_parses(model, processor, tokens, inputs["input_ids"])
        if text.is_stopped:
            return "".join(parts), handle.prompt_tokens, tokens[: len(parts)]
        return processor.decode(tokens, skip_special_tokens=True), handle.prompt_tokens, tokens

    def stop(self) -> None:
        """Nothing: whoever made the engine closes it."""

    def _submit(self, inputs: Any, gen_config: GenerationConfig) -> RequestHandle:
        client = CLIENT.get()
        asked, prompt = client.asked, inputs["input_ids"]
        limit = self._engine.settings.max_model_len
        gen_config.max_new_tokens = asked.most_tokens
        if asked.most_tokens is None:
            room = self._default_tokens if limit is None else limit - prompt.shape[-1]
            gen_config.max_new_tokens = max(min(self._default_tokens, room), 1)
        try:
            handle = self._engine.submit(prompt, gen_config, priority=asked.priority, salt=client.salt, seed=asked.seed)
        except TieredKVError:
            raise
        except (ValueError, TypeError) as error:
            raise RefusedError(
                "These settings of sampling cannot be served.",
                wanted="settings that transformers accepts",
                got=str(error).splitlines()[0] if str(error) else type(error).__name__,
                change="see the field that is named",
            ) from error
        client.follow(handle)
        return handle


def _tokens_of(handle: RequestHandle) -> list[int]:
    if handle.finish is Finish.CANCELLED:
        raise RefusedError(
            "The request was cancelled.",
            wanted="a client that waits, and a server that runs",
            got="neither, or one of them",
            change="send it again",
            status=GONE if CLIENT.get().is_gone else 503,
            code="cancelled",
        )
    return handle.result(0)


def _check_parses(model: Any, tokenizer: Any, tokens: list[int], prompt: Any) -> None:
    """What the handler does next fails where a model spoiled a tool call; say so instead of a fault of the server."""
    if seam.get_response_template(tokenizer, model) is None:
        return
    try:
        seam.parse_assistant_message(tokenizer, model, tokens, prompt)
    except Exception as error:  # a parser of someone else's text may raise anything
        raise _unparsed(error) from error


def _unparsed(error: Exception) -> RefusedError:
    return RefusedError(
        UNPARSED,
        wanted="text that the tokenizer can decode, and tool calls as the model's template describes them",
        got=type(error).__name__,
        change="ask again, or without tools and stop strings",
        status=502,
        code="unparsed_answer",
    )


class EngineState(seam.GenerationState):
    """Hands out the one manager there is.

    Args:
        engine: what it generates with.
        default_tokens: most new tokens of a request that says nothing of it.
    """

    def __init__(self, engine: Engine, default_tokens: int) -> None:
        super().__init__()
        self._engine = engine
        self._manager = EngineManager(engine, default_tokens)

    def use_continuous_batching(self, model: Any, modality: Any) -> bool:
        """Never transformers' own: the engine's manager looks like the plain one."""
        return False

    def get_manager(self, model_id: str, use_cb: bool = False) -> seam.BaseGenerateManager:
        """The manager."""
        return self._manager

    def is_cb_alive(self) -> bool:
        """Whether the engine takes requests: what `/health` says."""
        return self._engine.is_open


class OneModel:
    """The model manager of a server with one model, which loads nothing that a client names.

    Args:
        model, tokenizer: loaded.
        name: what clients call it.
        max_model_len: most tokens of a request, or None.
    """

    force_model: str | None = None

    def __init__(self, model: Any, tokenizer: Any, name: str, max_model_len: int | None) -> None:
        self.name = name
        self.token_characters = max(map(len, tokenizer.get_vocab()))
        self._model, self._tokenizer, self._max_model_len = model, tokenizer, max_model_len
        self._created = int(time.time())

    def process_model_name(self, name: str) -> str:
        """The model's name; another one was refused before."""
        return self.name

    def load_model_and_processor(self, name: str, *arguments: Any, **options: Any) -> tuple[Any, Any]:
        """The model and its tokenizer."""
        return self._model, self._tokenizer

    def get_model_modality(self, model: Any, processor: Any = None) -> seam.Modality:
        """Text."""
        return seam.Modality.LLM

    def list_models(self, *arguments: Any) -> list[dict[str, Any]]:
        """The entry of `/v1/models`."""
        return [
            {
                "id": self.name,
                "object": "model",
                "created": self._created,
                "owned_by": "tieredkv",
                "max_model_len": self._max_model_len,
            }
        ]

    get_gen_models = list_models
    """What transformers called it before 5.24."""

    def shutdown(self) -> None:
        """Nothing: whoever loaded the model keeps it."""
