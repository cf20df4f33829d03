"""Measured links: what is measured, and that it leaves caches as they were."""

from __future__ import annotations

from pathlib import Path

from support import assert_close, audit, feed, oracle, small, tiny, tokens

from tieredkv.device import SimulatedAccelerator


def test_links_are_measured_between_forwards_and_nothing_changes(cold_dir: Path) -> None:
    model, ids = tiny(), tokens(150)
    with (
        SimulatedAccelerator(seed=2, max_delay_seconds=0.001) as device,
        small(model, cold_dir, device=device) as cache,
    ):
        assert cache.measure_links() == {}
        first = feed(model, ids[:, :140], cache, [130, *[1] * 4])
        found = cache.measure_links()
        assert set(found) == {"hot", "warm_to_hot", "hot_to_warm"}
        assert all(10**6 < rate < 10**13 for rate in found.values()), found
        rest = feed(model, ids[:, 140:], cache, [1] * 9)
        assert_close(first, oracle(ids)[:, :140])
        assert_close(rest, oracle(ids)[:, 140:])
        stats = cache.stats()
        assert stats.link_bytes_per_second == found
        share = stats.link_share("warm_to_hot")
        assert share == stats.moves["warm_to_hot"].bytes_per_second / found["warm_to_hot"]
        assert stats.link_share("cold_to_hot") is None
        assert "link" in {finding.kind for finding in cache.explain()}
        audit(cache)
        assert device.clocks.races == 0


def test_without_a_lower_tier_only_hot_is_measured() -> None:
    model = tiny()
    with small(model, None, warm=0) as cache:
        feed(model, tokens(20), cache)
        assert set(cache.measure_links()) == {"hot"}
