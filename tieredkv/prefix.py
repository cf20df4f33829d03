"""The names of prefixes: a chain of SHA-256 over token ids, and the models whose K and V may not be looked up by them.

The hash of a block is that of the block before and its own token ids; that of the first block starts from a seed with
everything else that K and V depend on. So equal hashes mean equal tokens from position 0 on, under equal conditions.

Imports: errors, sizing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tieredkv.errors import TieredKVError
from tieredkv.sizing import kv_layers

_FORMAT = 1
_ROPE_OF_THE_LENGTH = ("dynamic", "longrope")
"""RoPE types whose angles at a position depend on how long the whole text is."""


def seed(fingerprint: str, *, block_size: int, codec: str, salt: str = "", start: int = 0) -> str:
    """Where a chain begins: everything but token ids that K and V of a causal model depend on.

    Args:
        fingerprint: of model, weights, dtype, RoPE settings and adapters.
        block_size: tokens of a block.
        codec: encoding of blocks below hot.
        salt: digest of the salt, "" for none.
        start: position of the first token.
    """
    fields = {
        "format": _FORMAT,
        "fingerprint": fingerprint,
        "block_size": block_size,
        "codec": codec,
        "salt": salt,
        "start": start,
        "mask": "causal",
    }
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def chain(ids: torch.Tensor, block_size: int, first: str) -> list[str]:
    """The hash of each full block of one row.

    Args:
        ids: token ids, int `[tokens]`, from position 0 on.
        block_size: tokens of a block.
        first: the seed.

    Returns:
        one hex SHA-256 for each full block.
    """
    data = ids.to("cpu", torch.int64).contiguous().numpy()
    hashes: list[str] = []
    before = first
    for index in range(len(data) // block_size):
        block = data[index * block_size : (index + 1) * block_size].astype("<i8").tobytes()
        before = hashlib.sha256(bytes.fromhex(before) + block).hexdigest()
        hashes.append(before)
    return hashes


def why_not_shared(config: Any) -> str | None:
    """Why K and V of this model are not a function of the token ids up to there and their positions, or None.

    Args:
        config: the model's config, with `get_text_config`.
    """
    text = config.get_text_config(decoder=True)
    for each in (config, text):
        if getattr(each, "is_encoder_decoder", False) or getattr(each, "add_cross_attention", False):
            return "the decoder attends to another sequence"
        for field in ("use_bidirectional_attention", "prefix_lm", "is_prefix_lm"):
            if getattr(each, field, None):
                return f"tokens attend to later ones ({field})"
        if getattr(each, "is_causal", True) is False:
            return "attention is not causal"
    for rope in _rope_types(text):
        if rope in _ROPE_OF_THE_LENGTH:
            return f"{rope} RoPE: K of a token depends on the length of the whole text"
    try:
        kinds = [layer.kind for layer in kv_layers(text)]
    except TieredKVError as failure:
        return failure.what
    for index, kind in enumerate(kinds):
        if kind not in ("full", "latent", "dummy"):
            return f"layer {index} ({kind} attention) keeps a state that is not stored by position"
    return None


def _rope_types(config: Any) -> Iterator[str]:
    """Every RoPE type that a config names, for all layers or by layer type."""
    for field in ("rope_parameters", "rope_scaling"):
        found = getattr(config, field, None)
        if not isinstance(found, Mapping):
            continue
        for part in (found, *found.values()):
            if isinstance(part, Mapping):
                yield from (str(part[name]) for name in ("rope_type", "type") if part.get(name) is not None)
