"""The hot tier: whole pools per layer, made when first used."""

from __future__ import annotations

import torch

from tieredkv.block import Plane
from tieredkv.tiers import HotTier, copy_blocks

LAYERS = [(Plane("k", torch.float32, 2, (16, 3)), Plane("v", torch.float32, 2, (16, 5)))] * 3


def test_pools_are_made_layer_by_layer_and_stay_the_same_tensors() -> None:
    asked: list[tuple[int, ...]] = []

    def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        asked.append(shape)
        return torch.empty(shape, dtype=dtype)

    tier = HotTier(LAYERS, 8, empty)
    assert (asked, tier.reserved_bytes) == ([], 0)
    k_pool, v_pool = tier.planes[1]
    assert (k_pool.shape, v_pool.shape) == ((2, 8, 16, 3), (2, 8, 16, 5))
    assert asked == [k_pool.shape, v_pool.shape]
    assert tier.reserved_bytes == k_pool.nbytes + v_pool.nbytes
    assert tier.planes[1][0] is k_pool
    assert len(asked) == 2
    assert [pool[0].shape for pool in tier.planes] == [(2, 8, 16, 3)] * 3
    assert len(asked) == 6


def test_a_run_of_neighbours_is_contiguous_tokens_of_a_head() -> None:
    tier = HotTier(LAYERS, 8, lambda shape, dtype: torch.zeros(shape, dtype=dtype))
    k, _ = tier.run(0, 2, 3)
    assert k.data_ptr() == tier.planes[0][0][:, 2].data_ptr()
    assert k[1].is_contiguous()
    assert k[1].view(3 * 16, 3).shape == (48, 3)


def test_copies_between_devices_are_one_contiguous_copy_per_head() -> None:
    source = torch.empty((2, 8, 16, 3), device="meta")[:, 2:5]
    target = torch.ones((2, 3, 16, 3))
    copied: list[tuple[bool, bool]] = []

    class Recorder(torch.Tensor):
        def copy_(self, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:  # type: ignore[override]
            copied.append((src.is_contiguous(), non_blocking))
            return self

    copy_blocks(target.as_subclass(Recorder), source, non_blocking=True)
    assert copied == [(True, True)] * 2
