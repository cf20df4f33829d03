"""What a block is: its geometry per layer, its encoded planes, and the record that says where it lives.

A block is `block_size` consecutive tokens of one sequence, over all tiered layers. Its K and V lie head-major:
a pool tensor is `[kv_heads, slots, block_size, dim]`, so that neighbouring slots are one contiguous stretch of
tokens per head (docs/decisions/0001-head-major-pools.md).

Imports: config.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from tieredkv.config import TIERS as TIERS

LOWER = TIERS[1:]
"""The tiers that hold blocks as a codec made them."""


@dataclasses.dataclass(frozen=True)
class LayerGeometry:
    """The shape of one layer's K and V for one token.

    Args:
        kv_heads: number of K/V heads.
        k_dim: elements of a key.
        v_dim: elements of a value.
        dtype: dtype of K and V.
    """

    kv_heads: int
    k_dim: int
    v_dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K and V in this layer, unencoded."""
        return self.kv_heads * (self.k_dim + self.v_dim) * self.dtype.itemsize

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block's K and V in this layer, unencoded."""
        return block_size * self.token_bytes


@dataclasses.dataclass(frozen=True)
class Plane:
    """One of the arrays in which a codec stores a layer's blocks: a tensor `[kv_heads, n, *inner]` for n blocks.

    Args:
        name: "k", "v", "k_scale", ...
        dtype: element type as stored.
        kv_heads: leading dimension.
        inner: the dimensions after the block dimension.
    """

    name: str
    dtype: torch.dtype
    kv_heads: int
    inner: tuple[int, ...]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in this plane (always a multiple of 8, so that checksums run over words)."""
        return self.kv_heads * math.prod(self.inner) * self.dtype.itemsize

    def empty(self, blocks: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """An uninitialised tensor `[kv_heads, blocks, *inner]`."""
        return torch.empty((self.kv_heads, blocks, *self.inner), dtype=self.dtype, device=device)


Planes = tuple[torch.Tensor, ...]
"""The arrays of n blocks of one layer, one tensor `[kv_heads, n, *inner]` for each of the codec's planes."""


@dataclasses.dataclass(eq=False, slots=True)
class Block:
    """Where one block lives. Mutable, owned by the store; identity is the object (and `id`).

    Args:
        id: unique within a store.
        tokens: tokens filled so far, at most the block size.
        refs: how many table entries point to it, those of what keeps it for later caches and of who looks it up
            included; freed at zero.
        sealed: full and immutable.
        hot: slot in the hot tier, or None.
        packed: slot in the packed tier, or None.
        warm: slot in the warm tier, or None.
        cold: slot in the cold tier, or None.
        checksums: per layer, the 64-bit checksum over the bytes as stored below hot, or None while there is none.
        last_access: for a block that is kept for later caches, the store's forward (a counter) at which it was last
            published or found. When a cache last ran is known to its `Holder`.
        gone: dropped for good, and in no tier: it stands in a table for tokens that are seen no more.
    """

    id: int
    tokens: int = 0
    refs: int = 1
    sealed: bool = False
    hot: int | None = None
    packed: int | None = None
    warm: int | None = None
    cold: int | None = None
    checksums: list[int | None] = dataclasses.field(default_factory=list)
    last_access: int = 0
    gone: bool = False

    @property
    def location(self) -> str:
        """The fastest tier that holds the block, one of `TIERS`, or "nowhere"."""
        for tier in TIERS:
            if getattr(self, tier) is not None:
                return tier
        return "nowhere"

    @property
    def is_stored_below(self) -> bool:
        """Whether a tier below hot holds a copy, so that the hot copy can be dropped without moving bytes."""
        return self.packed is not None or self.warm is not None or self.cold is not None
