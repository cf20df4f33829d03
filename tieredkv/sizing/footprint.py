"""How many bytes keys and values take: per token, per context, and encoded by a codec with its scales.

Imports: errors, config, codecs, layers.
"""

from __future__ import annotations

import dataclasses

import torch

from tieredkv.codecs import get_codec
from tieredkv.config import CacheSettings
from tieredkv.errors import ConfigError
from tieredkv.sizing.layers import LayerKV, kv_layers

DEFAULT_BLOCK_SIZE = CacheSettings().block_size

_DTYPES: dict[str | int, torch.dtype] = {
    "fp16": torch.float16,
    "float16": torch.float16,
    "half": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp32": torch.float32,
    "float32": torch.float32,
    "float": torch.float32,
    2: torch.float16,
    4: torch.float32,
}


@dataclasses.dataclass(frozen=True)
class EncodedBytes:
    """Bytes of one block of one layer below hot.

    Args:
        values_bytes: the encoded elements.
        scales_bytes: what lies beside them: scales, and centres where a codec has them.
    """

    values_bytes: int
    scales_bytes: int

    @property
    def total_bytes(self) -> int:
        """Elements and scales together."""
        return self.values_bytes + self.scales_bytes


def encoded_block_bytes(layer: LayerKV, codec: str, block_size: int, dtype: torch.dtype | str | int) -> EncodedBytes:
    """Bytes of one block of one layer under a codec.

    Args:
        layer: a layer that stores keys and values.
        codec: one of `config.CODEC_NAMES`.
        block_size: tokens of a block, a multiple of 16.
        dtype: dtype of K and V unencoded, its name, or its bytes per element (2 or 4).

    Raises:
        ConfigError: an unknown codec or dtype, a block size that is not a multiple of 16.
        UnsupportedModelError: the layer stores no keys and values.
    """
    planes = get_codec(codec).planes(layer.geometry(parse_dtype(dtype)), block_size)
    values_bytes = sum(plane.block_bytes for plane in planes if plane.name in ("k", "v"))
    return EncodedBytes(values_bytes, sum(plane.block_bytes for plane in planes) - values_bytes)


def parse_dtype(dtype: torch.dtype | str | int) -> torch.dtype:
    """The torch dtype of K and V that "fp16", "bfloat16", "torch.float32" or bytes per element (2 or 4) stand for.

    Raises:
        ConfigError: not a dtype that K and V can have.
    """
    found = _DTYPES.get(dtype if isinstance(dtype, int) else str(dtype).removeprefix("torch."))
    if found is None:
        known = " or ".join(str(name) for name in _DTYPES)
        raise ConfigError("The dtype is unknown.", wanted=known, got=dtype, change="choose one of these")
    return found


def layer_bytes(layer: LayerKV, tokens: int, dtype: torch.dtype | str | int, codec: str, block_size: int) -> int:
    """Bytes of `tokens` tokens of one layer; scales are spread over a block's tokens, the sum rounded up."""
    if not layer.grows:
        return 0
    return -(-tokens * encoded_block_bytes(layer, codec, block_size, dtype).total_bytes // block_size)


def kv_bytes_per_token(
    config: object, dtype: torch.dtype | str | int, codec: str = "raw", block_size: int = DEFAULT_BLOCK_SIZE
) -> int:
    """Bytes that one more token takes over all layers, sliding ones included (see `kv_bytes` for their window).

    For multi-head or grouped attention with the raw codec this is 2 x layers x KV heads x head dim x element bytes.

    Args:
        config: as in `kv_layers`.
        dtype: dtype of K and V, or its bytes per element.
        codec: one of `config.CODEC_NAMES`.
        block_size: tokens that share the scales of a codec.
    """
    return sum(layer_bytes(layer, 1, dtype, codec, block_size) for layer in kv_layers(config))


def kv_bytes(
    config: object,
    context_tokens: int,
    batch: int = 1,
    dtype: torch.dtype | str | int = torch.float16,
    codec: str = "raw",
    block_size: int = DEFAULT_BLOCK_SIZE,
) -> int:
    """Bytes that the K and V of `batch` sequences of `context_tokens` tokens take; sliding layers count their window.

    Arguments and errors as in `kv_bytes_per_token`.
    """
    return batch * sum(
        layer_bytes(layer, layer.stored_tokens(context_tokens), dtype, codec, block_size) for layer in kv_layers(config)
    )
