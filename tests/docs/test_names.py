"""The names that the guides use exist: figures of `stats()`, errors, arguments of the cache."""

from __future__ import annotations

import dataclasses
import inspect
import operator
import re
from pathlib import Path

import pytest
from support import tiny

import tieredkv

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
ROW = re.compile(r"^\| ([^|]+) \|", re.MULTILINE)
NAME = re.compile(r"`([a-z_.]+)`")


@pytest.fixture(scope="module")
def stats() -> tieredkv.CacheStats:
    with tieredkv.TieredCache(tiny()) as cache:
        return cache.stats()


def test_every_figure_of_the_guide_is_one_of_stats(stats: tieredkv.CacheStats) -> None:
    text = (GUIDES / "reading-stats.md").read_text(encoding="utf-8")
    names = [name for cell in ROW.findall(text) for name in NAME.findall(cell)]
    assert len(names) > 15
    for name in names:
        operator.attrgetter(name)(stats)


def test_every_figure_that_troubleshooting_names_is_one_of_stats(stats: tieredkv.CacheStats) -> None:
    text = (GUIDES / "troubleshooting.md").read_text(encoding="utf-8")
    figures = set(
        re.findall(r"`((?:decode|prefill)\.[a-z_]+|[a-z]+_(?:bytes|seconds|efficiency|reason|failures))`", text)
    )
    assert len(figures) > 5
    for name in figures:
        operator.attrgetter(name)(stats)


def test_every_error_that_troubleshooting_names_is_ours_and_none_is_left_out() -> None:
    text = (GUIDES / "troubleshooting.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([A-Z]\w+Error)`", text))
    ours = {name for name in tieredkv.__all__ if name.endswith("Error")}
    # The base, a wrong setting that says all there is to say, and a race, which only the simulated device looks for.
    assert ours - named == {"TieredKVError", "ConfigError", "RaceError"}
    assert named <= ours


def test_every_argument_that_the_guides_name_is_one_of_the_cache() -> None:
    arguments = set(inspect.signature(tieredkv.TieredCache).parameters)
    arguments |= {field.name for field in dataclasses.fields(tieredkv.CacheSettings)}
    for page in GUIDES.glob("*.md"):
        calls = re.findall(r"TieredCache\(model, ([^\n]*)\) as", page.read_text(encoding="utf-8"))
        for name in re.findall(r"(\w+)=", " ".join(calls)):
            assert name in arguments, (page.name, name)
