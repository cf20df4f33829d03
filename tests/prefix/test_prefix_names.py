"""The names of prefixes: equal exactly when everything that K and V depend on is equal."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from support import config_of, tiny, tokens

from tieredkv import prefix
from tieredkv.errors import UnsupportedModelError
from tieredkv.fingerprint import Fingerprint

SEED = prefix.seed("f" * 64, block_size=16, codec="raw")


@settings(max_examples=50)
@given(
    ids=st.lists(st.integers(0, 2**40), min_size=0, max_size=70),
    at=st.integers(0, 69),
    more=st.integers(1, 5),
)
def test_a_hash_covers_every_token_up_to_the_end_of_its_block_and_none_after(
    ids: list[int], at: int, more: int
) -> None:
    row = torch.tensor(ids, dtype=torch.int64)
    hashes = prefix.chain(row, 16, SEED)
    assert len(hashes) == len(ids) // 16
    assert len(set(hashes)) == len(hashes)
    if at < len(ids):
        changed = row.clone()
        changed[at] += more
        others = prefix.chain(changed, 16, SEED)
        assert others[: at // 16] == hashes[: at // 16]
        assert not set(others[at // 16 :]) & set(hashes)


def test_the_type_of_the_ids_does_not_matter() -> None:
    row = tokens(40)[0]
    assert prefix.chain(row.to(torch.int32), 16, SEED) == prefix.chain(row, 16, SEED)


@pytest.mark.parametrize(
    "change", [{"block_size": 32}, {"codec": "int8"}, {"salt": "ab"}, {"start": 1}, {"fingerprint": "e" * 64}]
)
def test_a_seed_is_one_of_everything(change: dict[str, object]) -> None:
    fields: dict[str, object] = {"fingerprint": "f" * 64, "block_size": 16, "codec": "raw"}
    first = {**fields, **change}
    name = first.pop("fingerprint")
    assert prefix.seed(name, **first) != SEED  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["llama", "mla", "bloom"])
def test_models_that_share(name: str) -> None:
    assert prefix.why_not_shared(config_of(name)) is None


@pytest.mark.parametrize(
    ("name", "word"),
    [("gemma3", "sliding"), ("gptoss", "sliding"), ("mistral", "sliding"), ("qwen3next", "linear")],
)
def test_layers_whose_state_is_not_stored_by_position(name: str, word: str) -> None:
    assert word in str(prefix.why_not_shared(config_of(name)))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_angles_that_depend_on_the_length(kind: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4} if kind == "longrope" else {}
    config = config_of("llama", rope_parameters=rope)
    assert kind in str(prefix.why_not_shared(config))
    # As one of several, by layer type.
    config.rope_parameters = {"full_attention": rope}
    assert kind in str(prefix.why_not_shared(config))


@pytest.mark.parametrize(
    ("field", "value"),
    [("is_causal", False), ("use_bidirectional_attention", "all"), ("add_cross_attention", True), ("prefix_lm", True)],
)
def test_tokens_that_see_more_than_what_is_before_them(field: str, value: object) -> None:
    config = config_of("llama")
    setattr(config, field, value)
    assert prefix.why_not_shared(config) is not None


# ---- fingerprints


def test_the_same_weights_have_the_same_fingerprint() -> None:
    model = tiny()
    mark = Fingerprint(model)
    assert mark.current() == mark.current() == Fingerprint(tiny()).current()
    model.set_attn_implementation("eager")
    assert Fingerprint(model).current() == mark.current()


@torch.no_grad()
@pytest.mark.parametrize("change", ["weight", "dtype", "rope", "data", "new tensor", "adapter", "buffer"])
def test_what_changes_a_fingerprint(change: str) -> None:
    model = tiny()
    mark = Fingerprint(model)
    before = mark.current()
    weight = model.model.layers[1].mlp.up_proj.weight
    if change == "weight":
        weight[3, 5] += 1e-3
    elif change == "dtype":
        model.to(torch.bfloat16)
    elif change == "rope":
        mark = Fingerprint(tiny(rope_parameters={"rope_type": "default", "rope_theta": 5e5}))
    elif change == "data":
        weight.data.mul_(1.001)
    elif change == "new tensor":
        model.model.layers[1].mlp.up_proj.weight = torch.nn.Parameter(weight * 1.001)
    elif change == "adapter":
        weight_module = model.model.layers[1].mlp.up_proj
        weight_module.active_adapters = ["first"]
    else:
        model.model.rotary_emb.inv_freq.mul_(1.01)
    assert mark.current() != before


@torch.no_grad()
def test_every_weight_counts() -> None:
    model = tiny()
    digests = {Fingerprint(model).current()}
    weight = model.model.layers[0].self_attn.k_proj.weight.view(-1)
    for index in torch.randperm(weight.numel(), generator=torch.Generator().manual_seed(3))[:20].tolist():
        weight[index] += 1
        digests.add(Fingerprint(model).current())
    assert len(digests) == 21


def test_weights_that_are_elsewhere_are_refused() -> None:
    model = tiny()
    model.lm_head.to("meta")
    with pytest.raises(UnsupportedModelError, match="memory"):
        Fingerprint(model).current()


def test_inside_held_the_model_is_looked_at_once() -> None:
    model = tiny()
    mark = Fingerprint(model)
    before = mark.current()
    with mark.held():
        with mark.held():
            assert mark.current() == before
        with torch.no_grad():
            model.lm_head.weight[0, 0] += 1
        assert mark.current() == before, "an inner `held` ends with its own end, not the outer one's"
    assert mark.current() != before
