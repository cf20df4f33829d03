"""Caches come to a store and leave it at any moment, in other threads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest
from support import audit, feed, small, store_of, tiny, tokens

from tieredkv.store import planner


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("quick_switches")
def test_caches_come_while_others_settle() -> None:
    model = tiny()
    with small(model, None, warm="400 tokens") as cache:
        feed(model, tokens(60), cache)
        cache.crop(0)  # ends the forward
        store, holder, failed = store_of(cache), cache.parts().holder, list[BaseException]()
        assert holder is not None
        stop = threading.Event()

        def come_and_leave() -> None:
            try:
                while not stop.is_set():
                    kept = [store.holder() for _ in range(20)]
                    for each in kept:
                        store.leave(each)
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=come_and_leave) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(300):
                planner.settle(store, holder)
                assert holder in store.holders and store.candidates(set())
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert not failed
        assert store.holders == [holder]
        audit(cache)


def test_caches_come_and_leave_while_all_are_gone_through() -> None:
    """As the collector has them leave, between any two of them."""
    model = tiny()
    with small(model, None, warm="400 tokens") as cache:
        feed(model, tokens(60), cache)
        store = store_of(cache)
        others = [store.holder() for _ in range(3)]
        seen = []
        for holder in store.holders:
            seen.append(holder)
            if others:
                store.leave(others.pop())
                late = store.holder()
        assert len(seen) == 4 and late not in seen
        assert store.holders == [cache.parts().holder, late]
        audit(cache)
