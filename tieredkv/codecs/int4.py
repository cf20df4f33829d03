"""Four bits per element in groups of 16, each with its own scale and centre in one byte each.

Imports: block, base.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tieredkv.block import LayerGeometry, Plane, Planes
from tieredkv.codecs.base import (
    E4M3_WIDENED_UNIT,
    SCALE_DTYPE,
    SMALLEST_NORMAL,
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

_LARGEST_GROUP = 16
_SMALLEST_GROUP = 8
# Codes 0 .. 15 stand for -7.5 .. 7.5 steps from the centre: both ends of the group's range are codes.
_HALF_RANGE = 7.5

_SCALE_CODE = torch.float8_e4m3fn
_LARGEST_SCALE_CODE, _LEAST_SCALE_CODE = 448.0, 2.0**-6
# Below it the least scale would be subnormal, and its inverse infinite.
_LEAST_SCALE_UNIT = SMALLEST_NORMAL / _LEAST_SCALE_CODE
_LARGEST_CENTRE_CODE = 127.0

# The dimension along which a group lies, in [kv_heads, n, token groups, group, dim] and [.., tokens, groups, group].
_K_GROUP_DIM, _V_GROUP_DIM = 3, 4
# The dimensions over which groups share the unit of their centres: all of a channel for K, all of the block for V.
_K_CENTRE_SPAN, _V_CENTRE_SPAN = (2, 3), (2, 3, 4)
_BLOCK_SPAN = (2, 3, 4)


def group_size(length: int) -> int:
    """The group along a dimension of `length`: its largest divisor up to 16, or all of it if that is under 8."""
    divisor = next(size for size in range(min(_LARGEST_GROUP, length), 0, -1) if length % size == 0)
    return divisor if divisor >= _SMALLEST_GROUP else length


class Int4Codec(Codec):
    """Codes 0..15 in groups with a scale and a centre: `x' = centre + (code - 7.5) * scale`.

    A group is 16 neighbouring tokens of one channel for K, and 16 neighbouring elements of one token for V (where 16
    does not divide the dim: `group_size`): the values of a token on which much attention rests may be far smaller than
    its neighbours', and must not share their scale. A group's scale is an e4m3 number, in units of 1/448 of the largest
    scale of its head in the block; its centre an int8, in units of 1/127 of the largest centre, of its channel in the
    block for K, of its head in the block for V.

    Planes: "k" and "v" `[block_size / 2, dim]` uint8, the first half of the block's tokens in the low four bits, the
    second half in the high ones; "k_scale" `[2, block_size / 16, k_dim]` uint8 (bits of the scales, then of the
    centres; k_dim padded with zeros to a multiple of 8) and "v_scale" `[2, block_size, v_dim / group]`; "k_unit"
    `[k_dim]` bf16, the units of K's centres (padded to a multiple of 4); "unit" `[4]` bf16, those of K's scales, V's
    scales and V's centres, and a zero.

    Error, with `scale` that of the group: `|x - x'| <= scale * (1/2 + 2^-12) + 2^-21 * largest magnitude of the group`,
    and one rounding to output dtypes other than fp32. The scale is at most 17/240 of (the group's range + 1.04 units
    of its centre), or, where that is more, 2^-6 units. Where all scales of a head's block are below 448 * 2^-120, `x'`
    is the centre. Centres that are all below 127 * 2^-126 are stored as 0: take 2^-118 for their unit here.

    One NaN or infinity makes all of its head's block NaN.
    """

    name = "int4"
    lossless = False

    def planes(self, geometry: LayerGeometry, block_size: int) -> tuple[Plane, ...]:
        check_block_size(block_size)
        heads, k_dim, v_dim = geometry.kv_heads, geometry.k_dim, geometry.v_dim
        k_groups, v_groups = block_size // group_size(block_size), v_dim // group_size(v_dim)
        return (
            Plane("k", torch.uint8, heads, (block_size // 2, k_dim)),
            Plane("v", torch.uint8, heads, (block_size // 2, v_dim)),
            Plane("k_scale", torch.uint8, heads, (2, k_groups, pad_to_words(k_dim, torch.uint8))),
            Plane("v_scale", torch.uint8, heads, (2, block_size, v_groups)),
            Plane("k_unit", SCALE_DTYPE, heads, (pad_to_words(k_dim, SCALE_DTYPE),)),
            Plane("unit", SCALE_DTYPE, heads, (4,)),
        )

    def encode(self, k: torch.Tensor, v: torch.Tensor) -> Planes:
        check_same_blocks(k, v)
        geometry = LayerGeometry(k.shape[0], k.shape[3], v.shape[3], k.dtype)
        planes = tuple(
            torch.zeros((k.shape[0], k.shape[1], *plane.inner), dtype=plane.dtype, device=k.device)
            for plane in self.planes(geometry, k.shape[2])
        )
        k_half, v_half = _halves(planes)
        _encode_half(k, k_half)
        _encode_half(v, v_half)
        return planes

    def decode(self, planes: Planes, k_out: torch.Tensor, v_out: torch.Tensor) -> None:
        k_half, v_half = _halves(planes)
        _decode_half(k_half, k_out)
        _decode_half(v_half, v_out)


class _Half(NamedTuple):
    """The planes of K or of V, as views: scales and centres have size 1 in the groups' dimension, units in theirs."""

    codes: torch.Tensor  # [kv_heads, n, block_size / 2, dim] uint8
    scale: torch.Tensor  # e4m3
    centre: torch.Tensor  # int8
    scale_unit: torch.Tensor  # [kv_heads, n, 1, 1, 1] bf16
    centre_unit: torch.Tensor  # bf16
    group_dim: int
    centre_span: tuple[int, ...]


def _halves(planes: Planes) -> tuple[_Half, _Half]:
    k_codes, v_codes, k_scale, v_scale, k_unit, unit = planes
    k_dim = k_codes.shape[-1]
    units = unit[:, :, :, None, None, None].unbind(2)  # each [kv_heads, n, 1, 1, 1]
    k_scale = k_scale[..., :k_dim].unsqueeze(_K_GROUP_DIM + 1)
    v_scale = v_scale.unsqueeze(_V_GROUP_DIM + 1)
    k_centre_unit = k_unit[:, :, None, None, :k_dim]
    return (
        _Half(k_codes, *_bytes_of(k_scale), units[0], k_centre_unit, _K_GROUP_DIM, _K_CENTRE_SPAN),
        _Half(v_codes, *_bytes_of(v_scale), units[1], units[2], _V_GROUP_DIM, _V_CENTRE_SPAN),
    )


def _bytes_of(scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales, centres = scale.unbind(2)
    return scales.view(_SCALE_CODE), centres.view(torch.int8)


def _grouped(x: torch.Tensor, group_dim: int) -> torch.Tensor:
    """`x` `[kv_heads, n, tokens, dim]` as a view with groups in dimension `group_dim`."""
    split = group_dim - 1
    size = group_size(x.shape[split])
    return x.view(*x.shape[:split], x.shape[split] // size, size, *x.shape[split + 1 :])


def _ends(groups: torch.Tensor, group_dim: int, room: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest and the smallest of each group; overwrites `room`, which has the shape of all blocks."""
    if group_dim == _K_GROUP_DIM:
        return groups.amax(group_dim, keepdim=True), groups.amin(group_dim, keepdim=True)
    # Over neighbours in memory a reduction is not vectorised: a transposed copy and two fast ones take half the time.
    turned = groups.permute(0, 1, 3, 4, 2)  # [kv_heads, n, groups, group, tokens]
    across = room.view(turned.shape).copy_(turned)
    high, low = (ends.transpose(2, 3).contiguous().unsqueeze(-1) for ends in (across.amax(3), across.amin(3)))
    return high, low


def _choose(groups: torch.Tensor, half: _Half, piece: slice, room: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Store scales and centres for some blocks; (the stored centres, the inverse of the stored scales), in fp32."""
    high, low = _ends(groups, half.group_dim, room)
    middle = high * 0.5 + low * 0.5
    unit, inverse = storable_scale(middle.abs().amax(half.centre_span, keepdim=True) / _LARGEST_CENTRE_CODE)
    codes = finite_codes_((middle * inverse).round_()).clamp_(-_LARGEST_CENTRE_CODE, _LARGEST_CENTRE_CODE)
    centre = codes * unit.float()
    half.centre_unit[:, piece], half.centre[:, piece] = unit, codes.to(torch.int8)

    scale = torch.maximum(high - centre, centre - low) / _HALF_RANGE
    unit, inverse = storable_scale(scale.amax(_BLOCK_SPAN, keepdim=True) / _LARGEST_SCALE_CODE, _LEAST_SCALE_UNIT)
    # Rounding to an e4m3 that is not subnormal shrinks a scale by 1/17 at most: the ends of the range still round to
    # the last codes, and nothing has to be clamped.
    codes = finite_codes_(scale * inverse).clamp_(_LEAST_SCALE_CODE, _LARGEST_SCALE_CODE).to(_SCALE_CODE)
    half.scale_unit[:, piece], half.scale[:, piece] = unit, codes
    return centre, widened_e4m3(codes).float().mul_(unit.float() / E4M3_WIDENED_UNIT).reciprocal_()


def _encode_half(x: torch.Tensor, half: _Half) -> None:
    tokens = x.shape[2]
    room = scratch(x, torch.float32)
    for piece in pieces(x):
        groups = _grouped(x[:, piece].float(), half.group_dim)
        steps = room[:, : groups.shape[1]]
        centre, inverse = _choose(groups, half, piece, steps)
        torch.sub(groups, centre, out=_grouped(steps, half.group_dim))
        _grouped(steps, half.group_dim).mul_(inverse)
        finite_codes_(steps.add_(_HALF_RANGE).round_())
        # Packed as numbers up to 255, exact in fp32: that needs no integer copy of the steps.
        half.codes[:, piece] = steps[:, :, : tokens // 2].add_(steps[:, :, tokens // 2 :], alpha=16)


def _decode_half(half: _Half, out: torch.Tensor) -> None:
    tokens = out.shape[2] // 2
    step = widened_e4m3(half.scale).float().mul_(half.scale_unit.float() / E4M3_WIDENED_UNIT)
    centre = half.centre.float() * half.centre_unit.float()
    room = scratch(out, torch.float32) if out.dtype != torch.float32 else out
    for piece in pieces(out):
        target = out[:, piece]
        values = target if room is out else room[:, : target.shape[1]]
        values[:, :, :tokens] = half.codes[:, piece] & 15
        values[:, :, tokens:] = half.codes[:, piece] >> 4
        _grouped(values.sub_(_HALF_RANGE), half.group_dim).mul_(step[:, piece]).add_(centre[:, piece])
        if room is not out:
            round_into(values, target)
