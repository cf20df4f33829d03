"""What cannot be served: a clear status and message, nothing leaked, other requests undisturbed, no prompt in a log."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tieredkv.errors import ColdTierError
from tieredkv.serving import EngineSettings

from .conftest import Served, needs_packages

pytestmark = [needs_packages, pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")]

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hello"}]

BAD: list[tuple[str, dict[str, Any], int, str]] = [
    (TEXT, {"prompt": "x" * 600}, 400, "at most 512 tokens (max_model_len)"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 600}]}, 400, "at most 512 tokens (max_model_len)"),
    (TEXT, {"prompt": "x" * 500, "max_tokens": 30}, 400, "a prompt of 500 and 30 new tokens"),
    (TEXT, {"prompt": ""}, 400, "There is no prompt"),
    (TEXT, {}, 400, "There is no prompt"),
    (TEXT, {"prompt": ["a", "b"]}, 400, "There is no prompt"),
    (TEXT, {"prompt": "\u4e2d"}, 400, "at least one token id"),
    (CHAT, {}, 400, "There are no messages"),
    (CHAT, {"messages": []}, 400, "There are no messages"),
    (CHAT, {"messages": "hello"}, 400, "There are no messages"),
    (CHAT, {"messages": [{"content": "hello"}]}, 400, "no role"),
    (CHAT, {"messages": ["hello"]}, 400, "no role"),
    (CHAT, {"messages": [{"role": "user", "content": ""}]}, 400, "A message is empty"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, 400, "Only text"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, 400, "Only text"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "/etc/passwd"}}]}]},
        400,
        "Only text",
    ),
    (CHAT, {"messages": [{"role": "stranger", "content": "hello"}]}, 400, "who?"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]}, 400, "Not a tool call"),
    (CHAT, {"messages": USER, "chat_template_kwargs": {"tokenize": False}}, 400, "chat template"),
    (CHAT, {"messages": USER, "chat_template_kwargs": {"chat_template": "/etc/passwd"}}, 400, "chat template"),
    (CHAT, {"messages": USER, "model": "other"}, 404, "The model is unknown"),
    (CHAT, {"messages": USER, "model": "/etc/passwd"}, 404, "The model is unknown"),
    (TEXT, {"prompt": "a", "model": {"a": 1}}, 404, "The model is unknown"),
    (TEXT, {"prompt": "a", "max_tokens": -1}, 400, "max_tokens cannot be served"),
    (TEXT, {"prompt": "a", "max_tokens": 0}, 400, "max_tokens cannot be served"),
    (TEXT, {"prompt": "a", "max_tokens": 10**12}, 400, "at most 512"),
    (TEXT, {"prompt": "a", "max_tokens": "many"}, 400, "a whole number"),
    (TEXT, {"prompt": "a", "max_tokens": True}, 400, "a whole number"),
    (CHAT, {"messages": USER, "max_completion_tokens": -5}, 400, "max_completion_tokens cannot be served"),
    (TEXT, {"prompt": "a", "temperature": -1}, 400, "temperature cannot be served"),
    (TEXT, {"prompt": "a", "temperature": "hot"}, 400, "temperature cannot be served"),
    (TEXT, {"prompt": "a", "top_p": 2}, 400, "top_p cannot be served"),
    (TEXT, {"prompt": "a", "frequency_penalty": -5}, 400, "frequency_penalty cannot be served"),
    (TEXT, {"prompt": "a", "seed": "x"}, 400, "seed cannot be served"),
    (TEXT, {"prompt": "a", "seed": 2**64}, 400, "seed cannot be served"),
    (TEXT, {"prompt": "a", "stop": ""}, 400, "Not a stop string"),
    (TEXT, {"prompt": "a", "stop": [5]}, 400, "Not a stop string"),
    (TEXT, {"prompt": "a", "stop": ["x"] * 99}, 400, "Not a stop string"),
    (TEXT, {"prompt": "a", "stream": "yes"}, 400, "stream is true or false"),
    (TEXT, {"prompt": "a", "n": 2}, 400, "n is not served"),
    (TEXT, {"prompt": "a", "echo": True}, 400, "echo is not served"),
    (TEXT, {"prompt": "a", "logprobs": 5}, 400, "logprobs is not served"),
    (CHAT, {"messages": USER, "response_format": {"type": "json_object"}}, 400, "response_format is not served"),
    (CHAT, {"messages": USER, "logit_bias": {"x": 1}}, 400, "logit_bias"),
    (CHAT, {"messages": USER, "logit_bias": {"5000": 1}}, 400, "logit_bias"),
    (CHAT, {"messages": USER, "tools": "x"}, 400, "tools"),
    (TEXT, {"prompt": "a", "generation_config": '{"num_beams": 4}'}, 400, "generation_config is not served"),
    (TEXT, {"prompt": "a", "no_such_field": 1}, 400, "no_such_field"),
]


@pytest.fixture(scope="module")
def bad_cases() -> list[tuple[str, dict[str, Any], int, str]]:
    assert len({json.dumps(case[:2]) for case in BAD}) == len(BAD)
    return BAD


@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_served_is_refused_and_leaves_nothing(
    served: Served, bad_cases: list[Any], stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    for path, body, status, message in bad_cases:
        response = served.client.post(path, json={"stream": stream, **body})
        error = response.json()["error"]
        assert (response.status_code, error["type"]) == (status, "invalid_request_error"), (body, error)
        assert message in error["message"], (body, error)
    assert served.complete("fine").json()["choices"][0]["text"] == served.alone("fine", 8)
    assert served.engine.stats().finished == {"length": 1}
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    served.assert_at_rest()


def test_a_text_that_no_tokens_spell_is_refused_before_it_is_tokenized(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("tokenized")

    monkeypatch.setattr(type(served.tokenizer), "__call__", read)
    monkeypatch.setattr(type(served.tokenizer), "apply_chat_template", read)
    most = 512 * len("<|start|>")
    part = {"type": "text", "text": "x" * (most // 2 + 1)}
    for response in (
        served.complete("x" * (most + 1)),
        served.chat("x" * (most + 1)),
        served.chat([part, part]),  # type: ignore[arg-type]
    ):
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
        assert f"{most} characters" not in error["message"] and "at most 512 tokens" in error["message"]


@pytest.mark.parametrize("content", [b"", b'{"prompt":', b"[]", b"5", b"\xff\xfe", b'"text"'])
def test_what_is_no_json_object_is_refused(served: Served, content: bytes) -> None:
    response = served.client.post(TEXT, content=content, headers={"content-type": "application/json"})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json")


def test_a_body_has_a_limit_whether_its_length_is_said_or_not(serve: Callable[..., Served]) -> None:
    served = serve(most_body_bytes=1000)
    sent = 0

    def pieces() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(100):
            sent += 100
            yield b" " * 100

    for content in (b" " * 1001, pieces()):
        response = served.client.post(TEXT, content=content, headers={"content-type": "application/json"})
        assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
        assert "1000 bytes" in response.json()["error"]["message"]
    body = json.dumps({"prompt": "a", "max_tokens": 2}).encode()
    headers = {"content-type": "application/json"}
    assert served.client.post(TEXT, content=body + b" " * (1000 - len(body)), headers=headers).status_code == 200


def test_what_can_never_fit_is_refused_with_the_numbers(
    tokenizer: Any, serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(EngineSettings())
    monkeypatch.setattr(served.engine._runner, "capacity_tokens", 100)  # a disk without a cap holds everything
    response = served.complete("x" * 90, max_tokens=11)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "101 tokens" in error["message"] and "100 tokens in all tiers" in error["message"]
    assert served.complete("x" * 90, max_tokens=10).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_fails_says_why_and_others_go_on(
    served: Served, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    forward = type(served.model).forward

    def failing(self: Any, input_ids: torch.Tensor, **options: Any) -> Any:
        if int(input_ids[0, 0]) == served.tokenizer("!")["input_ids"][0]:
            raise ColdTierError('the disk "sda"\nis gone', wanted="a disk", got="none", change="another one")
        return forward(self, input_ids, **options)

    monkeypatch.setattr(served.model, "forward", failing.__get__(served.model))
    response = served.complete("!bad", stream=stream)
    if stream:
        (line,) = [line for line in response.text.split("\n\n") if line.startswith('data: {"error"')]
        assert json.loads(line.removeprefix("data: "))["error"].startswith('the disk "sda"\nis gone')
    else:
        assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")
        assert 'the disk "sda"' in response.json()["error"]["message"]
    assert served.complete("fine").status_code == 200
    served.assert_at_rest()


def test_an_engine_that_stopped_is_told_by_health(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr(served.model, "forward", broken)
    first, second = served.complete("a"), served.complete("a")
    assert (first.status_code, second.status_code) == (503, 503)
    assert "The engine stopped" in first.json()["error"]["message"]
    assert "The engine is closed" in second.json()["error"]["message"]
    assert served.client.get("/health").status_code == 503


def test_no_prompt_gets_into_logs_or_metrics(
    served: Served,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.DEBUG)
    assert served.chat("confidential").status_code == 200
    assert served.chat("confidential", stream=True).status_code == 200
    assert served.complete("confidential" * 100).status_code == 400
    assert served.client.post(TEXT, content=b'{"prompt": "confidential').status_code == 400

    def fault(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError(f"cannot read {arguments}")

    monkeypatch.setattr(type(served.tokenizer), "apply_chat_template", fault)
    response = served.chat("confidential")
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
    assert "RuntimeError" in caplog.text and "in fault" in caplog.text
    out = capfd.readouterr()
    for text in (caplog.text, served.metrics.text().decode(), out.out, out.err):
        assert "confidential" not in text


def test_a_model_without_a_chat_template_says_so(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.tokenizer, "chat_template", None)
    response = served.chat("hello")
    assert response.status_code == 400
    assert "use /v1/completions" in response.json()["error"]["message"]
