"""What a copy down does where it arrives: it is compared there, made again once, and not made for nobody."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from support import assert_close, audit, config_of, feed, locations, oracle, small, store_of, tiny, tokens

from tieredkv.block import Planes
from tieredkv.device import SimulatedAccelerator
from tieredkv.tiers import WarmTier


class Damaged:
    """A warm tier of which some writes come to lie as other bytes.

    Args:
        damaged: how many of the first writes do.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, damaged: int) -> None:
        self.writes, write = 0, WarmTier.write

        def badly(tier: WarmTier, layer: int, slots: Sequence[int], planes: Planes) -> None:
            write(tier, layer, slots, planes)
            self.writes += 1
            if self.writes <= damaged:
                view = tier.run(layer, slots[0], 1)
                assert view is not None
                view[0].view(torch.uint8)[0, 0, 3] ^= 1

        monkeypatch.setattr(WarmTier, "write", badly)


@pytest.mark.parametrize("damaged", [0, 1, 2])
def test_what_arrives_as_other_bytes_is_written_once_more(monkeypatch: pytest.MonkeyPatch, damaged: int) -> None:
    """The first layer's write goes wrong, or both do: then the block stays where it was."""
    model, ids, tier = tiny(), tokens(40), Damaged(monkeypatch, damaged)
    with small(model, None, warm="512 tokens") as cache:
        first = feed(model, ids[:, :33], cache)
        assert cache.demote("warm") == (0 if damaged == 2 else 2)
        assert locations(cache)[:2] == ["hot" if damaged == 2 else "warm"] * 2
        assert tier.writes == (2, 3, 2)[damaged]
        stats = cache.stats()
        assert (stats.checksum_failures > 0, stats.retries) == (damaged > 0, min(damaged, 1))
        rest = feed(model, ids[:, 33:], cache)
        assert_close(torch.cat([first, rest], 1), oracle(ids))
        audit(cache)


def test_blocks_that_are_freed_before_their_copy_begins_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    device, tier = SimulatedAccelerator(latency_seconds=0.2), Damaged(monkeypatch, 0)
    with small(config_of("llama"), None, hot="128 tokens", warm="512 tokens", device=device) as cache:
        for count in (96, 1):
            for layer in range(2):
                cache.update(torch.randn(1, 2, count, 8), torch.randn(1, 2, count, 8), layer, kwargs={})
        written, moving = tier.writes, len(store_of(cache)._moves)
        assert moving
        cache.reset()
        audit(cache)
        assert tier.writes == written
        assert not device.clocks.races
