"""Codecs: what goes in comes out within the bound that the class states, in the same bits wherever it is encoded."""

from __future__ import annotations

import math

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from tieredkv.block import LayerGeometry, Planes
from tieredkv.codecs import CODEC_NAMES, get_codec
from tieredkv.codecs.int4 import group_size
from tieredkv.errors import ConfigError, MismatchError

LOSSY = ["fp8", "int8", "int4"]
DIMS = [1, 7, 8, 16, 24, 37, 40, 64, 80]


@st.composite
def blocks(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of some blocks: any shape, dtype and magnitude, channels of different scale and offset, some zeros."""
    heads, n = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    tokens = draw(st.sampled_from([16, 32, 48, 128]))
    dtype, largest = draw(
        st.sampled_from([(torch.float32, 37.0), (torch.bfloat16, 37.0), (torch.float16, 4.0), (torch.float32, 1.0)])
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    exponent = draw(st.floats(-largest - 3, largest))
    halves = []
    for dim in draw(st.tuples(st.sampled_from(DIMS), st.sampled_from(DIMS))):
        channels = torch.randn(dim, generator=generator).exp2()
        offsets = torch.randn(dim, generator=generator) * draw(st.sampled_from([0.0, 1.0, 30.0]))
        x = torch.randn(heads, n, tokens, dim, generator=generator) * channels + offsets
        x = x.clamp(-100, 100) / 100 * 10.0**exponent
        x[torch.rand(x.shape, generator=generator) < draw(st.sampled_from([0.0, 0.3, 1.0]))] = 0
        halves.append(x.to(dtype))
    return halves[0], halves[1]


def decoded(name: str, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype = torch.float32) -> Planes:
    codec = get_codec(name)
    k_out, v_out = torch.full_like(k, math.nan, dtype=dtype), torch.full_like(v, math.nan, dtype=dtype)
    codec.decode(codec.encode(k, v), k_out, v_out)
    return k_out, v_out


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def allowed_error(name: str, x: torch.Tensor, scale: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """The bound in the codec's docstring, for `x` and the scale and largest magnitude of each element's group."""
    if name == "int8":
        assert (scale <= largest / 127 * (1 + 2**-8)).all()
        return scale * (0.5 + 2**-14) + (scale == 0) * 127 * 2.0**-126
    if name == "fp8":
        assert (scale <= largest / 448 * (1 + 2**-8)).all()
        bound = torch.maximum(x.abs() * (2**-4 + 2**-20), scale * (2**-10 + 2**-20))
        return bound + (scale == 0) * 448 * 2.0**-126
    return scale * (0.5 + 2**-12) + 2**-21 * largest + (scale == 0) * 7.5 * 448 * 2.0**-120


@pytest.mark.parametrize("name", LOSSY)
@hypothesis.settings(max_examples=30)
@hypothesis.given(kv=blocks())
def test_error_stays_within_the_stated_bound(name: str, kv: tuple[torch.Tensor, torch.Tensor]) -> None:
    check_bound(name, kv)


def check_bound(name: str, kv: tuple[torch.Tensor, torch.Tensor]) -> None:
    planes = get_codec(name).encode(*kv)
    for x, y, dim in zip(kv, decoded(name, *kv), (2, 3), strict=True):
        x = x.double()
        if name == "int4":
            scale, most, largest = int4_groups(planes, x, dim)
            assert (scale <= most * (1 + 2**-18) + 2.0**-130).all()
        else:
            scale = planes[dim].double()
            scale = (scale[..., : x.shape[3]] if dim == 2 else scale).unsqueeze(dim)
            largest = x.abs().amax(dim, keepdim=True)
        assert ((x - y.double()).abs() <= allowed_error(name, x, scale, largest)).all()


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("exponent", range(-40, -29))
def test_the_bound_holds_where_scales_and_their_inverses_leave_the_normal_range(name: str, exponent: int) -> None:
    """int4's least scale had an infinite inverse below 2^-128: all codes of the group became 0."""
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        halves = []
        for dim in (24, 16):
            channels = (torch.randn(dim, generator=generator) * (1, 3, 6)[seed % 3]).exp2()
            offsets = torch.randn(dim, generator=generator) * (0.0, 1.0, 30.0)[seed // 3 % 3]
            x = torch.randn(1, 2, 32, dim, generator=generator) * channels + offsets
            x[torch.rand(x.shape, generator=generator) < (0.0, 0.3)[seed % 2]] = 0
            halves.append(x.clamp(-100, 100) * 10.0**exponent)
        check_bound(name, (halves[0], halves[1]))


def int4_groups(planes: Planes, x: torch.Tensor, dim: int) -> Planes:
    """For each element the scale of its group, the most it may be, and the group's largest magnitude."""
    codes = planes[dim][..., : x.shape[3]] if dim == 2 else planes[dim]
    scale = codes[:, :, 0].contiguous().view(torch.float8_e4m3fn).double()
    unit = planes[5].double()[:, :, :, None, None]
    scale_unit = unit[:, :, dim - 2]
    centre_unit = planes[4].double()[:, :, None, : x.shape[3]] if dim == 2 else unit[:, :, 2]
    size = group_size(x.shape[dim])
    groups = torch.unflatten(x, dim, (-1, size))
    low, high = groups.amin(dim + 1), groups.amax(dim + 1)
    centre_unit = centre_unit + (centre_unit == 0) * 2.0**-118
    most = torch.maximum(17 / 240 * (high - low + 1.04 * centre_unit), 2**-6 * scale_unit)
    parts = scale * scale_unit, most, torch.maximum(high, -low)
    spread = [part.repeat_interleave(size, dim) for part in parts]
    return spread[0], spread[1], spread[2]


@pytest.mark.parametrize("name", LOSSY)
@hypothesis.settings(max_examples=12)
@hypothesis.given(kv=blocks(), dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float64]))
def test_other_output_dtypes_are_rounded_once(
    name: str, kv: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype
) -> None:
    for exact, rounded in zip(decoded(name, *kv), decoded(name, *kv, dtype), strict=True):
        limit = torch.finfo(torch.float16).max if dtype == torch.float16 else math.inf
        assert torch.equal(exact.clamp(-limit, limit).to(dtype), rounded)


@pytest.mark.parametrize("name", CODEC_NAMES)
@hypothesis.settings(max_examples=12)
@hypothesis.given(kv=blocks())
def test_planes_are_as_declared_and_whole_words(name: str, kv: tuple[torch.Tensor, torch.Tensor]) -> None:
    k, v = kv
    geometry = LayerGeometry(k.shape[0], k.shape[3], v.shape[3], k.dtype)
    declared, codec = get_codec(name).planes(geometry, k.shape[2]), get_codec(name)
    for plane, tensor in zip(declared, codec.encode(k, v), strict=True):
        assert tensor.shape == (plane.kv_heads, k.shape[1], *plane.inner) and tensor.dtype == plane.dtype
        assert plane.block_bytes % (8 * plane.kv_heads) == 0
    assert codec.block_bytes(geometry, k.shape[2]) == sum(plane.block_bytes for plane in declared)
    assert [plane.name for plane in declared[:2]] == ["k", "v"]


@pytest.mark.parametrize("name", CODEC_NAMES)
@hypothesis.settings(max_examples=12)
@hypothesis.given(kv=blocks())
def test_bits_depend_on_the_block_alone(name: str, kv: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Not on its neighbours, not on strides; and each decodes by itself into any layout."""
    codec, (k, v) = get_codec(name), kv
    together = codec.encode(k, v)
    # Tokens outermost: no two elements of a token's channel are neighbours.
    scattered = [x.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3) for x in kv]
    for plane, other in zip(together, codec.encode(scattered[0], scattered[1]), strict=True):
        assert torch.equal(bits(plane), bits(other))
    k_out, v_out = decoded(name, k, v)
    for i in range(k.shape[1]):
        alone = codec.encode(k[:, i : i + 1], v[:, i : i + 1])
        for plane, other in zip(together, alone, strict=True):
            assert torch.equal(bits(plane[:, i : i + 1]), bits(other))
    wide = [torch.zeros(2, *x.shape[:3], x.shape[3] + 3)[1, ..., : x.shape[3]] for x in kv]
    codec.decode(together, wide[0], wide[1])
    assert torch.equal(wide[0], k_out) and torch.equal(wide[1], v_out)


@pytest.mark.parametrize("name", LOSSY)
def test_signs_of_zeros_do_not_depend_on_strides(name: str) -> None:
    """Of -0 and +0 either may be found as the largest, depending on the order in which they are visited."""
    codec, x = get_codec(name), torch.where(torch.randn(2, 40, 32, 64) < 0, -0.0, 0.0)
    scattered = x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    for plane, other in zip(codec.encode(x, x), codec.encode(scattered, scattered), strict=True):
        assert torch.equal(bits(plane), bits(other))


@pytest.mark.parametrize("name", LOSSY)
def test_more_blocks_than_fit_in_cache(name: str) -> None:
    """Work in several pieces, the last of them smaller, gives the bits of block by block."""
    codec, k, v = get_codec(name), torch.randn(3, 50, 128, 64), torch.randn(3, 50, 128, 64)
    alone = [codec.encode(k[:, i : i + 1], v[:, i : i + 1]) for i in range(50)]
    for plane, one_by_one in zip(codec.encode(k, v), zip(*alone, strict=True), strict=True):
        assert torch.equal(bits(plane), bits(torch.cat(one_by_one, 1)))
    for dtype in (torch.float32, torch.bfloat16):
        whole = decoded(name, k, v, dtype)
        parts = [decoded(name, k[:, i : i + 1], v[:, i : i + 1], dtype) for i in range(50)]
        assert torch.equal(whole[0], torch.cat([part[0] for part in parts], 1))
        assert torch.equal(whole[1], torch.cat([part[1] for part in parts], 1))


@pytest.mark.parametrize(("name", "most"), [("raw", 1.0), ("fp8", 0.52), ("int8", 0.54), ("int4", 0.32)])
def test_ratio_of_bytes(name: str, most: float) -> None:
    geometry = LayerGeometry(kv_heads=3, k_dim=64, v_dim=64, dtype=torch.bfloat16)
    assert get_codec(name).block_bytes(geometry, 128) / geometry.block_bytes(128) <= most


@pytest.mark.parametrize("name", LOSSY)
def test_zeros_are_exact(name: str) -> None:
    for out in decoded(name, torch.zeros(2, 2, 16, 8), torch.zeros(2, 2, 16, 24)):
        assert (out == 0).all()


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize(("dtype", "largest"), [(torch.float32, 2.0**127), (torch.float16, 65504.0)])
def test_largest_numbers_stay_finite(name: str, dtype: torch.dtype, largest: float) -> None:
    x = torch.randn(1, 2, 32, 64).clamp(-1, 1).mul(largest).to(dtype)
    for out in decoded(name, x, x, dtype):
        assert out.isfinite().all()


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_makes_its_own_group_nan_and_no_other(name: str, bad: float) -> None:
    """A channel of K and a token of V; with int4, whose groups share units, a head's block."""
    k, v = torch.randn(2, 2, 32, 64), torch.randn(2, 2, 32, 64)
    k_clean, v_clean = decoded(name, k, v)
    k_bad, v_bad = k.clone(), v.clone()
    k_bad[1, 0, 5, 7] = v_bad[1, 0, 5, 7] = bad
    k_out, v_out = decoded(name, k_bad, v_bad)
    k_group, v_group = torch.zeros_like(k, dtype=torch.bool), torch.zeros_like(v, dtype=torch.bool)
    k_group[1, 0, :, slice(None) if name == "int4" else 7] = True
    v_group[1, 0, slice(None) if name == "int4" else 5] = True
    for out, clean, group in ((k_out, k_clean, k_group), (v_out, v_clean, v_group)):
        assert torch.equal(out.isnan(), group)
        assert torch.equal(out[~group], clean[~group])
    codes = get_codec(name).encode(k_bad, v_bad)[:2]
    for one, other in zip(codes, get_codec(name).encode(k_bad[1:, :1], v_bad[1:, :1])[:2], strict=True):
        assert torch.equal(bits(one[1:, :1]), bits(other))


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_no_blocks(name: str) -> None:
    codec, k, v = get_codec(name), torch.empty(2, 0, 16, 8), torch.empty(2, 0, 16, 24)
    planes = codec.encode(k, v)
    assert all(plane.shape[1] == 0 for plane in planes)
    codec.decode(planes, k, v)


def test_fp8_decodes_every_code_as_torch_does() -> None:
    """The widening by bits against torch's own conversion, for all finite codes."""
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    codes = every[every.float().isfinite()].repeat(8)[: 16 * 126].view(1, 1, 16, 126)
    one = torch.ones(1, 1, 128, dtype=torch.bfloat16)
    out = torch.empty(1, 1, 16, 126), torch.empty(1, 1, 16, 126)
    get_codec("fp8").decode((codes, codes, one, one[..., :16]), *out)
    for values in out:
        assert torch.equal(values, codes.float())
        assert torch.equal(values.signbit(), codes.float().signbit())


def test_raw_is_the_tensors_themselves() -> None:
    codec, k, v = get_codec("raw"), torch.randn(2, 3, 16, 8), torch.randn(2, 3, 16, 24)
    k[0, 0, 0, :3] = torch.tensor([math.nan, math.inf, -0.0])
    planes = codec.encode(k, v)
    assert planes[0] is k and planes[1] is v
    for out, x in zip(decoded("raw", k, v), (k, v), strict=True):
        assert torch.equal(bits(out), bits(x))


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_names_and_refusals(name: str) -> None:
    codec = get_codec(name)
    assert codec.name == name and codec.lossless == (name == "raw")
    with pytest.raises(ConfigError, match="multiple of 16"):
        codec.planes(LayerGeometry(2, 8, 8, torch.float32), 24)
    with pytest.raises(ConfigError, match="multiple of 16"):
        codec.encode(torch.zeros(1, 1, 8, 8), torch.zeros(1, 1, 8, 8))
    with pytest.raises(MismatchError, match="same blocks"):
        codec.encode(torch.zeros(1, 2, 16, 8), torch.zeros(1, 1, 16, 8))


def test_unknown_name_lists_the_known() -> None:
    with pytest.raises(ConfigError, match="'raw', 'fp8', 'int8', 'int4'"):
        get_codec("int3")
