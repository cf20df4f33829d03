"""Settings: sizes in every form a user writes, and refusals when they are made."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tieredkv import codecs
from tieredkv.config import CODEC_NAMES, STAGING_ON_CPU, STAGING_ON_GPU, CacheSettings, ColdSettings, Size, parse_bytes
from tieredkv.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("512MiB", 512 * 2**20),
        ("512 mib", 512 * 2**20),
        ("1.5 GB", 1_500_000_000),
        ("2GiB", 2 * 2**30),
        ("3KB", 3000),
        ("1TiB", 2**40),
        (" 7 B ", 7),
    ],
)
def test_bytes(text: int | str, wanted: int) -> None:
    assert parse_bytes(text) == wanted
    assert Size.parse(text).resolve(token_bytes=999, rows=3) == wanted


@pytest.mark.parametrize("text", ["", "MiB", "12 parsecs", "-5", -1, True, None, 1.5, "1e9", "5 tokens"])
def test_what_is_not_a_size(text: Any) -> None:
    with pytest.raises(ConfigError, match="512MiB"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["2048 tokens", "2048 token", " 2048tokens", "2048 TOKENS"])
def test_tokens_are_for_each_row(text: str) -> None:
    size = Size.parse(text)
    assert size == Size(tokens_per_row=2048)
    assert size.resolve(token_bytes=10, rows=3) == 2048 * 10 * 3
    assert size.resolve(token_bytes=10, rows=0) == 2048 * 10
    assert Size.parse(size) is size
    assert str(size) == "2048 tokens"


@given(st.integers(0, 2**50), st.sampled_from(["", "B", "KiB", "MiB"]))
def test_whole_numbers_of_units_are_exact(count: int, unit: str) -> None:
    factor = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20}[unit]
    assert parse_bytes(f"{count}{unit}") == count * factor


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_size": 24}, "multiple of 16"),
        ({"block_size": 0}, "multiple of 16"),
        ({"block_size": -16}, "multiple of 16"),
        ({"block_size": True}, "multiple of 16"),
        ({"window": 0}, "at least 1"),
        ({"verify": "sometimes"}, "always"),
        ({"kernel": "fast"}, "flex"),
        ({"watermark": 0.0}, "watermark"),
        ({"watermark": 1.5}, "watermark"),
        ({"write_down_at": 0.9, "watermark": 0.8}, "watermark"),
        ({"write_down_at": -0.1}, "watermark"),
        ({"chunk_tokens": 0}, "chunk_tokens"),
        ({"hot": "much"}, "512MiB"),
        ({"warm": -1}, "512MiB"),
        ({"codec": "nope"}, "Unknown codec"),
        ({"codec": "nope", "hot_codec": "nope"}, "Unknown codec"),
        ({"codec": "int8", "hot_codec": "nope"}, "Unknown codec"),
        ({"codec": None}, "Unknown codec"),
        ({"max_tokens": -1}, "max_tokens"),
    ],
)
def test_a_setting_that_can_never_be_served(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        CacheSettings(**changes)
    assert caught.value.wanted and caught.value.change


@pytest.mark.parametrize("changes", [{"cap": "much"}, {"free_floor": "little"}, {"free_floor": -1}])
def test_a_cold_setting_that_can_never_be_served(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ColdSettings(path="/nowhere", **changes)


def test_the_names_of_codecs_are_those_that_there_are() -> None:
    assert tuple(codec.name for codec in codecs._CODECS) == CODEC_NAMES
    for name in CODEC_NAMES:
        assert CacheSettings(codec=name).codec == codecs.get_codec(name).name


def test_nothing_touches_a_disk_unasked() -> None:
    assert CacheSettings().cold is None
    assert CacheSettings().cold_settings is None


def test_a_path_becomes_cold_settings(tmp_path: Path) -> None:
    assert CacheSettings(cold=tmp_path).cold_settings == ColdSettings(path=tmp_path)
    chosen = ColdSettings(path=tmp_path, cap="64 tokens", free_floor="1KiB")
    assert CacheSettings(cold=chosen).cold_settings is chosen
    assert chosen.cap_size == Size(tokens_per_row=64)
    assert chosen.free_floor_bytes == 1024
    assert ColdSettings(path=tmp_path).cap_size is None


def test_settings_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        CacheSettings().window = 5  # type: ignore[misc]


def test_a_chunk_on_a_gpu_is_large_enough_for_its_link() -> None:
    settings = CacheSettings()
    assert STAGING_ON_CPU.chunk_tokens(settings, 1024) == 4096
    assert STAGING_ON_GPU.chunk_tokens(settings, 1024) == 32768
    assert STAGING_ON_GPU.chunk_tokens(settings, 1 << 20) == 4096
    assert STAGING_ON_GPU.chunk_tokens(CacheSettings(chunk_tokens=64), 1024) == 64
