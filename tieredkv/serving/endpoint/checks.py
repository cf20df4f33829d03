"""Whether the body of a request can be served, before transformers' handlers see it.

They leave fields that they do not know without effect, and take a wrong type for a fault of their own. Here every such
field is refused, with what to change; what they pass on otherwise than a client means it is taken out, as an `Asked`.

Imports: this package's client, errors.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from tieredkv.serving.endpoint.client import Asked
from tieredkv.serving.endpoint.errors import RefusedError

MOST_STOP_STRINGS = 16
MOST_BIAS = 100

# Fields with which transformers answers as if they were not there, and the values with which that is right.
_WITHOUT_EFFECT: dict[str, Collection[Any]] = {
    "audio": (None,),
    "best_of": (None, 1),
    "echo": (None, False),
    "function_call": (None, "auto", "none"),
    "functions": (None,),
    "generation_config": (None,),
    "logprobs": (None, False),
    "modalities": (None, ["text"]),
    "n": (None, 1),
    "prediction": (None,),
    "presence_penalty": (None, 0),
    "reasoning_effort": (None,),
    "response_format": (None, {"type": "text"}),
    "suffix": (None,),
    "tool_choice": (None, "auto"),
    "top_logprobs": (None, 0),
    "web_search_options": (None,),
}


def check_model(body: dict[str, Any], name: str) -> None:
    """Refuse another model; a body without one means ours.

    Raises:
        RefusedError: an unknown model, with status 404.
    """
    wanted = body.get("model")
    if wanted is not None and wanted != name:
        raise RefusedError(
            "The model is unknown.",
            wanted=name,
            got=wanted if isinstance(wanted, str) else type(wanted).__name__,
            change="name a model of /v1/models",
            status=404,
            code="model_not_found",
            param="model",
        )
    body["model"] = name


def check_prompt(body: Mapping[str, Any]) -> None:
    """Refuse what is no prompt of /v1/completions.

    Raises:
        RefusedError: not a text, or an empty one.
    """
    prompt = body.get("prompt")
    if not isinstance(prompt, str) or not prompt:
        got = "an empty one" if prompt == "" else type(prompt).__name__
        raise _refused("There is no prompt.", "a text", got, 'send "prompt": "..."', "prompt")


def check_messages(body: Mapping[str, Any], reserved: Collection[str]) -> None:
    """Refuse what is no conversation of texts.

    Args:
        body: of /v1/chat/completions.
        reserved: arguments of the chat template that are not the client's.

    Raises:
        RefusedError: no messages, or one that is not a role with a text.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        got = "an empty list" if messages == [] else type(messages).__name__
        raise _refused("There are no messages.", "a list of at least one", got, 'send "messages": [...]', "messages")
    for number, message in enumerate(messages):
        _check_message(number, message)
    given = body.get("chat_template_kwargs") or {}
    if not isinstance(given, dict) or set(given) & set(reserved):
        raise _refused(
            "Arguments of the chat template that a client cannot give.",
            "an object with variables of the template",
            sorted(set(given) & set(reserved)) if isinstance(given, dict) else type(given).__name__,
            "leave them out",
            "chat_template_kwargs",
        )


def _check_message(number: int, message: Any) -> None:
    where = f"messages[{number}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _refused("A message has no role.", "an object with a role", type(message).__name__, "add one", where)
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    kinds = [part.get("type") if isinstance(part, dict) else type(part).__name__ for part in parts]
    texts = all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts)
    if not isinstance(content, str | list | None) or not texts or set(kinds) - {"text"}:
        got = sorted({str(kind) for kind in kinds}) if parts else type(content).__name__
        raise _refused("Only text is served.", "a text, or parts of the type text", got, "send text", where)
    if content in (None, "") and not message.get("tool_calls"):
        raise _refused("A message is empty.", "a text", "none", "leave the message out", where)
    _check_calls(message.get("tool_calls") or [], where)


def _check_calls(calls: Any, where: str) -> None:
    for call in calls if isinstance(calls, list) else [None]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("arguments"), str | dict):
            raise _refused("Not a tool call.", "a function with arguments", type(call).__name__, "see OpenAI's", where)


def check_length(body: Mapping[str, Any], limit: int | None, token_characters: int) -> None:
    """Refuse a text that no tokenizer makes short enough, before it is tokenized, which holds up everybody else.

    Args:
        body: checked before.
        limit: most tokens of a request.
        token_characters: characters of the model's longest token.

    Raises:
        RefusedError: the text is too long.
    """
    contents = [body.get("prompt"), *(message.get("content") for message in body.get("messages") or [])]
    texts = [part["text"] if isinstance(part, dict) else part for each in contents for part in _parts(each)]
    characters = sum(map(len, texts))
    if limit is not None and characters > limit * token_characters:
        raise RefusedError(
            "The request is longer than the engine allows.",
            wanted=f"at most {limit} tokens (max_model_len)",
            got=f"{characters} characters, which no {limit} tokens of the model spell",
            change="a shorter prompt, or a larger max_model_len",
            code="context_length_exceeded",
        )


def _parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [] if content is None else [content]


def take_asked(body: dict[str, Any], limit: int | None, vocabulary: int) -> Asked:
    """Take out of a body what our side of the seam does itself, and refuse what would have no effect.

    Args:
        body: the request's; fields are taken out of it.
        limit: most tokens of a request.
        vocabulary: how many tokens the model knows.

    Raises:
        RefusedError: a value that cannot be served.
    """
    for field, harmless in _WITHOUT_EFFECT.items():
        value = body.pop(field, None)
        if value not in harmless:
            raise _refused(f"{field} is not served.", "no such field", type(value).__name__, "leave it out", field)
    stream = body.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise _refused("stream is true or false.", "a boolean", type(stream).__name__, "stream: true", "stream")
    body.pop("stream_options", None)  # the last part of a stream has the usage in any case
    _check_bias(body.get("logit_bias"), vocabulary)
    _check_tools(body.get("tools"))
    most = [_whole(body, field, 1, limit) for field in ("max_completion_tokens", "max_tokens")]
    penalty = _number(body, "frequency_penalty", -0.99, 2.0)
    if penalty is not None:
        body["frequency_penalty"] = penalty
    return Asked(
        stop=_stop(body.pop("stop", None)),
        most_tokens=next((value for value in most if value is not None), None),
        seed=_whole(body, "seed", -(2**63), 2**63 - 1),
        priority=_whole(body, "priority", -1000, 1000) or 0,
        temperature=_number(body, "temperature", 0.0, 100.0),
        top_p=_number(body, "top_p", 1e-6, 1.0),
        ignore_eos=body.pop("ignore_eos", None) is True,
    )


def _check_bias(given: Any, vocabulary: int) -> None:
    for token, bias in given.items() if isinstance(given, dict) else [] if given is None else [("", None)]:
        is_token = token.isdecimal() and token.isascii() and len(token) < 10 and int(token) < vocabulary
        is_number = isinstance(bias, int | float) and not isinstance(bias, bool) and abs(bias) <= MOST_BIAS
        if not is_token or not is_number:
            wanted = f"token ids below {vocabulary} with numbers from -{MOST_BIAS} to {MOST_BIAS}"
            raise _refused("Not a logit_bias.", wanted, "something else", "see OpenAI's", "logit_bias")


def _check_tools(given: Any) -> None:
    if given is not None and not (isinstance(given, list) and all(isinstance(each, dict) for each in given)):
        raise _refused("Not a list of tools.", "a list of objects", type(given).__name__, "see OpenAI's", "tools")


def _stop(value: Any) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else [] if value is None else value
    right = isinstance(strings, list) and all(isinstance(each, str) and each for each in strings)
    if not right or len(strings) > MOST_STOP_STRINGS:
        wanted = f"a text, or at most {MOST_STOP_STRINGS} of them, none empty"
        raise _refused("Not a stop string.", wanted, type(value).__name__, 'stop: "\\n\\n"', "stop")
    return tuple(strings)


def _whole(body: dict[str, Any], field: str, least: int, most: int | None) -> int | None:
    value = body.pop(field, None)
    if value is None:
        return None
    wrong = isinstance(value, bool) or not isinstance(value, int)
    if wrong or value < least or (most is not None and value > most):
        span = f"a whole number, at least {least}" + ("" if most is None else f", at most {most}")
        got = type(value).__name__ if wrong else value
        raise _refused(f"{field} cannot be served.", span, got, f"another {field}, or none", field)
    return int(value)


def _number(body: dict[str, Any], field: str, least: float, most: float) -> float | None:
    value = body.pop(field, None)
    if value is None:
        return None
    wrong = isinstance(value, bool) or not isinstance(value, int | float)
    if wrong or not least <= value <= most:
        got = type(value).__name__ if wrong else value
        raise _refused(
            f"{field} cannot be served.", f"a number from {least:g} to {most:g}", got, f"another {field}", field
        )
    return float(value)


def _refused(what: str, wanted: object, got: object, change: str, param: str) -> RefusedError:
    return RefusedError(what, wanted=wanted, got=got, change=change, param=param)
