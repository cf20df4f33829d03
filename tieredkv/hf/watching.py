"""Which token ids a cache's forwards wrote, as a hook on the model sees them.

A cache is given K and V, never ids. Blocks may be looked up by ids only if these are known to be what the K and V were
computed from: every forward's own ids, at consecutive positions from 0 on, with nothing masked and no other input.
The hook is torch's (`register_forward_pre_hook`); a model called in a way that passes it by is simply not known.

Imports: forwarding, rates; transformers' cache classes through this package.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from tieredkv.hf.forwarding import Forwarding
from tieredkv.hf.rates import Rates

_HARMLESS = frozenset(
    {
        "attention_mask",
        "cache",
        "cache_position",
        "input_ids",
        "labels",
        "logits_to_keep",
        "past_key_values",
        "position_ids",
    }
)
"""Keywords whose tensors are looked at, or say nothing of K and V; any other tensor is an input that is not a token."""

_LATE = 64
"""So many forwards' ids are put in their place together."""


class TokenWatch:
    """Token ids of each row of one cache, as far as they are known.

    Args:
        seed: digest of what else K and V depend on, when the cache was made.
        salt: digest of the salt.
        rates: where the seconds of prefills are noted.
        ids: `[rows, tokens]`, ids of the blocks that the cache begins with.
    """

    def __init__(self, seed: str, salt: str, rates: Rates, ids: torch.Tensor) -> None:
        self.seed, self.salt, self.rates = seed, salt, rates
        self._ids, self._tokens = ids.detach().clone(), ids.shape[1]
        self._late: list[torch.Tensor] = []  # what follows `_ids`, put there when somebody looks: one token is little
        self._proofs: list[tuple[int, torch.Tensor]] = []  # (first token, 0-dim bool on the device: looked at late)
        self.started = 0.0

    def saw(self, past: int, ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor | None) -> None:
        """A forward begins.

        Args:
            past: tokens of each row before it.
            ids: its token ids, `[rows, new]`.
            mask: 2-D mask of all tokens, or None.
            positions: `[rows or 1, new]`, or None.
        """
        self.crop(past)
        if not past:
            self._ids, self._late = ids.new_empty((ids.shape[0], 0)), []
        if self._tokens != past or ids.shape[0] != self._ids.shape[0]:
            return  # tokens came in between that nobody saw
        total = past + ids.shape[1]
        if mask is not None and (mask.dim() != 2 or mask.shape[1] != total):
            return
        if positions is not None and positions.shape[1:] != ids.shape[1:]:
            return
        if mask is not None:
            self._proofs.append((past, (mask != 0).all()))
        if positions is not None:
            wanted = torch.arange(past, total, device=positions.device)
            self._proofs.append((past, (positions == wanted).all()))
        self._append(ids)

    def crop(self, tokens: int) -> None:
        """The cache holds `tokens` tokens of each row at most."""
        if tokens < self._tokens:
            self._settle()
            self._tokens = tokens
            self._proofs = [proof for proof in self._proofs if proof[0] < tokens]

    @torch.inference_mode(False)
    def select(self, rows: Sequence[int]) -> None:
        """Rows were reordered, repeated or dropped."""
        self._settle()
        self._ids = self._ids[list(rows)]

    def fork(self) -> TokenWatch:
        """The same for a copy of the cache."""
        self._settle()
        twin = TokenWatch(self.seed, self.salt, self.rates, self._ids[:, : self._tokens])
        twin._proofs = list(self._proofs)
        return twin

    def known(self) -> torch.Tensor:
        """Token ids `[rows, tokens]` on the CPU, of as many leading tokens as are known beyond doubt."""
        doubtful = [first for first, proof in self._proofs if not bool(proof)]
        self.crop(min(doubtful, default=self._tokens))
        self._proofs = []
        self._settle()
        return self._ids[:, : self._tokens].to("cpu", torch.int64)

    def _append(self, ids: torch.Tensor) -> None:
        if self._late and self._late[-1].device != ids.device:
            self._settle()
        self._late.append(ids.clone())
        self._tokens += ids.shape[1]
        if len(self._late) >= _LATE:
            self._settle()

    @torch.inference_mode(False)
    def _settle(self) -> None:
        """Put what came late into its place."""
        if not self._late:
            return
        # Made in inference mode, the ids could not be written to outside of it later.
        late = torch.cat(self._late, 1)
        first, total = self._tokens - late.shape[1], self._tokens
        if total > self._ids.shape[1] or self._ids.device != late.device:
            room = torch.empty((late.shape[0], max(total, 2 * first)), dtype=torch.int64, device=late.device)
            room[:, :first] = self._ids[:, :first]
            self._ids = room
        self._ids[:, first:total] = late
        self._late = []


def watch(model: torch.nn.Module) -> list[RemovableHandle]:
    """Let caches with a `TokenWatch` see the ids that forwards of this model are given."""
    return [
        model.register_forward_pre_hook(_before, with_kwargs=True),
        model.register_forward_hook(_after, with_kwargs=True),
    ]


def _watched(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Forwarding, TokenWatch] | None:
    for value in (kwargs.get("cache"), kwargs.get("past_key_values"), *args):
        if isinstance(value, Forwarding) and value.watch is not None:
            return value, value.watch
    return None


def _before(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    found = _watched(args, kwargs)
    if found is None:
        return
    cache, seen = found
    seen.started = time.perf_counter()
    past = cache.get_seq_length()
    seen.crop(past)
    ids = args[0] if args else kwargs.get("input_ids")
    others = [value for name, value in kwargs.items() if name not in _HARMLESS] + list(args[1:])
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or any(isinstance(v, torch.Tensor) for v in others):
        return
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if any(value is not None and not isinstance(value, torch.Tensor) for value in (mask, positions)):
        return
    if ids.shape[0]:
        cache.expand(ids.shape[0])
    seen.saw(past, ids, mask, positions)


def _after(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    found = _watched(args, kwargs)
    ids = args[0] if args else kwargs.get("input_ids")
    if found is not None and isinstance(ids, torch.Tensor) and ids.device.type == "cpu":
        # On an accelerator the forward may still be running.
        found[1].rates.prefilled(ids.numel(), time.perf_counter() - found[1].started)
