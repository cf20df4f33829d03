"""The demo's options, and what they become for a model: budgets as shares of all keys and values, a block size.

Imports: errors, config, sizing; torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tieredkv import sizing
from tieredkv.config import BLOCK_MULTIPLE, CacheSettings, Size
from tieredkv.errors import ConfigError

HOT_SHARE = 8
WARM_SHARE = 4
"""The default hot budget is one part in eight of the bytes of all keys and values, the warm one a part in four."""

LEAST_HOT_BLOCKS = 4
"""The default block size is cut until the hot budget holds so many."""


@dataclasses.dataclass(frozen=True)
class Choices:
    """The command's options; None where the demo chooses. The cache's own are in `settings`.

    Args:
        model: folder, .gguf file or hub id.
        document: a text file.
        question: the question about it.
        prompt_tokens: length of the prompt.
        new_tokens: most tokens of the answer.
        chunk_tokens: tokens of one prefill forward, 0 for all.
        dtype: of the model, and so of keys and values.
        device: torch device.
        attention: "blocks" or "gather".
        block_size: tokens of a block.
        settings: all settings of the cache but the block size; sizes that are None become shares of all bytes.
    """

    model: str | None
    document: Path | None
    question: str | None
    prompt_tokens: int | None
    new_tokens: int
    chunk_tokens: int
    dtype: torch.dtype
    device: str | None
    attention: str
    block_size: int | None
    settings: CacheSettings

    def __post_init__(self) -> None:
        if self.attention not in ("blocks", "gather"):
            raise ConfigError(
                "Unknown attention.", wanted="blocks or gather", got=repr(self.attention), change="--attention blocks"
            )
        if self.new_tokens < 1 or self.chunk_tokens < 0:
            raise ConfigError(
                "A number of tokens that cannot be.",
                wanted="--new-tokens of at least 1, --prefill-chunk of at least 0",
                got=f"{self.new_tokens} and {self.chunk_tokens}",
                change="leave both at their defaults",
            )


def resolve_settings(choices: Choices, config: Any, prompt_tokens: int, cold: Path) -> CacheSettings:
    """The settings with shares turned into bytes, and a block size of which hot holds a few.

    Args:
        choices: what the user chose.
        config: of the model.
        prompt_tokens: tokens of the prompt.
        cold: the cold tier's folder.
    """
    tokens = prompt_tokens + choices.new_tokens
    layers = [layer for layer in sizing.kv_layers(config) if layer.grows and layer.window_tokens is None]
    token_bytes = sum(layer.geometry(choices.dtype).token_bytes for layer in layers)
    given = choices.settings
    hot = Size.parse(tokens * token_bytes // HOT_SHARE if given.hot is None else given.hot)
    warm = Size.parse(tokens * token_bytes // WARM_SHARE if given.warm is None else given.warm)
    block_size = choices.block_size or CacheSettings().block_size
    if choices.block_size is None:
        least = hot.resolve(token_bytes, 1) // LEAST_HOT_BLOCKS
        while block_size > BLOCK_MULTIPLE and block_size * token_bytes > least:
            block_size //= 2
    folder = cold if given.cold is None else given.cold
    return dataclasses.replace(given, hot=hot, warm=warm, cold=folder, block_size=block_size, max_tokens=tokens)


@contextlib.contextmanager
def cold_folder(choices: Choices) -> Iterator[Path]:
    """The folder that was asked for, or one that goes away afterwards."""
    if choices.settings.cold is not None:
        yield Path(str(choices.settings.cold))
        return
    with tempfile.TemporaryDirectory(prefix="tieredkv-demo-") as folder:
        yield Path(folder)
