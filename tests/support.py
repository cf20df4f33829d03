"""What the tests of the whole cache share: tiny models, cache-free logits to hold against, small caches, and an audit.

Tiny random models repeat themselves, so tokens hide errors: compare logits. Weights are scaled up, since attention
over nearly equal keys hides errors too.

Imports: tieredkv, torch, transformers.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

import tieredkv
from tieredkv.store import BlockStore

VOCABULARY = 97
TOLERANCE = 1e-5
"""The most that fp32 logits may differ, as a share of the largest logit."""

DIM = 16
"""Of the small models' heads: the native kernel serves multiples of 16, and leaves others to the partials."""
UNSERVED_DIM = 8

BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": DIM,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "initializer_range": 0.4,
}
_SLIDING = {"sliding_window": 8}
_SMALL = {k: BASE[k] for k in ("vocab_size", "hidden_size", "pad_token_id", "eos_token_id")}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", BASE),
    "mistral": ("Mistral", BASE | _SLIDING),
    "gemma3": ("Gemma3", BASE | _SLIDING | {"layer_types": ["sliding_attention", "full_attention"]}),
    "gemma2": (
        "Gemma2",
        BASE
        | _SLIDING
        | {
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 8,
            # Transformers' SDPA ignores the softcap in 5.17, and refuses it in 5.24: only eager is a reference.
            "attn_implementation": "eager",
        },
    ),
    "gemma3n": (
        "Gemma3n",
        BASE
        | _SLIDING
        | {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 8,
            "activation_sparsity_pattern": [0.0] * 4,
            "laurel_rank": 4,
            "altup_num_inputs": 2,
        },
    ),
    "gptoss": (
        "GptOss",
        BASE
        | _SLIDING
        | {
            "layer_types": ["full_attention", "sliding_attention"],
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
        },
    ),
    "mla": (
        "DeepseekV3",
        _SMALL
        | {
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 24,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 16,
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "bloom": ("Bloom", _SMALL | {"n_layer": 2, "n_head": 4}),
    "qwen3next": (
        "Qwen3Next",
        BASE
        | {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "decoder_sparse_step": 1,
        },
    ),
}


class Attention(torch.nn.Module):
    """What the attention function asks of a module."""

    num_key_value_groups = 2
    is_causal = True


def config_of(name: str, **changes: Any) -> Any:
    """A new config of one of MODELS, with other values where asked for."""
    family, values = MODELS[name]
    kind = f"{family}TextConfig" if name in ("gemma3", "gemma3n") else f"{family}Config"
    return getattr(transformers, kind)(**{**values, **changes})


def tiny(name: str = "llama", *, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """A new model of two layers, in eval mode; the same weights each time."""
    torch.manual_seed(0)
    model: PreTrainedModel = getattr(transformers, f"{MODELS[name][0]}ForCausalLM")(config_of(name, **changes)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1 and weight.std() < 0.1:
                weight.mul_(8)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.to(dtype)


@functools.lru_cache(maxsize=32)
def _reference(name: str, dtype: torch.dtype, changes: tuple[tuple[str, Any], ...]) -> PreTrainedModel:
    return tiny(name, dtype=dtype, **dict(changes))


def tokens(count: int, rows: int = 1, seed: int = 1) -> torch.Tensor:
    """Random token ids, [rows, count]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (rows, count), generator=generator)


@torch.no_grad()
def oracle(
    ids: torch.Tensor,
    name: str = "llama",
    *,
    mask: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> torch.Tensor:
    """Logits [rows, tokens, vocabulary] of a forward without any cache, by a model of its own."""
    keywords: dict[str, Any] = {}
    if mask is not None:
        keywords["attention_mask"] = mask
        if mask.dim() == 2:
            keywords["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    model = _reference(name, dtype, tuple(sorted(changes.items())))
    return model(ids, use_cache=False, **keywords).logits


def difference(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference as a share of the largest wanted value; infinite where a value is not a number."""
    assert got.shape == wanted.shape, (got.shape, wanted.shape)
    if not got.numel():
        return 0.0
    if not bool(got.isfinite().all()):
        return float("inf")
    return float((got.double() - wanted.double()).abs().max() / wanted.double().abs().max())


def assert_close(got: torch.Tensor, wanted: torch.Tensor, what: str = "", tolerance: float = TOLERANCE) -> None:
    """Logits equal to rounding."""
    found = difference(got, wanted)
    assert found <= tolerance, f"{what} differs by {found:.3g} of the largest logit"


@torch.no_grad()
def feed(model: PreTrainedModel, ids: torch.Tensor, cache: Any, pieces: Iterable[int] = (), **keywords: Any) -> Any:
    """Logits of all tokens, given to a cache in pieces of these sizes; what is left comes as the last piece."""
    borders = [min(at, ids.shape[1]) for at in itertools.accumulate(pieces, initial=0)] + [ids.shape[1]]
    parts = [
        model(ids[:, first:last], past_key_values=cache, **keywords).logits
        for first, last in itertools.pairwise(borders)
        if last > first
    ]
    return torch.cat(parts, 1) if parts else torch.empty(ids.shape[0], 0, VOCABULARY, dtype=model.dtype)


def generate(model: PreTrainedModel, ids: torch.Tensor, cache: Any, new: int = 8, **keywords: Any) -> Any:
    """Greedy generation that also returns the logits of each new token."""
    return model.generate(
        ids,
        past_key_values=cache,
        max_new_tokens=new,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **keywords,
    )


def assert_generated(out: Any, prompt: int, name: str = "llama", mask: torch.Tensor | None = None) -> None:
    """Every produced logit equals the cache-free one on the same sequence."""
    ids = out.sequences
    if mask is not None:
        mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
    wanted = oracle(ids, name, mask=mask)
    for step, logits in enumerate(out.logits):
        assert_close(logits, wanted[:, prompt - 1 + step].float(), f"step {step}")


WAYS = ["blocks", "gather"]
"""How attention gets K and V."""


def of(model: Any, way: str) -> Any:
    """What a cache is given so that the model attends this way."""
    return model if way == "blocks" else model.config


SIZES: dict[str, Any] = {"hot": "96 tokens", "warm": "32 tokens", "block_size": 16, "window": 16}
"""Budgets that a few hundred tokens of a tiny model fill: five blocks for each row in hot, two in warm."""


def small(model: Any, cold: Path | tieredkv.ColdSettings | None, **changes: Any) -> tieredkv.TieredCache:
    """A cache in three tiers with tiny budgets (see SIZES)."""
    return tieredkv.TieredCache(model, **{**SIZES, "cold": cold, **changes})


def store_of(cache: tieredkv.TieredCache) -> BlockStore:
    """The store behind a cache that was used."""
    store = cache.parts().store
    assert store is not None
    return store


def at_rest(cache: tieredkv.TieredCache) -> tieredkv.TieredCache:
    """The cache once nothing is on its way; workers count a copy when it ends, so two figures need one moment."""
    store_of(cache).device.synchronize()
    return cache


def audit(*caches: tieredkv.TieredCache) -> None:
    """Slots, references and budgets of the caches' stores are right: no leak, no double use, nothing above budget."""
    for store in {id(s): s for c in caches if (s := c.parts().store) is not None}.values():
        audit_store(store)


def audit_store(store: BlockStore) -> None:
    """`audit` of one store."""
    with store.lock:
        store.wait_all()
        _audit_references(store)
        _audit_slots(store)
        _audit_budgets(store)
        _audit_tails(store)


def _audit_references(store: BlockStore) -> None:
    entries = Counter(b.id for holder in store.holders for row in holder.table for b in row)
    for holder in store.holders:
        for row in holder.table:
            for block in row:
                assert block.refs == entries[block.id], (block, entries[block.id])
                assert (block.location == "nowhere") == block.gone, block
            sealed = [block.sealed for block in row]
            assert sealed == sorted(sealed, reverse=True), "an unsealed block before a sealed one"


def _audit_slots(store: BlockStore) -> None:
    blocks = {b.id: b for holder in store.holders for row in holder.table for b in row}.values()
    for role, tier in store.tiers.items():
        slots = tier.slots
        assert slots.free + slots.live + slots.in_flight == slots.total, role
        used = [getattr(block, role) for block in blocks if getattr(block, role) is not None]
        assert len(used) == len(set(used)), f"two blocks in one slot of {role}"
        held = {slot for slot in range(slots.total) if slots.holds(slot)}
        assert held == set(used), f"{role}: slots {held ^ set(used)} are held by no block, or not held"
        assert slots.in_flight == 0, f"{role}: copies that ended are still in flight"


def _audit_budgets(store: BlockStore) -> None:
    budget = store.budget
    packed_bytes = 0 if store.packed is None else max(store.packed.peak_bytes, store.packed.reserved_bytes)
    assert store.hot.peak_bytes + budget.staging_bytes + packed_bytes <= budget.hot_bytes
    assert store.hot.reserved_bytes + budget.staging_bytes + packed_bytes <= budget.hot_bytes
    if store.warm is not None:
        assert max(store.warm.peak_bytes, store.warm.reserved_bytes) <= budget.warm_bytes
    if store.cold is not None and budget.cold_bytes is not None:
        assert store.cold.reserved_bytes <= budget.cold_bytes


def _audit_tails(store: BlockStore) -> None:
    """What lies behind a block's last token is no NaN: kernels multiply it by 0."""
    slots = [b.hot for holder in store.holders for row in holder.table for b in row if b.hot is not None]
    for planes in store.hot.planes:
        for plane in planes:
            assert not bool(plane[:, slots].isnan().any()), "a slot was used again without being cleaned"


def locations(cache: tieredkv.TieredCache) -> Sequence[str]:
    """The tier of each block, row by row."""
    tiered = cache.parts().tiered
    return [entry.location for entry in cache.block_table() if entry.layer_id == tiered[0]]


def greedy_answer(model: Any, ids: torch.Tensor, cache: Any, new_tokens: int) -> tuple[list[int], torch.Tensor]:
    """Tokens that `generate` adds to ids [1, tokens], and the logits of each, [new_tokens, vocabulary]."""
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=new_tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return out.sequences[0, ids.shape[1] :].tolist(), torch.cat(out.logits)
