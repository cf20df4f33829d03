"""Reading traces: both formats, what is refused, and the recorded files where they are at hand."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tieredkv.errors import ConfigError
from tieredkv.eviction.traces import Request, parents_of, read_trace

TRACES = Path(__file__).parents[3] / "shared" / "traces"


def test_mooncake(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(
        '{"timestamp": 500, "input_length": 1025, "output_length": 7, "hash_ids": [0, 4, 9]}\n\n'
        '{"timestamp": 3000, "input_length": 10, "output_length": 1, "hash_ids": []}\n'
    )
    assert read_trace(str(file)) == [Request(0.5, 1025, 7, (0, 4, 9)), Request(3.0, 10, 1)]


def test_azure(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n"
        "2023-11-16 18:18:04.2299600,3180,8\n"
    )
    assert read_trace(file) == [Request(0.0, 4808, 10), Request(60.25, 3180, 8)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", '{"timestamp": 0, "input_length": 1, "output_length": 1}\n'),
        ("a.jsonl", "not json\n"),
        ("a.jsonl", "[1, 2]\n"),
        ("a.csv", "TIMESTAMP,ContextTokens\n2023-11-16 18:17:03.9,4808\n"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n"),
        ("a.txt", ""),
        ("absent.jsonl", None),
    ],
)
def test_other_files_are_refused(tmp_path: Path, name: str, text: str | None) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=f"{name} cannot be replayed"):
        read_trace(tmp_path / name)


@pytest.mark.parametrize(
    ("paths", "why"),
    [
        ([(1, 2), (3, 2)], "block 2 after 3 in request 1, after 1 before"),
        ([(1, 2), (2,)], "block 2 after None in request 1"),
        ([(1, 2, 1)], "block 1 after 2"),
        ([(), ()], "lengths only"),
    ],
)
def test_ids_that_are_no_prefixes_are_refused(paths: list[tuple[int, ...]], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parents_of([Request(0, 1, 1, path) for path in paths])


def test_parents() -> None:
    assert parents_of([Request(0, 1, 1, (1, 2)), Request(0, 1, 1, (1, 3))]) == {1: None, 2: 1, 3: 1}


@pytest.mark.skipif(not TRACES.is_dir(), reason="the recorded traces are not at hand")
@pytest.mark.parametrize(
    ("name", "requests", "blocks"),
    [
        ("conversation_trace.jsonl", 12_031, 182_790),
        ("synthetic_trace.jsonl", 3_993, 43_924),
        ("AzureLLMInferenceTrace_conv.csv", 19_366, 0),
        ("AzureLLMInferenceTrace_code.csv", 8_819, 0),
    ],
)
def test_recorded_traces(name: str, requests: int, blocks: int) -> None:
    trace = read_trace(TRACES / name)
    assert len(trace) == requests and trace[0].at_seconds == 0
    assert len({block for request in trace for block in request.blocks}) == blocks
    assert all(a.at_seconds <= b.at_seconds for a, b in itertools.pairwise(trace))
