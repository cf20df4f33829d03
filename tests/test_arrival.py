"""What a copy down does where it arrives, and what it and its block keep: no more, and no longer, than is needed."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support import assert_close, audit, config_of, feed, locations, oracle, small, store_of, tiny, tokens

from tieredkv import transfer
from tieredkv.block import Planes
from tieredkv.checksum import Checksummer
from tieredkv.config import CacheSettings
from tieredkv.device import SimulatedAccelerator
from tieredkv.errors import ChecksumError
from tieredkv.tiers import NativeMoves, Tier, WarmTier
from tieredkv.tiers.native_moves import Sums


class Damaged:
    """A warm tier of which some writes come to lie as other bytes.

    Args:
        damaged: how many of the first writes do.
        at_once: whether blocks go to it with all their layers in one write where they can.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, damaged: int, at_once: bool = False) -> None:
        self.writes, self._damaged = 0, damaged
        write, move = WarmTier.write, NativeMoves.move

        def badly(tier: WarmTier, layer: int, slots: Sequence[int], planes: Planes) -> None:
            write(tier, layer, slots, planes)
            self.came(tier, layer, slots)

        def badly_at_once(moves: NativeMoves, *places: Any, summed: bool) -> Sums | None:
            sums, (_, _, tier, slots) = move(moves, *places, summed=summed) if at_once else None, places
            if sums is not None and (view := self.came(tier, 1, slots)) is not None:
                sums.lying[len(slots)] = int(Checksummer().checksum(view)[0])  # as it is found there
            return sums

        monkeypatch.setattr(WarmTier, "write", badly)
        monkeypatch.setattr(NativeMoves, "move", badly_at_once)

    def came(self, tier: Tier, layer: int, slots: Sequence[int]) -> Planes | None:
        """Count a write, and damage the first of its blocks if it is one of those; gives that block then."""
        self.writes += 1
        if self.writes > self._damaged:
            return None
        view = tier.run(layer, slots[0], 1)
        assert view is not None
        view[0].view(torch.uint8)[0, 0, 3] ^= 1
        return view


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("damaged", [0, 1, 2])
def test_what_arrives_as_other_bytes_is_written_once_more(
    monkeypatch: pytest.MonkeyPatch, damaged: int, at_once: bool
) -> None:
    """The first layer's write goes wrong, or both do: then the block stays where it was."""
    model, ids, tier = tiny(), tokens(40), Damaged(monkeypatch, damaged, at_once)
    with small(model, None, warm="512 tokens") as cache:
        first = feed(model, ids[:, :33], cache)
        assert cache.demote("warm") == (0 if damaged == 2 else 2)
        assert locations(cache)[:2] == ["hot" if damaged == 2 else "warm"] * 2
        assert tier.writes == ((1, 2, 2) if at_once else (2, 3, 2))[damaged]
        stats = cache.stats()
        assert (stats.checksum_failures > 0, stats.retries) == (damaged > 0, min(damaged, 1))
        rest = feed(model, ids[:, 33:], cache)
        assert_close(torch.cat([first, rest], 1), oracle(ids))
        audit(cache)


def test_blocks_that_are_freed_before_their_copy_begins_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    device, tier = SimulatedAccelerator(latency_seconds=0.2), Damaged(monkeypatch, 0)
    with small(config_of("llama"), None, hot="512 tokens", warm="512 tokens", device=device) as cache:
        for count in (96, 1):  # the second forward seals what the first one wrote
            for layer in range(2):
                cache.update(torch.randn(1, 2, count, 8), torch.randn(1, 2, count, 8), layer, kwargs={})
        store, holder = store_of(cache), cache.parts().holder
        assert holder is not None
        with store.lock:
            store.start_move([block for block in holder.table.blocks() if block.sealed], "hot", "test")
            assert store._moves
        cache.crop(-1000)
        audit(cache)
        assert not tier.writes and not device.clocks.races


def test_no_more_is_kept_alive_than_the_limit(monkeypatch: pytest.MonkeyPatch, cold_dir: Path) -> None:
    """A forward that makes more waits for the oldest copy, whose tensors are gone then."""
    monkeypatch.setattr(transfer, "MAX_HELD_BYTES", 100_000)
    device = SimulatedAccelerator(latency_seconds=0.05)
    with small(config_of("llama", num_hidden_layers=8), cold_dir, warm=0, device=device) as cache:
        alive: list[weakref.ref[torch.UntypedStorage]] = []
        for layer in range(8):
            k, v = torch.randn(1, 2, 320, 8), torch.randn(1, 2, 320, 8)
            alive += [weakref.ref(tensor.untyped_storage()) for tensor in (k, v)]
            cache.update(k, v, layer, kwargs={})
            held = [storage.nbytes() for reference in alive if (storage := reference()) is not None]
            assert sum(held) <= 100_000 + k.nbytes + v.nbytes
            del k, v


def test_a_block_keeps_the_checksum_that_it_was_born_with(cold_dir: Path) -> None:
    """What changed in warm after it was looked at does not become right by moving on."""
    model, ids = tiny(), tokens(122)
    settings = CacheSettings(read_in_place=False, verify="first")
    with small(model, cold_dir, warm="256 tokens", settings=settings) as cache:
        feed(model, ids[:, :121], cache, [120, 1])
        store = store_of(cache)
        store.prefetcher.flush()
        with store.lock:
            store.wait_all()
            block = next(b for h in store.holders for b in h.table.blocks() if b.warm is not None and b.hot is None)
        view = store.tiers["warm"].run(0, block.warm or 0, 1)
        assert view is not None
        view[0].view(torch.uint8)[0, 0, 3] ^= 1
        cache.demote("cold")
        assert block.cold is not None and block.warm is None
        with pytest.raises(ChecksumError):
            feed(model, ids[:, 121:], cache)


def test_what_is_known_of_a_block_goes_with_it(cold_dir: Path) -> None:
    model = tiny()
    settings = CacheSettings(read_in_place=False, verify="first")
    with small(model, cold_dir, warm="256 tokens", settings=settings) as cache:
        feed(model, tokens(122), cache, [120, 1])
        known = store_of(cache).mover._reads._seen
        assert known
        cache.crop(-1000)
        audit(cache)
        assert not known
