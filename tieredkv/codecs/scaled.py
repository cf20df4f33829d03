"""One byte per element and one scale per channel (K) or token (V): int8 and fp8.

Keys have a few channels that are large for every token, so a scale per channel of the block keeps the small channels;
values have no such channels, and a scale per token costs the same.

Imports: block, base.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch

from tieredkv.block import LayerGeometry, Plane, Planes
from tieredkv.codecs.base import (
    E4M3_WIDENED_UNIT,
    SCALE_DTYPE,
    Codec,
    check_block_size,
    check_same_blocks,
    finite_codes_,
    pad_to_words,
    pieces,
    round_into,
    scratch,
    storable_scale,
    widened_e4m3,
)

# The dimension of [kv_heads, n, block_size, dim] over which one scale holds.
_K_SPAN, _V_SPAN = 2, 3


class ScaledCodec(Codec):
    """Codes times a scale, symmetric around zero; scale = largest magnitude of the span / `largest_code`, in bf16.

    Planes: "k" and "v" `[block_size, dim]` of `code_dtype`, "k_scale" `[k_dim]` (padded with zeros to a multiple of
    4) and "v_scale" `[block_size]`.

    A span (one channel of K over the block, or one token of V, of one head) that holds a NaN or an infinity decodes to
    NaN throughout. A span whose largest magnitude is not above `largest_code` * 2^-126 decodes to zeros.
    """

    lossless = False
    code_dtype: ClassVar[torch.dtype]
    largest_code: ClassVar[float]

    @abstractmethod
    def _to_codes(self, scaled: torch.Tensor, codes: torch.Tensor) -> None:
        """Write fp32 `scaled`, to rounding at most `largest_code` in magnitude, to `codes`; may overwrite it."""

    @abstractmethod
    def _from_codes(self, codes: torch.Tensor, out: torch.Tensor) -> None:
        """Write `codes` to fp32 `out` as `_unit` times what they mean, exactly."""

    @property
    def _unit(self) -> float:
        return 1.0

    def planes(self, geometry: LayerGeometry, block_size: int) -> tuple[Plane, ...]:
        check_block_size(block_size)
        heads = geometry.kv_heads
        return (
            Plane("k", self.code_dtype, heads, (block_size, geometry.k_dim)),
            Plane("v", self.code_dtype, heads, (block_size, geometry.v_dim)),
            Plane("k_scale", SCALE_DTYPE, heads, (pad_to_words(geometry.k_dim),)),
            Plane("v_scale", SCALE_DTYPE, heads, (block_size,)),
        )

    def encode(self, k: torch.Tensor, v: torch.Tensor) -> Planes:
        check_same_blocks(k, v)
        heads, blocks, tokens, k_dim = k.shape
        k_scale = torch.zeros((heads, blocks, pad_to_words(k_dim)), dtype=SCALE_DTYPE, device=k.device)
        v_scale = torch.empty((heads, blocks, tokens), dtype=SCALE_DTYPE, device=v.device)
        k_codes = self._encode_half(k, k_scale[..., :k_dim].unsqueeze(_K_SPAN), _K_SPAN)
        v_codes = self._encode_half(v, v_scale.unsqueeze(_V_SPAN), _V_SPAN)
        return (k_codes, v_codes, k_scale, v_scale)

    def decode(self, planes: Planes, k_out: torch.Tensor, v_out: torch.Tensor) -> None:
        k_codes, v_codes, k_scale, v_scale = planes
        self._decode_half(k_codes, k_scale[..., : k_codes.shape[-1]].unsqueeze(_K_SPAN), k_out)
        self._decode_half(v_codes, v_scale.unsqueeze(_V_SPAN), v_out)

    def _encode_half(self, x: torch.Tensor, scale_out: torch.Tensor, span: int) -> torch.Tensor:
        """Codes of `x`, and their scales to `scale_out`, which has size 1 in dimension `span`."""
        codes = torch.empty(x.shape, dtype=self.code_dtype, device=x.device)
        room = scratch(x, torch.float32)
        for piece in pieces(x):
            values = x[:, piece].float()
            scaled = room[:, : values.shape[1]]
            largest = torch.abs(values, out=scaled).amax(span, keepdim=True)
            stored, inverse = storable_scale(largest / self.largest_code)
            scale_out[:, piece] = stored
            self._to_codes(torch.mul(values, inverse, out=scaled), codes[:, piece])
        return codes

    def _decode_half(self, codes: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
        factor = scale.float() / self._unit
        room = scratch(out, torch.float32) if out.dtype != torch.float32 else out
        for piece in pieces(codes):
            target = out[:, piece]
            values = target if room is out else room[:, : target.shape[1]]
            self._from_codes(codes[:, piece], values)
            values.mul_(factor[:, piece])
            if room is not out:
                round_into(values, target)


class Int8Codec(ScaledCodec):
    """int8 times a bf16 scale per channel of K and per token of V.

    Error, with `scale` the stored scale of the span, at most (1 + 2^-8) / 127 of the span's largest magnitude:
    `|x - x'| <= scale * (1/2 + 2^-14)`. `x'` is exact in fp32, and rounded once to other output dtypes.
    """

    name = "int8"
    code_dtype = torch.int8
    largest_code = 127.0

    def _to_codes(self, scaled: torch.Tensor, codes: torch.Tensor) -> None:
        codes.copy_(finite_codes_(scaled.round_()))

    def _from_codes(self, codes: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(codes)


class Fp8Codec(ScaledCodec):
    """float8_e4m3fn times a bf16 scale per channel of K and per token of V.

    Error, with `scale` the stored scale of the span, at most (1 + 2^-8) / 448 of the span's largest magnitude:
    `|x - x'| <= max(|x| * (2^-4 + 2^-20), scale * (2^-10 + 2^-20))`. `x'` is exact in fp32, and rounded once to other
    output dtypes.
    """

    name = "fp8"
    code_dtype = torch.float8_e4m3fn
    largest_code = 448.0

    @property
    def _unit(self) -> float:
        return E4M3_WIDENED_UNIT

    def _to_codes(self, scaled: torch.Tensor, codes: torch.Tensor) -> None:
        codes.copy_(finite_codes_(scaled))

    def _from_codes(self, codes: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(widened_e4m3(codes))
