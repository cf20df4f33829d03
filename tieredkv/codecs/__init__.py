"""Codecs: how a layer's blocks are stored below hot (and in hot, when asked).

| name | bytes against bf16 | error | for |
|---|---|---|---|
| raw | 1.00 | none | exact results |
| int8 | 0.51 | half of 1/127 of the largest value of its channel (K) or token (V) | nearly exact at half the bytes |
| fp8 | 0.51 | 1/16 of each value | values spread over many magnitudes; else int8 is closer |
| int4 | 0.32 | half a step of about 1/15 of the range of 16 values | a third of the bytes |

(Ratios for blocks of 128 tokens and heads of 64, scales included; each class states its bound exactly.)

Imports: errors, config, block, and this package.
"""

from __future__ import annotations

from tieredkv.codecs.base import Codec
from tieredkv.codecs.int4 import Int4Codec
from tieredkv.codecs.raw import RawCodec
from tieredkv.codecs.scaled import Fp8Codec, Int8Codec
from tieredkv.config import CODEC_NAMES, check_codec

__all__ = ["CODEC_NAMES", "Codec", "Fp8Codec", "Int4Codec", "Int8Codec", "RawCodec", "get_codec"]

_CODECS: tuple[type[Codec], ...] = (RawCodec, Fp8Codec, Int8Codec, Int4Codec)


def get_codec(name: str) -> Codec:
    """The codec of that name.

    Raises:
        ConfigError: the name is unknown.
    """
    check_codec(name)
    return next(codec for codec in _CODECS if codec.name == name)()
