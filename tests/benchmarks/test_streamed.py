"""Figures of streaming are of streaming: nothing is reported where blocks were read in another way, or unverified."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import page_cache, shapes, streamed
from benchmarks.harness import Row
from benchmarks.streamed import Step, Witness
from benchmarks.traffic import STREAM
from tieredkv import CacheSettings

TOKENS, WINDOW = 2048, 256
GOOD = Step(4096, 4096, 4096, 4, 4, 0.001)


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def witness_of(steps: list[Step], mode: str = "blocks") -> Witness:
    """Of a cache that has taken these steps."""
    cache: Any = SimpleNamespace(mode=mode, fallback_reason=None, settings=STREAM)
    witness = Witness(cache, "warm")
    witness.steps = steps
    return witness


def rows(sizes: tuple[int, ...] = (WINDOW,), settings: CacheSettings = STREAM) -> list[Row]:
    """The benchmark of two layers."""
    config = shapes.smollm2_config(layers=2)
    config.vocab_size = 100
    return streamed.figures(config, TOKENS, sizes, 1, settings)


def test_each_window_has_its_rows_and_each_row_says_how_it_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[int] = []
    monkeypatch.setattr(page_cache, "drop", lambda files: dropped.append(sum(f.stat().st_size for f in files)))
    monkeypatch.setattr(page_cache, "held_share", lambda files: 0.0)
    found = rows((256, 512))
    names = [row.measure.split(":")[0] for row in found]
    assert names == [
        "streamed from warm, window 256, verified",
        "streamed from warm, window 512, verified",
        *(
            f"streamed from cold, window {window}, {what}"
            for window in (256, 512)
            for what in ("verified", "the system's cache dropped before each step")
        ),
    ]
    for row in found:
        assert row.detail["mode"] == "blocks" and row.detail["verify"] == "always"
        assert row.detail["streamed_bytes_a_step"] == row.detail["not_hot_bytes_a_step"] > 0
        assert row.detail["verified_blocks_a_step"] >= row.detail["not_hot_blocks_a_step"] > 0
    for tier in ("warm", "cold"):
        small, large = (
            row.detail["streamed_bytes_a_step"]
            for row in found
            if row.measure.startswith(f"streamed from {tier}") and "verified:" in row.measure
        )
        assert small > large
    bare = [row for row in found if "dropped" in row.measure]
    assert all(" GB/s" in row.measure and row.unit == "ms a step" and row.reached is None for row in bare)
    assert all(row.detail["read_bytes_per_second"] > 0 for row in bare)
    assert len(dropped) == sum(row.detail["steps"] for row in bare), "not before each step"
    assert min(dropped) >= max(row.detail["streamed_bytes_a_step"] for row in bare), "not all files"


def test_files_that_stay_in_memory_give_no_figure_of_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_cache, "drop", lambda files: None)
    monkeypatch.setattr(page_cache, "held_share", lambda files: 0.75)
    monkeypatch.setattr(page_cache, "file_system", lambda folder: "tmpfs")
    (bare,) = (row for row in rows() if "dropped" in row.measure)
    assert "not measured, on tmpfs" in bare.measure and "GB/s" not in bare.measure
    assert (bare.value, bare.unit) == (75, "% held")
    assert "read_bytes_per_second" not in bare.detail


@pytest.mark.parametrize(
    ("settings", "tiers"),
    [
        (CacheSettings(read_in_place=True), ["warm"]),  # what is cold is copied all the same
        (CacheSettings(read_in_place=False, verify="off"), ["warm", "cold"]),
    ],
    ids=["in place", "unverified"],
)
def test_what_is_not_streamed_or_not_verified_gives_no_figure(settings: CacheSettings, tiers: list[str]) -> None:
    found = rows(settings=settings)
    refused = [row for row in found if "not measured" in row.measure]
    assert [row.measure.split(",")[0] for row in refused] == [f"streamed from {tier}" for tier in tiers]
    for row, tier in zip(refused, tiers, strict=True):
        assert row.reached is False and f"no figure of streaming from {tier}" in row.detail["why"]
    assert len(found) == (2 if "cold" in tiers else 3), "the others are measured"


@pytest.mark.parametrize(
    "change",
    [
        {"streamed_bytes": 4095},
        {"streamed_bytes": 8192, "tier_bytes": 8192},
        {"tier_bytes": 0},
        {"verified": 3},
        {"streamed_bytes": 0, "tier_bytes": 0, "not_hot_bytes": 0, "not_hot": 0},
    ],
    ids=["a byte less", "twice", "from another tier", "a piece unverified", "all is hot"],
)
def test_one_step_that_does_otherwise_is_enough(change: dict[str, int]) -> None:
    witness = witness_of([GOOD, dataclasses.replace(GOOD, **change), GOOD])
    with pytest.raises(RuntimeError, match="1 of 3 steps"):
        witness.told()


def test_no_steps_and_gathered_ones_give_no_figure() -> None:
    with pytest.raises(RuntimeError, match="0 of 0 steps"):
        witness_of([]).told()
    with pytest.raises(RuntimeError, match="mode gather"):
        witness_of([GOOD], mode="gather").told()


def test_a_block_that_goes_down_meanwhile_may_be_compared_too() -> None:
    told = witness_of([GOOD, dataclasses.replace(GOOD, verified=6)]).told()
    assert (told["verified_blocks_a_step"], told["not_hot_blocks_a_step"]) == (5, 4)
