"""Hit densities against hand-made waits."""

from __future__ import annotations

import pytest

from tieredkv.eviction.densities import HitDensities, gittins


def test_the_index_looks_for_the_best_time_to_give_up() -> None:
    """8 of 10 come back in the second bucket: waiting for them pays, waiting on does not."""
    hits, ends, widths = [0.0, 8.0, 0.0], [0.0, 8.0, 2.0], [10, 10, 100]
    # With the one that never returns: 11 wait through the first bucket and the second, 3 through the third.
    assert gittins(hits, ends, widths) == pytest.approx([8 / (110 + 110), 8 / 110, 0.0])


def test_a_late_return_is_worth_less_the_longer_it_takes() -> None:
    soon, late = gittins([5.0, 0.0], [5.0, 5.0], [10, 10]), gittins([0.0, 5.0], [5.0, 5.0], [10, 10])
    assert soon[0] > late[0] and soon[1] < late[1]


def feed(densities: HitDensities, hits: int, losses: int, age: int) -> None:
    for _ in range(hits):
        densities.hit(0, age)
    for _ in range(losses):
        densities.lost(0, age)
    for _ in range(2048):
        densities.tick()


def test_what_was_seen_replaces_what_was_assumed() -> None:
    densities = HitDensities(2)
    assert densities.density(0, 10) > densities.density(0, 1000)
    assert densities.density(1, 1000) > densities.density(0, 1000)
    feed(densities, 0, 100, 10)
    assert densities.density(0, 10) == 0.0
    feed(densities, 300, 0, 1000)
    assert densities.density(0, 900) > densities.density(0, 10) > densities.density(0, 2000) == 0.0


def test_a_handful_is_not_enough_to_learn_from() -> None:
    densities = HitDensities(1)
    assumed = densities.density(0, 10)
    feed(densities, 0, 19, 10)
    assert densities.density(0, 10) == assumed


def test_the_past_fades() -> None:
    densities = HitDensities(1)
    feed(densities, 100, 0, 1000)
    high = densities.density(0, 900)
    for _ in range(30):
        feed(densities, 0, 20, 1000)
    assert densities.density(0, 900) < high / 20
