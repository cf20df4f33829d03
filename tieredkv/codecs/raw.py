"""The codec that stores K and V as they are.

Imports: block, base.
"""

from __future__ import annotations

import torch

from tieredkv.block import LayerGeometry, Plane, Planes
from tieredkv.codecs.base import Codec, check_block_size, check_same_blocks


class RawCodec(Codec):
    """K and V unchanged. Error: none, also for NaN and infinities."""

    name = "raw"
    lossless = True

    def planes(self, geometry: LayerGeometry, block_size: int) -> tuple[Plane, ...]:
        check_block_size(block_size)
        return (
            Plane("k", geometry.dtype, geometry.kv_heads, (block_size, geometry.k_dim)),
            Plane("v", geometry.dtype, geometry.kv_heads, (block_size, geometry.v_dim)),
        )

    def encode(self, k: torch.Tensor, v: torch.Tensor) -> Planes:
        check_same_blocks(k, v)
        return (k, v)

    def decode(self, planes: Planes, k_out: torch.Tensor, v_out: torch.Tensor) -> None:
        k, v = planes
        k_out.copy_(k)
        v_out.copy_(v)
