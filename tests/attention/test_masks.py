"""`MaskSpec` against the masks that transformers makes, and as a stand-in for their tensors."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import masking_utils as stock

from tieredkv.attention.masks import MaskSpec, TensorMask
from tieredkv.attention.partials import dense

PADDINGS = {
    "none": None,
    "left": torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1]], dtype=torch.bool),
    "right": torch.tensor([[1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]], dtype=torch.bool),
    "short": torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 1, 1], [1, 1, 1, 1, 1]], dtype=torch.bool),
}
SEGMENTS = torch.tensor([[0, 0, 1, 1, 1, 2, 2], [0, 0, 0, 0, 0, 0, 0], [0, 1, 1, 1, 1, 1, 2]])
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal": stock.causal_mask_function,
    "sliding": stock.sliding_window_causal_mask_function(3),
    "chunked": stock.chunked_causal_mask_function(2, torch.tensor([1, 0, 2])),
    "packed": stock.and_masks(stock.causal_mask_function, stock.packed_sequence_mask_function(SEGMENTS)),
    "bidirectional": stock.bidirectional_mask_function,
}


def _arguments(function: str, padding: str, use_vmap: bool, past: int) -> dict[str, Any]:
    return {
        "batch_size": 3,
        "q_length": 7 - past,
        "kv_length": 7,
        "q_offset": past,
        "kv_offset": 0,
        "mask_function": FUNCTIONS[function],
        "attention_mask": PADDINGS[padding],
        "use_vmap": use_vmap,
    }


def _spec(
    function: str = "causal", padding: str = "none", use_vmap: bool = False, past: int = 0, dtype: Any = torch.float32
) -> MaskSpec:
    arguments = _arguments(function, padding, use_vmap, past)
    return MaskSpec(
        batch=arguments["batch_size"],
        q_length=arguments["q_length"],
        kv_length=arguments["kv_length"],
        q_offset=arguments["q_offset"],
        kv_offset=arguments["kv_offset"],
        mask_function=arguments["mask_function"],
        padding=arguments["attention_mask"],
        use_vmap=use_vmap,
        dtype=dtype,
        device=torch.device("cpu"),
        is_causal=function == "causal",
    )


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("use_vmap", [False, True])
@pytest.mark.parametrize("past", [0, 4, 6])
def test_equals_the_masks_of_transformers(function: str, padding: str, use_vmap: bool, past: int) -> None:
    spec = _spec(function, padding, use_vmap, past)
    arguments = _arguments(function, padding, use_vmap, past)
    expected = stock.sdpa_mask(**arguments, allow_is_causal_skip=False)
    assert expected is not None
    assert torch.equal(spec.materialise_bool(), expected)
    assert torch.equal(spec.materialise(), stock.eager_mask(**arguments))
    for positions in (torch.arange(2, 5), torch.tensor([6, 0])):
        assert torch.equal(spec.bias(positions), expected[..., positions])
    queries = torch.tensor([past])
    assert torch.equal(spec.visible(queries, torch.arange(7)), expected[:, :, :1])


@pytest.mark.parametrize(
    ("padding", "starts"), [("none", [0, 0, 0]), ("left", [2, 0, 1]), ("right", None), ("short", None)]
)
def test_row_starts_tell_padding_on_the_left_from_any_other(padding: str, starts: list[int] | None) -> None:
    assert _spec(padding=padding).row_starts() == starts


def test_padding_of_integers_and_padding_beyond_the_keys() -> None:
    wide = MaskSpec(
        batch=2,
        q_length=1,
        kv_length=2,
        q_offset=3,
        kv_offset=2,
        mask_function=stock.causal_mask_function,
        padding=torch.tensor([[0, 0, 0, 1, 0, 0], [0, 1, 1, 1, 0, 0]]),
        use_vmap=False,
        dtype=torch.float32,
        device=torch.device("cpu"),
        is_causal=True,
    )
    assert wide.row_starts() == [3, 1]
    assert torch.equal(wide.materialise_bool()[:, 0, 0], torch.tensor([[False, True], [True, True]]))


def test_stands_for_the_additive_tensor() -> None:
    spec = _spec(padding="left", dtype=torch.bfloat16)
    tensor = spec.materialise()
    scores = torch.randn(3, 4, 7, 7, dtype=torch.bfloat16)
    assert torch.equal(scores + spec, scores + tensor)
    assert torch.equal(spec + scores, scores + tensor)
    assert torch.equal(spec[:, :, :, :5], tensor[:, :, :, :5])
    assert torch.equal(torch.where(spec < 0, scores, 0.0), torch.where(tensor < 0, scores, 0.0))
    assert torch.equal(torch.cat([spec, spec], dim=1), torch.cat([tensor, tensor], dim=1))
    assert torch.equal(spec == 0, tensor == 0)
    assert torch.equal(spec.to(torch.float32), tensor.to(torch.float32))
    assert (spec.dtype, spec.device, spec.dim(), spec.shape, len(spec)) == (
        *(torch.bfloat16, torch.device("cpu"), 4, tensor.shape, 3),
    )
    q = torch.randn(3, 4, 7, 8, dtype=torch.bfloat16)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    assert torch.equal(sdpa(q, q, q, attn_mask=spec), sdpa(q, q, q, attn_mask=tensor))


def test_the_tensor_is_made_once_and_only_on_demand() -> None:
    calls = []

    def counting(b: Any, h: Any, q: Any, kv: Any) -> torch.Tensor:
        calls.append(1)
        return stock.causal_mask_function(b, h, q, kv)

    spec = _spec()
    object.__setattr__(spec, "mask_function", counting)
    assert spec.shape == (3, 1, 7, 7)
    assert spec.row_starts() == [0, 0, 0]
    assert not calls
    assert spec.materialise() is spec.materialise()
    assert spec.sdpa() is spec.materialise_bool()
    assert len(calls) == 1


def test_sdpa_is_what_transformers_would_hand_over() -> None:
    asked = []

    def no_mask() -> None:
        asked.append(1)

    spec = _spec()
    object.__setattr__(spec, "to_sdpa", no_mask)
    assert spec.sdpa() is None
    assert spec.sdpa() is None
    assert len(asked) == 1


def test_copies_and_pickles() -> None:
    spec = _spec(padding="left")
    for twin in (copy.copy(spec), copy.deepcopy(spec), pickle.loads(pickle.dumps(spec))):
        assert torch.equal(twin.materialise(), spec.materialise())
    assert spec in {spec}
    assert not hasattr(spec, "__array_interface__")


def test_queries_that_see_nothing_come_out_as_zero() -> None:
    spec = _spec(padding="left")
    q, k = torch.randn(3, 4, 7, 8), torch.randn(3, 2, 7, 8)
    out = dense(q, k, k, scale=1.0, causal=False, bias=spec.bias(torch.arange(7))).out
    assert not out[0, :, :2].any()
    assert not out.isnan().any()
    assert (out[0, :, 2:] != 0).all()


@pytest.mark.parametrize("hidden", [torch.finfo(torch.float32).min, -torch.inf])
def test_a_tensor_mask_is_read_by_columns(hidden: float) -> None:
    tensor = torch.randn(2, 1, 3, 9)
    tensor[:, :, 1] = hidden
    mask = TensorMask(tensor)
    assert mask.kv_length == 9
    columns = mask.bias(torch.arange(2, 6))
    assert (columns[:, :, 1] == -torch.inf).all()
    assert torch.equal(columns[:, :, 0], tensor[:, :, 0, 2:6])
    seen = torch.rand(1, 4, 3, 9) > 0.5
    assert torch.equal(TensorMask(seen).bias(torch.tensor([8, 1])), seen[..., [8, 1]])
