"""Sequences that outlive their cache: saved to a file, and exchanged with transformers' `DynamicCache`.

Imports: block, this package; transformers' DynamicCache.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import torch
from transformers import DynamicCache

from tieredkv.block import LayerGeometry
from tieredkv.hf import session
from tieredkv.hf.forwarding import Forwarding
from tieredkv.hf.others import OtherLayers


class Resumable(Forwarding):
    """The part of a `TieredCache` that carries whole sequences in and out. Not made by itself."""

    @classmethod
    def _new(cls, model: Any, options: dict[str, Any]) -> Self:
        """A new cache as a user makes it: from a model and keywords."""
        make: Any = cls
        cache: Self = make(model, **options)
        return cache

    def _close_failed(self) -> None:
        """A cache that could not be filled gives back what it took."""
        self._attachment.restore()
        self._place.leave()
        self._closed = True

    def save(self, path: str | os.PathLike[str], model: Any = None) -> None:
        """Write the whole sequence to a file, so that `load` goes on with it in another process.

        The file is whole or absent however the process ends; only its owner may read it. It holds all K and V as they
        are read (with a lossy codec, what the codec left of them), the states of layers that are not tiered, and what
        the model keeps outside of the cache.

        Args:
            path: the file, replaced if it is there.
            model: the model, for a cache that was made from its config; then its weights are compared by `load`, too.

        Raises:
            SessionError: the disk refuses; what was at `path` is as it was.
            UnsupportedModelError: state that cannot be saved.
        """
        self._end_forward()
        session.save(Path(path), self._contents(model))

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: Any, **options: Any) -> Self:
        """The sequence that `save` wrote, in a new cache.

        Args:
            path: the file.
            model: the model that is to go on: the same weights, dtype and settings.
            options: sizes and settings of the new cache, as for `TieredCache`.

        Raises:
            SessionError: the file cannot be read, or is damaged.
            MismatchError: it was saved with another model.
            BudgetError: it does not fit.
        """
        loaded = session.Loaded(Path(path), model)
        cache = cls._new(model, options)
        try:
            loaded.check_layers(cache._tiered, cache._others.layers)
            loaded.restore_others(cache._others.layers)
            cache._fill(loaded.pairs())
            cache._positions = loaded.positions()
            loaded.restore_model()
        except BaseException:
            cache._close_failed()
            raise
        return cache

    @classmethod
    def from_dynamic(cls, dynamic: DynamicCache, model: Any, **options: Any) -> Self:
        """The sequence of a `DynamicCache` in a new cache, at any point of a conversation; `dynamic` stays as it is.

        Raises:
            MismatchError: the layers are not this model's.
            BudgetError: it does not fit.
        """
        cache = cls._new(model, options)
        try:
            cache._fill(session.from_dynamic(dynamic, cache._tiered, cache._others.layers))
        except BaseException:
            cache._close_failed()
            raise
        return cache

    def to_dynamic(self) -> DynamicCache:
        """The sequence as a `DynamicCache` of its own; this cache stays as it is."""
        self._end_forward()
        return session.to_dynamic(self._contents(None))

    def _contents(self, model: Any) -> session.Contents:
        known = self._attachment.model
        return session.Contents(
            config=self._attachment.config,
            model=model if model is not None or known is None else known(),
            tiered=self._tiered,
            layer=self.gather_layer,
            held=self._held,
            others=self._others.layers,
            positions=self._positions,
        )

    def _held(self, layer_idx: int) -> tuple[int, int, LayerGeometry] | None:
        store, holder, tokens = self._place.store, self._place.holder, self.get_seq_length(layer_idx)
        if store is None or holder is None or not tokens:
            return None
        return len(holder.table), tokens, store.layers[self._index[layer_idx]]

    def _fill(self, pairs: Iterable[tuple[int, torch.Tensor, torch.Tensor]]) -> None:
        """Store whole K and V, [rows, kv_heads, tokens, dim], of each tiered layer."""
        for layer_idx, key, value in pairs:
            self.update(key, value, layer_idx)
        self._finish()

    def _replace_others(self, layers: dict[int, Any]) -> None:
        self._others = OtherLayers(layers)
        for layer_idx, layer in layers.items():
            place: Any = self.layers[layer_idx]
            if layer_idx in self._index:
                place.beside = layer
            else:
                self.layers[layer_idx] = layer
