"""The endpoint answers as the model alone does, to a stock OpenAI client too, and shares prefixes within a key."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tieredkv.serving import EngineSettings

from .conftest import Served, needs_packages

pytestmark = [needs_packages, pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")]

Serve = Callable[..., Served]


def parts(response: Any) -> list[dict[str, Any]]:
    """The objects of a stream, which ends as OpenAI's do."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.contract
def test_a_completion_is_what_the_model_says_alone(served: Served) -> None:
    answer = served.complete("once upon a time ", max_tokens=24).json()
    assert answer["choices"] == [{"index": 0, "text": served.alone("once upon a time ", 24), "finish_reason": "length"}]
    assert answer["usage"] == {"prompt_tokens": 17, "completion_tokens": 24, "total_tokens": 41}
    assert (answer["model"], answer["object"]) == ("tiny", "text_completion")
    served.assert_at_rest()


@pytest.mark.contract
def test_a_stream_has_the_same_text(served: Served) -> None:
    response = served.complete("once upon a time ", max_tokens=24, stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    found = parts(response)
    assert "".join(part["choices"][0]["text"] for part in found) == served.alone("once upon a time ", 24)
    assert found[-1]["choices"][0]["finish_reason"] == "length"
    assert found[-1]["usage"]["completion_tokens"] == 24


@pytest.mark.contract
def test_a_chat_goes_through_the_template(served: Served) -> None:
    prompt = "<|start|>user: hello<|end|><|start|>assistant: "
    wanted = served.alone(prompt, 8)
    assert served.chat("hello", ignore_eos=True).json()["choices"][0]["message"] == {
        "role": "assistant",
        "content": wanted,
    }
    assert served.chat([{"type": "text", "text": "hello"}], ignore_eos=True).json()["choices"][0]["message"][
        "content"
    ] == (wanted)
    found = parts(served.chat("hello", ignore_eos=True, stream=True))
    assert found[0]["choices"][0]["delta"] == {"role": "assistant"}
    assert "".join(part["choices"][0]["delta"].get("content", "") for part in found) == wanted


def test_a_stock_openai_client_drives_it(served: Served) -> None:
    import openai

    client = openai.OpenAI(base_url="http://testserver/v1", api_key="none", http_client=served.client, max_retries=0)
    assert [model.id for model in client.models.list()] == ["tiny"]
    messages: Any = [{"role": "user", "content": "hello"}]
    whole = client.chat.completions.create(model="tiny", messages=messages, max_tokens=6, temperature=0)
    stream = client.chat.completions.create(
        model="tiny", messages=messages, max_completion_tokens=6, temperature=0, stream=True
    )
    assert "".join(part.choices[0].delta.content or "" for part in stream) == whole.choices[0].message.content
    with pytest.raises(openai.NotFoundError, match="The model is unknown"):
        client.chat.completions.create(model="other", messages=messages)
    with pytest.raises(openai.BadRequestError, match="at most 512"):
        client.chat.completions.create(model="tiny", messages=messages, max_tokens=10**9)


def test_an_end_of_sequence_ends_the_answer(served: Served, scripted: Callable[[str], None]) -> None:
    scripted("done<|end|>")
    answer = served.chat("hello", max_tokens=50).json()
    assert answer["choices"][0] == {
        "index": 0,
        "finish_reason": "stop",
        "message": {"role": "assistant", "content": "done"},
    }
    assert len(served.complete("hello", max_tokens=15).json()["choices"][0]["text"]) == 12  # with ignore_eos


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_ends_with_its_last_token_was_stopped(
    served: Served, scripted: Callable[[str], None], stream: bool
) -> None:
    scripted("done<|end|>")
    for options in ({"max_tokens": 5, "ignore_eos": False}, {"max_tokens": 4, "stop": "e"}):
        response = served.complete("hello", stream=stream, **options)
        last = parts(response)[-1] if stream else response.json()
        assert last["choices"][0]["finish_reason"] == "stop"
        assert last["usage"]["completion_tokens"] == options["max_tokens"]


def test_an_answer_of_no_set_length_fits_the_limit(serve: Serve) -> None:
    served = serve(EngineSettings(max_model_len=64))
    answer = served.complete("x" * 40, max_tokens=None).json()
    assert answer["usage"] == {"prompt_tokens": 40, "completion_tokens": 24, "total_tokens": 64}


def test_a_seed_repeats_an_answer_and_stays_with_it(served: Served) -> None:
    def text(seed: int) -> str:
        return str(served.complete("a", max_tokens=20, temperature=1.5, seed=seed).json()["choices"][0]["text"])

    torch.manual_seed(7)
    state = torch.random.get_rng_state()
    assert text(1) == text(1) != text(2)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("stop", ["\t", "}~", ["no", "}~"]], ids=["none", "one", "list"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer_and_is_no_part_of_it(
    served: Served, scripted: Callable[[str], None], stop: Any, stream: bool
) -> None:
    """The two characters of the stop string are tokens 31 and 32 of the request, on both sides of a block's border."""
    prompt, said = "p" * 20, "0123456789a}~bcd"
    assert (len(prompt) + said.index("~")) % 16 == 0
    scripted(said)
    response = served.complete(prompt, max_tokens=16, stop=stop, stream=stream)
    found = parts(response) if stream else [response.json()]
    text = "".join(part["choices"][0]["text"] for part in found)
    stopped = stop != "\t"
    assert text == (said[:11] if stopped else said)
    assert found[-1]["choices"][0]["finish_reason"] == ("stop" if stopped else "length")
    assert found[-1]["usage"]["completion_tokens"] == (13 if stopped else 16)
    served.assert_at_rest()


RESPONSES = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|start|>assistant: ",
    "fields": {
        "tool_calls": {
            "open_pattern": r"\s*\[call\]",
            "close": "[/call]",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*<\|end\|>", "content": "text"},
    },
}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_call_is_found(
    served: Served, scripted: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(served.tokenizer, "response_template", RESPONSES, raising=False)
    scripted('[call]{"name": "add", "arguments": {"a": 1}}[/call]<|end|>')
    response = served.chat("add", tools=[TOOL], max_tokens=200, stream=stream)
    found = parts(response) if stream else [response.json()]
    said = [part["choices"][0]["delta" if stream else "message"] for part in found]
    calls = [call["function"] for each in said for call in each.get("tool_calls", [])]
    assert calls == [{"name": "add", "arguments": '{"a": 1}'}]
    assert found[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("said", ['[call]{"name": [/call]<|end|>', '[call]{"a": 1}[/call]<|end|>', "[call]5[/call]"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_call_that_the_model_spoils_stops_nobody_else(
    served: Served, scripted: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, said: str, stream: bool
) -> None:
    monkeypatch.setattr(served.tokenizer, "response_template", RESPONSES, raising=False)
    scripted(said)
    response = served.chat("add", tools=[TOOL], max_tokens=50, stream=stream)
    assert "The model's answer cannot be parsed." in response.text
    assert response.status_code == (200 if stream else 502)
    assert served.client.get("/health").status_code == 200
    assert served.complete("fine").status_code == 200
    served.assert_at_rest()


@pytest.mark.parametrize("stream", [False, True])
def test_a_decoder_that_fails_stops_nobody_else(served: Served, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    from tieredkv.serving.endpoint.streamer import TextOf

    def put(self: TextOf, token: int) -> str:
        raise ValueError("an invalid prefix")

    with monkeypatch.context() as patch:
        patch.setattr(TextOf, "put", put)
        response = served.complete("hello", stream=stream, stop="x")
    assert "The model's answer cannot be parsed." in response.text
    assert response.status_code == (200 if stream else 502)
    assert served.complete("fine").status_code == 200
    served.assert_at_rest()


def test_many_clients_at_once_get_what_each_would_alone(serve: Serve) -> None:
    """With room for a few of them: they wait, give way and go on, streamed and not."""
    served = serve(hot="384 tokens")
    prompts = [f"{number} " * (10 + 7 * number) for number in range(12)]

    def ask(number: int) -> str:
        response = served.complete(prompts[number], max_tokens=20 + number, stream=number % 2 == 0)
        found = parts(response) if number % 2 == 0 else [response.json()]
        return "".join(part["choices"][0]["text"] for part in found)

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, range(12)))
    assert answers == [served.alone(prompt, 20 + number) for number, prompt in enumerate(prompts)]
    assert served.engine.stats().finished == {"length": 12}
    served.assert_at_rest()


def test_a_common_prefix_is_computed_once(served: Served) -> None:
    system = "s" * 64
    first = served.complete(system + "one").json()["choices"][0]["text"]
    assert served.engine.stats().attached_tokens == 0
    assert first == served.alone(system + "one", 8)
    served.complete(system + "two")
    assert served.engine.stats().attached_tokens == 64


def test_prefixes_are_shared_within_one_api_key(serve: Serve) -> None:
    served = serve(api_keys=("first", "second"))

    def ask(key: str) -> int:
        before = served.engine.stats().attached_tokens
        headers = {"Authorization": f"Bearer {key}"}
        body = {"prompt": "s" * 64, "max_tokens": 2, "temperature": 0}
        assert served.client.post("/v1/completions", json=body, headers=headers).status_code == 200
        return served.engine.stats().attached_tokens - before

    assert [ask("first"), ask("second"), ask("first"), ask("second")] == [0, 0, 63, 63]


def test_a_key_is_needed_where_there_are_keys(serve: Serve) -> None:
    served = serve(api_keys=("right",))
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "right"}):
        for path in ("/v1/models", "/v1/other"):
            response = served.client.get(path, headers=headers)
            assert (response.status_code, response.json()["error"]["code"]) == (401, "api_key")
    assert served.client.get("/v1/models", headers={"Authorization": "Bearer right"}).status_code == 200
    assert served.client.get("/health").status_code == served.client.get("/metrics").status_code == 200


@pytest.mark.contract
def test_only_what_is_meant_is_served(served: Served) -> None:
    assert served.client.get("/health").json() == {"status": "ok"}
    (entry,) = served.client.get("/v1/models").json()["data"]
    assert (entry["id"], entry["max_model_len"]) == ("tiny", 512)
    for path in ("/load_model", "/reset", "/v1/responses", "/v1/audio/transcriptions", "/v1/systemone"):
        assert served.client.post(path, json={"model": "/etc"}).status_code == 404, path
    assert served.client.get("/openapi.json").status_code == 404


def test_an_urgent_request_can_say_so(serve: Serve) -> None:
    served = serve(EngineSettings(max_model_len=512, max_running=1))
    assert served.complete("a", priority=5).status_code == 200
    assert served.complete("a", priority=10**6).status_code == 400
