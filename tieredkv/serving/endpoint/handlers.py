"""transformers' handlers of the two OpenAI routes, which check a body first and end a stream as OpenAI does.

Imports: this package's checks, client, errors; transformers' serving app.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import AsyncIterator, Callable
from typing import Any

from jinja2 import TemplateError
from transformers import GenerationConfig
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler

from tieredkv.serving.endpoint.checks import check_length, check_messages, check_model, check_prompt, take_asked
from tieredkv.serving.endpoint.client import CLIENT
from tieredkv.serving.endpoint.errors import RefusedError

DONE = "data: [DONE]\n\n"


class ChatHandler(ChatCompletionHandler):
    """`/v1/chat/completions`.

    Args:
        models: the model manager.
        state: the generation state.
        limit: most tokens of a request, or None.
        vocabulary: how many tokens the model knows.
    """

    def __init__(self, models: Any, state: Any, limit: int | None, vocabulary: int) -> None:
        super().__init__(models, state)
        self._models, self._limits = models, (limit, vocabulary)

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        """Check, and answer.

        Raises:
            TieredKVError: the request is refused.
        """
        check_model(body, self._models.process_model_name(""))
        _, tokenizer = self._models.load_model_and_processor("")
        check_messages(body, inspect.signature(tokenizer.apply_chat_template).parameters)
        if not tokenizer.chat_template:
            raise RefusedError(
                "The model has no chat template.",
                wanted="a model made for chat",
                got="none in its tokenizer",
                change="use /v1/completions",
            )
        check_length(body, self._limits[0], self._models.token_characters)
        CLIENT.get().asked, CLIENT.get().is_chat = take_asked(body, *self._limits), True
        try:
            return _ended(await super().handle_request(body, request_id))
        except TemplateError as error:
            raise RefusedError(
                "The chat template refuses these messages.",
                wanted="roles in an order that it takes",
                got=error.message,
                change="see the model's template",
                param="messages",
            ) from error

    def _build_generation_config(
        self, body: dict[str, Any], model_generation_config: GenerationConfig, use_cb: bool = False
    ) -> GenerationConfig:
        return _configured(super()._build_generation_config, body, model_generation_config)


class TextHandler(CompletionHandler):
    """`/v1/completions`; arguments as for `ChatHandler`."""

    def __init__(self, models: Any, state: Any, limit: int | None, vocabulary: int) -> None:
        super().__init__(models, state)
        self._models, self._limits = models, (limit, vocabulary)

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        """Check, and answer.

        Raises:
            TieredKVError: the request is refused.
        """
        check_model(body, self._models.process_model_name(""))
        check_prompt(body)
        check_length(body, self._limits[0], self._models.token_characters)
        CLIENT.get().asked = take_asked(body, *self._limits)
        return _ended(await super().handle_request(body, request_id))

    def _build_generation_config(
        self, body: dict[str, Any], model_generation_config: GenerationConfig, use_cb: bool = False
    ) -> GenerationConfig:
        return _configured(super()._build_generation_config, body, model_generation_config)


def _configured(build: Callable[..., Any], body: dict[str, Any], of_model: GenerationConfig) -> GenerationConfig:
    """What transformers makes of the rest of a body, and how it is sampled."""
    asked = CLIENT.get().asked
    config: GenerationConfig = build(body, of_model)
    if asked.temperature is not None:
        # transformers would leave a model that is greedy by default greedy at any temperature.
        config.do_sample = asked.temperature > 0
        config.temperature = asked.temperature if config.do_sample else None
    if asked.top_p is not None:
        config.top_p = asked.top_p
    if not config.do_sample:
        config.temperature = config.top_p = config.top_k = None
    if asked.ignore_eos:
        config.eos_token_id, config.pad_token_id = [], config.pad_token_id or 0  # None would mean the model's own
    return config


def _ended(response: Any) -> Any:
    """A stream that ends with OpenAI's last line."""
    parts = getattr(response, "body_iterator", None)
    if parts is not None:
        response.body_iterator = _with_end(parts)
    return response


async def _with_end(parts: Any) -> AsyncIterator[Any]:
    async with contextlib.aclosing(parts):
        async for part in parts:
            yield part
        yield DONE
