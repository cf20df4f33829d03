"""Writes a layer's new keys and values where the plan says: hot slots at once, lower tiers in the background.

Imports: errors, block, device, plan, blocks.
"""

from __future__ import annotations

import torch

from tieredkv.block import LayerGeometry
from tieredkv.device import Region
from tieredkv.errors import MismatchError
from tieredkv.plan import ForwardPlan
from tieredkv.store.blocks import BlockStore


def check_tensors(store: BlockStore, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
    """Refuse tensors that are not this layer's.

    Raises:
        MismatchError: shape, dtype or device differ from what the layer was made with.
    """
    wanted, (rows, heads, new, k_dim), shape = store.layers[layer], key.shape, value.shape
    if (
        (heads, k_dim, shape[3]) == (wanted.kv_heads, wanted.k_dim, wanted.v_dim)
        and (rows, heads, new) == shape[:3]
        and key.dtype == value.dtype == wanted.dtype
    ) and store.device.torch_device == key.device:
        return
    got = LayerGeometry(heads, k_dim, shape[3], key.dtype)
    raise MismatchError(
        f"Keys and values that do not belong to tiered layer {layer} of this cache.",
        wanted=f"{store.layers[layer]} on {store.device.torch_device}",
        got=f"{got}, values {tuple(value.shape)} {value.dtype} on {key.device}",
        change="use one cache per model and dtype, all of whose tiered layers compute on one device; reset() keeps"
        " these, so make a new cache",
    )


def write(store: BlockStore, plan: ForwardPlan, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
    """Write [rows, kv_heads, new, dim] keys and values of one layer."""
    if store.device.follows_accesses:
        regions: list[Region] = [
            ("hot", slot) for write in plan.hot_writes for slot in _slots(write.start, write.tokens, store)
        ]
        # The model made K and V on the compute stream; what is written through reads them on another.
        regions += [("new", through.blocks[0].id, layer) for through in plan.through_writes]
        store.device.run(lambda: _write_hot(store, plan, layer, key, value), writes=regions, name="write new")
    else:
        _write_hot(store, plan, layer, key, value)
    for through in plan.through_writes:
        last = through.source + len(through.blocks) * store.block_size
        k = key[through.row, :, through.source : last]
        v = value[through.row, :, through.source : last]
        event = store.mover.write_through(through, layer, k, v)
        for block in through.blocks:
            store.through[block.id].append(event)


def _write_hot(store: BlockStore, plan: ForwardPlan, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
    k_flat, v_flat = store.flat_pools(layer)
    if plan.write_index is not None:
        index = plan.write_index
        if index.device != key.device:
            index = index.to(key.device)
        k_flat.index_copy_(1, index, key[:, :, 0].transpose(0, 1))
        v_flat.index_copy_(1, index, value[:, :, 0].transpose(0, 1))
        return
    for write in plan.hot_writes:
        # `narrow` and `select` take a third of the time of an index with slices, three times a layer.
        for flat, new in ((k_flat, key), (v_flat, value)):
            source = new.select(0, write.row)
            if write.tokens != plan.new:
                source = source.narrow(1, write.source, write.tokens)
            flat.narrow(1, write.start, write.tokens).copy_(source)


def _slots(start: int, tokens: int, store: BlockStore) -> range:
    return range(start // store.block_size, (start + tokens - 1) // store.block_size + 1)
