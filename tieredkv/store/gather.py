"""Whole K and V of one layer, put together from the tiers: what attention that knows nothing of blocks is given.

Imports: plan, blocks, dropping, reads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tieredkv.plan import Chunk, ForwardPlan, Run
from tieredkv.store.blocks import BlockStore, Holder
from tieredkv.store.dropping import refuse_dropped
from tieredkv.store.reads import split_reads


def gather(
    store: BlockStore, plan: ForwardPlan, layer: int, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """All K and V of a layer in a forward: the past from the tiers, the new tokens from where the model made them.

    Args:
        key: [rows, kv_heads, new, k_dim].
        value: [rows, kv_heads, new, v_dim].

    Returns:
        [rows, kv_heads, total, k_dim] and [rows, kv_heads, total, v_dim], of their own.

    Raises:
        ConfigError: some of it is dropped, or is to be.
        ChecksumError, ColdTierError: a block cannot be had.
    """
    refuse_dropped(store)
    whole = _Whole(store, layer, plan.rows, plan.total, key.device)
    whole.add(plan.hot_runs, plan.warm_runs, plan.chunks)
    whole.k[:, :, plan.past :] = key
    whole.v[:, :, plan.past :] = value
    return whole.k, whole.v


def read_layer(store: BlockStore, holder: Holder, layer: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `tokens` tokens of each row in a layer, read from the tiers.

    Raises:
        ConfigError: some of it was dropped.
        ChecksumError, ColdTierError: a block cannot be had.
    """
    if any(block.gone for block in holder.table.blocks()):
        refuse_dropped(store)
    for block in holder.table.blocks():
        for event in store.through.get(block.id, ()):
            event.wait()
    with store.lock:
        whole = _Whole(store, layer, len(holder.table), tokens, store.device.torch_device)
        whole.add(*split_reads(store, holder, tokens))
    return whole.k, whole.v


class _Whole:
    """K and V of one layer, being filled."""

    def __init__(self, store: BlockStore, layer: int, rows: int, tokens: int, device: torch.device) -> None:
        geometry = store.layers[layer]
        self._store, self._layer = store, layer
        shape = (rows, geometry.kv_heads, tokens)
        self.k = torch.empty((*shape, geometry.k_dim), dtype=geometry.dtype, device=device)
        self.v = torch.empty((*shape, geometry.v_dim), dtype=geometry.dtype, device=device)

    def add(self, hot_runs: Sequence[Run], warm_runs: Sequence[Run], chunks: Sequence[Chunk]) -> None:
        store, size = self._store, self._store.block_size
        k_flat, v_flat = store.flat_pools(self._layer)
        for run in hot_runs:
            part = slice(run.start, run.start + run.tokens)
            self._put(run.rows, run.position, k_flat[:, part], v_flat[:, part], [("hot", b.hot) for b in run.blocks])
        for run in warm_runs:
            k, v = (view.flatten(1, 2) for view in store.warm_run(self._layer, run.start // size, len(run.blocks)))
            self._put(run.rows, run.position, k, v, [("warm", b.warm) for b in run.blocks])
        for index, chunk in enumerate(chunks):
            with store.prefetcher.chunk(range(len(store.layers)), chunks, self._layer, index) as (k, v, buffer):
                self._put(chunk.rows, chunk.position, k, v, [("stage", buffer)])

    def _put(
        self, rows: Sequence[int], position: int, k: torch.Tensor, v: torch.Tensor, reads: list[tuple[str, object]]
    ) -> None:
        stop = min(position + k.shape[1], self.k.shape[2])

        def copy() -> None:
            for row in rows:
                self.k[row, :, position:stop] = k[:, : stop - position]
                self.v[row, :, position:stop] = v[:, : stop - position]

        self._store.device.run(copy, reads=reads, name="gather")
