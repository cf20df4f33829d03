"""What a codec is, and what the lossy ones share: storable scales, and pieces of work that fit in cache.

Imports: errors, config and block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch.nn import functional

from tieredkv.block import LayerGeometry, Plane, Planes
from tieredkv.config import BLOCK_MULTIPLE
from tieredkv.errors import ConfigError, MismatchError

# Scales have 2 bytes and the range of fp32: in fp16, keys above 8e6 would overflow, and 4 bytes would double the cost.
SCALE_DTYPE = torch.bfloat16

E4M3_WIDENED_UNIT = 2.0**-8

SMALLEST_NORMAL = 2.0**-126  # of fp32 and of bf16

# Elements worked on at once on a CPU: enough to hide the dispatch of some twenty operations, while the fp32 temporary
# (2 MiB) stays in cache. With 128 Ki elements int8 encodes at .7 of the speed, int4 at .6.
_PIECE_ELEMENTS = 512 * 1024


class Codec(ABC):
    """Turns a layer's K and V into planes and back. Stateless: one instance may serve any thread.

    Encoding is a function of each block alone: the same bits come out whatever the strides, and however many blocks
    are encoded together. The lossy codecs' error bounds hold for magnitudes up to 2^127, half of what fp32 holds;
    larger ones may decode to infinity or NaN.
    """

    name: ClassVar[str]
    lossless: ClassVar[bool]

    @abstractmethod
    def planes(self, geometry: LayerGeometry, block_size: int) -> tuple[Plane, ...]:
        """The arrays in which this codec stores the blocks of such a layer.

        In each, one head of one block is a multiple of 8 bytes.

        Raises:
            ConfigError: `block_size` is not a multiple of 16.
        """

    @abstractmethod
    def encode(self, k: torch.Tensor, v: torch.Tensor) -> Planes:
        """Encode n blocks.

        Args:
            k: `[kv_heads, n, block_size, k_dim]`, any float dtype, any strides.
            v: `[kv_heads, n, block_size, v_dim]`, the same.

        Returns:
            one tensor `[kv_heads, n, *inner]` for each of `planes`. Raw returns `k` and `v` themselves; the others
            new contiguous tensors.

        Raises:
            MismatchError: `k` and `v` differ in heads, blocks or block size.
        """

    @abstractmethod
    def decode(self, planes: Planes, k_out: torch.Tensor, v_out: torch.Tensor) -> None:
        """Decode n blocks.

        Args:
            planes: as `encode` returns them, any strides in the first two dimensions.
            k_out: `[kv_heads, n, block_size, k_dim]`, any float dtype, any strides; overwritten.
            v_out: `[kv_heads, n, block_size, v_dim]`, the same.
        """

    def block_bytes(self, geometry: LayerGeometry, block_size: int) -> int:
        """Bytes of one encoded block of such a layer, scales included."""
        return sum(plane.block_bytes for plane in self.planes(geometry, block_size))


def check_block_size(block_size: int) -> None:
    """Refuse block sizes whose planes would not be whole 64-bit words."""
    if block_size <= 0 or block_size % BLOCK_MULTIPLE:
        raise ConfigError(
            f"A block is a multiple of {BLOCK_MULTIPLE} tokens.",
            wanted="16, 32, 48, ...",
            got=block_size,
            change=f"set block_size to a multiple of {BLOCK_MULTIPLE}",
        )


def check_same_blocks(k: torch.Tensor, v: torch.Tensor) -> None:
    """Refuse K and V that are not of the same blocks."""
    if k.dim() != 4 or v.dim() != 4 or k.shape[:3] != v.shape[:3]:
        raise MismatchError(
            "K and V to encode are not of the same blocks.",
            wanted="k [kv_heads, n, block_size, k_dim] and v [kv_heads, n, block_size, v_dim]",
            got=f"k {tuple(k.shape)} and v {tuple(v.shape)}",
            change="pass the same slots of both pools",
        )
    check_block_size(k.shape[2])


def pad_to_words(elements: int, dtype: torch.dtype = SCALE_DTYPE) -> int:
    """`elements` numbers rounded up to whole 64-bit words."""
    per_word = 8 // dtype.itemsize
    return -(-elements // per_word) * per_word


def piece_blocks(x: torch.Tensor) -> int:
    """How many blocks of `x` `[kv_heads, n, block_size, dim]` to work on at once."""
    heads, blocks, tokens, dim = x.shape
    if x.device.type != "cpu":
        return blocks
    return min(blocks, max(1, _PIECE_ELEMENTS // max(1, heads * tokens * dim)))


def pieces(x: torch.Tensor) -> Iterator[slice]:
    """Slices of dimension 1 of `x`, each of `piece_blocks(x)` blocks or fewer."""
    blocks = x.shape[1]
    for start in range(0, blocks, max(1, piece_blocks(x))):
        yield slice(start, min(start + piece_blocks(x), blocks))


def scratch(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Uninitialised room for a piece of `x`, to be reused: fresh memory costs more than the arithmetic done in it."""
    heads, _, tokens, dim = x.shape
    return torch.empty((heads, piece_blocks(x), tokens, dim), dtype=dtype, device=x.device)


def storable_scale(scale: torch.Tensor, least: float = SMALLEST_NORMAL) -> tuple[torch.Tensor, torch.Tensor]:
    """Round scales to what is stored, and invert that.

    Args:
        scale: fp32, non-negative.
        least: what is not above it is stored as 0; at least the smallest normal number, whose inverse is finite.

    Returns:
        the scale as stored, and the inverse in fp32 of what is stored. Products with the inverse of 0, infinity or NaN
        are for `finite_codes_` to settle.
    """
    stored = functional.threshold(scale, least, 0.0).to(SCALE_DTYPE)
    return stored, stored.float().reciprocal_()


def finite_codes_(scaled: torch.Tensor) -> torch.Tensor:
    """Set what is not finite to 0, in place: its conversion to a code would differ between machines.

    Its group's scale is 0, infinite or NaN then, and decides alone what is decoded.
    """
    return scaled.nan_to_num_(0.0, posinf=0.0, neginf=0.0)


def widened_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """What float8_e4m3fn `codes`, finite, stand for times `E4M3_WIDENED_UNIT`, exactly, in fp16."""
    # A code moved to the top of an fp16 is the same number times 2^-8 (the exponents' biases are 7 and 15), subnormals
    # included. Widening by integer arithmetic is vectorised everywhere; conversion of e4m3 is not.
    wide = codes.view(torch.int8).to(torch.int16)
    wide.bitwise_left_shift_(7).bitwise_and_(~0x4000)  # clears the second copy of the sign
    return wide.view(torch.float16)


def round_into(values: torch.Tensor, target: torch.Tensor) -> None:
    """Copy decoded fp32 `values` to `target` of another dtype; may overwrite `values`."""
    if target.dtype == torch.float16:
        # Within the error of the codec, what is near the largest fp16 would round to infinity.
        largest = torch.finfo(torch.float16).max
        values.clamp_(-largest, largest)
    target.copy_(values)
