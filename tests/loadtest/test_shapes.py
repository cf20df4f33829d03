"""What a load is made of: lengths, times, ramps, prompts; and loads that cannot be sent."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest

from tieredkv.errors import ConfigError
from tieredkv.loadtest.settings import LoadSettings
from tieredkv.loadtest.shapes import KINDS, Ask, parts_of, ramp
from tieredkv.loadtest.words import WORDS, WordSize, text

URL = "http://127.0.0.1:1"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Five requests, one of them without an answer."""
    file = tmp_path / "trace.csv"
    lines = ["374,44", "396,109", "5000,20", "10,0", "91,16"]
    times = ["46.0", "48.0", "48.5", "49.0", "56.0"]
    rows = [f"2023-11-16 18:15:{at},{line}" for at, line in zip(times, lines, strict=True)]
    file.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    return file


def asks(**options: Any) -> list[Ask]:
    (part,) = parts_of(LoadSettings(URL, **options))
    return list(part.asks)


def test_a_trace_is_sent_at_its_times(trace: Path) -> None:
    found = asks(trace=trace, scale=0.5)
    assert [(a.number, a.prompt_tokens, a.answer_tokens) for a in found] == [
        (0, 374, 44),
        (1, 396, 109),
        (2, 5000, 20),
        (3, 91, 16),
    ]
    assert [ask.at_seconds for ask in found] == [0.0, 1.0, 1.25, 5.0]


def test_long_requests_are_left_out_and_times_begin_with_the_first_that_is_sent(trace: Path) -> None:
    found = asks(trace=trace, longest=200)
    assert [(ask.prompt_tokens, ask.at_seconds) for ask in found] == [(91, 0.0)]
    assert len(asks(trace=trace, requests=2)) == 2
    with pytest.raises(ConfigError, match="nothing to send"):
        asks(trace=trace, longest=20)


def test_a_rate_gives_times_of_its_own() -> None:
    found = asks(shape="500:150", rate=4.0, requests=400, seed=1)
    assert found[0].at_seconds == 0.0
    assert {(ask.prompt_tokens, ask.answer_tokens) for ask in found} == {(500, 150)}
    gaps = [after.at_seconds - before.at_seconds for before, after in itertools.pairwise(found)]
    assert min(gaps) > 0 and sum(gaps) / len(gaps) == pytest.approx(0.25, rel=0.15)
    assert found == asks(shape="500:150", rate=4.0, requests=400, seed=1)
    assert found != asks(shape="500:150", rate=4.0, requests=400, seed=2)


def test_the_mix_has_short_medium_and_long_ones() -> None:
    found = asks(requests=300)
    assert len(found) == 300
    for _, prompt, answer in KINDS:
        of_kind = [ask for ask in found if 0.5 * prompt <= ask.prompt_tokens <= 1.5 * prompt]
        assert any(0.5 * answer - 1 <= ask.answer_tokens <= 1.5 * answer for ask in of_kind)
    assert all(ask.tokens <= 1000 for ask in asks(longest=1000, requests=200))


def test_a_ramp_goes_from_short_and_few_to_long_and_many() -> None:
    parts = ramp([Ask(n, 1000 - 10 * n, 5) for n in range(40)], 12)
    assert [part.concurrency for part in parts] == [1, 2, 4, 8, 12]
    assert [len(part.asks) for part in parts] == [8] * 5
    lengths = [ask.tokens for part in parts for ask in part.asks]
    assert lengths == sorted(lengths)
    assert [part.concurrency for part in ramp([Ask(0, 5, 5), Ask(1, 6, 5)], 1)] == [1]
    # Fewer requests than steps: no part is empty, and nothing is lost.
    few = ramp([Ask(n, 5, 5) for n in range(3)], 64)
    assert [len(part.asks) for part in few] == [1, 1, 1]


@pytest.mark.parametrize(
    ("options", "open_", "said"),
    [
        ({}, False, "lengths mix, 8 at once"),
        ({"rate": 2.0}, True, "lengths mix, 2 a second"),
        ({"concurrency": 3}, False, "lengths mix, 3 at once"),
        ({"trace": Path("t.csv"), "scale": 0.1}, True, "lengths of t.csv at its times x 0.1"),
        ({"trace": Path("t.csv"), "rate": 2.0}, True, "lengths of t.csv, 2 a second"),
        ({"trace": Path("t.csv"), "concurrency": 3}, False, "lengths of t.csv, 3 at once"),
        ({"trace": Path("t.csv"), "ramp": True}, False, "lengths of t.csv, a ramp up to 8 at once"),
    ],
)
def test_which_loop_it_is(options: dict[str, Any], open_: bool, said: str) -> None:
    settings = LoadSettings(URL, **options)
    assert (settings.is_open, settings.load) == (open_, said)


@pytest.mark.parametrize(
    "options",
    [
        {"shape": "long"},
        {"shape": "500:0"},
        {"requests": 0},
        {"rate": 0.0},
        {"rate": float("inf")},
        {"scale": float("nan")},
        {"concurrency": -1},
        {"rate": 1.0, "concurrency": 1},
        {"rate": 1.0, "ramp": True},
        {"timeout_seconds": 0.0},
        {"url": "127.0.0.1:8000"},
        {"url": "http://"},
    ],
)
def test_loads_that_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        LoadSettings(**{"url": URL, **options})


def test_an_address_is_taken_with_and_without_its_version() -> None:
    for url in (URL, f"{URL}/", f"{URL}/v1", f"{URL}/v1/"):
        assert LoadSettings(url).base_url == URL
    assert "secret" not in repr(dataclasses.replace(LoadSettings(URL), api_key="secret"))


def test_prompts_have_as_many_tokens_as_wanted() -> None:
    size = WordSize.from_two((16, 144), (7 + 3 * 16, 7 + 3 * 144))
    assert (size.tokens_per_word, size.template_tokens) == (3.0, 7.0)
    assert [size.words(tokens) for tokens in (307, 10, 1)] == [100, 1, 1]
    assert len(text(0, 1, 100).split()) == 100 and set(text(0, 1, 500).split()) <= set(WORDS)
    assert text(0, 1, 50) == text(0, 1, 50)
    assert len({text(seed, number, 8) for seed in range(3) for number in range(50)}) == 150
