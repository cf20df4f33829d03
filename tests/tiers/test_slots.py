"""SlotPool: the invariant under random operations, and where slots are put."""

from __future__ import annotations

import threading

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tieredkv.errors import BudgetError, MismatchError
from tieredkv.tiers import SlotPool, runs

SLOTS = st.integers(-1, 24)


class PoolMachine(RuleBasedStateMachine):
    """The pool beside a plain model: a set of held slots and a count of flights."""

    spread = True

    def __init__(self) -> None:
        super().__init__()
        self.pool = SlotPool(12, tier="warm", spread=self.spread)
        self.total = 12
        self.held: set[int] = set()
        self.flights: dict[int, int] = {}
        self.peak = 0

    @property
    def busy(self) -> set[int]:
        return self.held | set(self.flights)

    @rule(preferred=st.none() | SLOTS)
    def allocate(self, preferred: int | None) -> None:
        if len(self.busy) == self.total:
            with pytest.raises(BudgetError) as caught:
                self.pool.allocate(preferred)
            assert caught.value.tier == "warm"
            return
        slot = self.pool.allocate(preferred)
        assert 0 <= slot < self.total
        assert slot not in self.busy
        if preferred is not None and 0 <= preferred < self.total and preferred not in self.busy:
            assert slot == preferred
        self.held.add(slot)

    @rule(count=st.integers(0, 14), preferred=st.none() | SLOTS)
    def allocate_many(self, count: int, preferred: int | None) -> None:
        if count > self.total - len(self.busy):
            with pytest.raises(BudgetError):
                self.pool.allocate_many(count, preferred)
            return
        slots = self.pool.allocate_many(count, preferred)
        assert len(set(slots)) == count
        assert not set(slots) & self.busy
        self.held |= set(slots)

    @rule(slot=SLOTS)
    def release(self, slot: int) -> None:
        if slot not in self.held:
            with pytest.raises(MismatchError):
                self.pool.release(slot)
            return
        self.pool.release(slot)
        self.held.remove(slot)

    @rule(slot=SLOTS)
    def begin_flight(self, slot: int) -> None:
        if slot not in self.held:
            with pytest.raises(MismatchError):
                self.pool.begin_flight(slot)
            return
        self.pool.begin_flight(slot)
        self.flights[slot] = self.flights.get(slot, 0) + 1

    @rule(slot=SLOTS)
    def end_flight(self, slot: int) -> None:
        if slot not in self.flights:
            with pytest.raises(MismatchError):
                self.pool.end_flight(slot)
            return
        self.pool.end_flight(slot)
        self.flights[slot] -= 1
        if not self.flights[slot]:
            del self.flights[slot]

    @precondition(lambda self: self.total < 20)
    @rule(count=st.integers(0, 4))
    def grow(self, count: int) -> None:
        self.pool.grow(count)
        self.total += count

    @invariant()
    def adds_up(self) -> None:
        self.peak = max(self.peak, len(self.busy))
        pool = self.pool
        assert pool.free + pool.live + pool.in_flight == pool.total == self.total
        assert pool.live == len(self.held - set(self.flights))
        assert pool.in_flight == len(self.flights)
        assert pool.used == len(self.busy)
        assert pool.peak_live == self.peak
        assert [slot for slot in range(self.total) if pool.holds(slot)] == sorted(self.held)


class CompactPoolMachine(PoolMachine):
    spread = False


_SETTINGS = settings(max_examples=60, stateful_step_count=40, suppress_health_check=list(HealthCheck), deadline=None)
TestSpread = PoolMachine.TestCase
TestSpread.settings = _SETTINGS
TestCompact = CompactPoolMachine.TestCase
TestCompact.settings = _SETTINGS


def test_a_lone_sequence_gets_one_run() -> None:
    pool = SlotPool(10)
    slots = [pool.allocate()]
    for _ in range(9):
        slots.append(pool.allocate(slots[-1] + 1))
    assert slots == list(range(10))


def test_rows_that_grow_in_turns_stay_in_long_runs() -> None:
    pool = SlotPool(64)
    rows = [pool.allocate_many(10) for _ in range(4)]
    for _ in range(4):
        for row in rows:
            row.append(pool.allocate(row[-1] + 1))
    assert max(len(runs(row)) for row in rows) <= 2


def test_a_batch_of_slots_fits_in_the_gap_it_begins_in() -> None:
    pool = SlotPool(64)
    pool.allocate_many(30)
    assert len(runs(pool.allocate_many(30))) == 1


def test_a_compact_pool_fills_from_the_lowest_slot() -> None:
    pool = SlotPool(100, spread=False)
    pool.allocate_many(10)
    for slot in (7, 2, 3):
        pool.release(slot)
    assert pool.allocate_many(4) == [2, 3, 7, 10]


def test_a_slot_released_in_flight_is_not_given_out_before_its_last_copy_ends() -> None:
    pool = SlotPool(1)
    slot = pool.allocate()
    pool.begin_flight(slot)
    pool.begin_flight(slot)
    pool.release(slot)
    pool.end_flight(slot)
    with pytest.raises(BudgetError, match="1 in flight"):
        pool.allocate()
    pool.end_flight(slot)
    assert pool.allocate() == slot


def test_a_pool_grows_when_it_has_to_and_only_then() -> None:
    steps = [4, 4, 0]
    pool = SlotPool(0, growth=lambda: steps.pop(0))
    assert pool.allocate_many(4) == [0, 1, 2, 3]
    assert pool.total == 4
    pool.release(1)
    assert pool.allocate() == 1
    assert pool.total == 4
    with pytest.raises(BudgetError, match="5 free"):
        pool.allocate_many(5)
    assert (pool.total, pool.free) == (8, 4)


def test_many_allocations_leave_the_search_small() -> None:
    pool = SlotPool(64)
    last = -1
    for _ in range(2000):
        slot = pool.allocate(last + 1)
        if last >= 0:
            pool.release(last)
        last = slot
    assert len(pool._largest) < 200


def test_threads_share_a_pool() -> None:
    pool = SlotPool(40)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(300):
                slots = pool.allocate_many(5)
                for slot in slots:
                    pool.begin_flight(slot)
                    pool.release(slot)
                for slot in slots:
                    pool.end_flight(slot)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert (pool.free, pool.live, pool.in_flight) == (40, 0, 0)


@pytest.mark.parametrize(
    ("slots", "wanted"),
    [
        ([], []),
        ([5], [(0, 5, 1)]),
        ([7, 8, 9, 2], [(0, 7, 3), (3, 2, 1)]),
        ([3, 2, 1], [(0, 3, 1), (1, 2, 1), (2, 1, 1)]),
        ([0, 1, 3, 4, 5], [(0, 0, 2), (2, 3, 3)]),
        ([4, 5, 6, 2, 3, 9, 8], [(0, 4, 3), (3, 2, 2), (5, 9, 1), (6, 8, 1)]),
    ],
)
def test_neighbouring_slots_are_joined(slots: list[int], wanted: list[tuple[int, int, int]]) -> None:
    assert runs(slots) == wanted
