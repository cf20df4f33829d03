"""A lossy cache gives the same bits however late its copies come: whole caches, through everything that moves blocks.

Each scenario runs once with every copy done before the next forward, and then with copies to lower tiers that end
several forwards later, and loads that take their time. Only which tokens are read through the codec could differ; that
is decided by positions and settings, so that the logits of every forward are equal bit by bit.

tests/store/test_moves.py has what single decisions depend on; tests/faults/test_order.py has copies that are exact.
"""

from __future__ import annotations

import copy
import dataclasses
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import TOLERANCE, audit, difference, of, tiny, tokens

import tieredkv
from tieredkv.device import Event, SimulatedAccelerator

MOST_FORWARDS = 40
"""So many forwards after it was asked for, at the latest, a copy to a lower tier ends that nobody waits for."""
DELAYS = [(1, 0.0005), (2, 0.003)]
"""(seed, most seconds that any operation takes longer, so that the streams get on in another order)"""

ROWS = 2

BORDERS = {"hot_to_warm", "hot_to_cold", "warm_to_cold", "warm_to_hot", "cold_to_hot"}
PACKED = {"hot_to_packed", "packed_to_warm", "packed_to_cold", "packed_to_hot"}


@dataclasses.dataclass(frozen=True)
class Setting:
    """How the caches of one test are made."""

    codec: str
    way: str = "blocks"
    packed: bool = False
    addresses_host: bool = False
    watermark: float = 1.0

    def __str__(self) -> str:
        return f"{self.codec} {self.way}{' packed' * self.packed}{' addresses host' * self.addresses_host}"

    def changes(self, folder: Path) -> dict[str, Any]:
        """For a cache in which blocks of two rows cross every border within 200 tokens, and are copied down early."""
        return {
            "hot": "96 tokens",
            "warm": {"raw": "48 tokens", "int4": "10 tokens"}.get(self.codec, "16 tokens"),
            "cold": tieredkv.ColdSettings(folder, free_floor=0),
            "block_size": 16,
            "window": 16,
            "codec": self.codec,
            "hot_codec": self.codec if self.packed else None,
            "settings": tieredkv.CacheSettings(
                chunk_tokens=32, queue_blocks=4, write_down_at=0.0, watermark=self.watermark
            ),
        }


class Late:
    """Copies to lower tiers that end some forwards after they were asked for, or as soon as somebody waits for one.

    Args:
        device: whose.
        seed: of how many forwards each takes.
    """

    def __init__(self, device: SimulatedAccelerator, seed: int) -> None:
        self._rng, self._submit, self._forwards = random.Random(seed), device.down.submit, 0
        self._events: set[Event] = set()
        self._held: list[tuple[int, threading.Event]] = []
        device.down.submit = self._submits  # type: ignore[method-assign]

    def _submits(self, work: Callable[[], Any], *, name: str = "", **rest: Any) -> Event:
        go = threading.Event()
        # What a forward writes straight down is waited for at its end: it comes when it comes.
        self._held.append((self._forwards + self._rng.randint(3, MOST_FORWARDS) * name.startswith("demote"), go))

        def held() -> Any:
            assert go.wait(60), f"nobody let go of {name}"
            return work()

        event = self._submit(held, name=name, **rest)
        self._events.add(event)
        return event

    def next_forward(self) -> None:
        self._forwards += 1
        self._let_go(self._forwards)

    def waited_for(self, event: Event) -> None:
        if event in self._events:
            self._let_go(self._forwards + MOST_FORWARDS)

    def _let_go(self, forward: int) -> None:
        for due, go in self._held:
            if due <= forward:
                go.set()
        self._held = [(due, go) for due, go in self._held if due > forward]


class Run:
    """One run of a scenario: the logits of each forward, and how many of them began while copies were on their way."""

    def __init__(self, setting: Setting, folder: Path, delay: tuple[int, float] | None) -> None:
        self.model, self.delay = tiny(), delay
        seed, delay_seconds = delay or (0, 0.0)
        self.device = SimulatedAccelerator(
            seed=seed, max_delay_seconds=delay_seconds, addresses_host=setting.addresses_host
        )
        self.late = None if delay is None else Late(self.device, seed)
        self.given, self.changes = of(self.model, setting.way), setting.changes(folder / str(seed))
        self.logits: list[torch.Tensor] = []
        self.overtaken = self.evicted = 0
        self.stats: tieredkv.CacheStats | None = None

    def cache(self) -> tieredkv.TieredCache:
        return tieredkv.TieredCache(self.given, device=self.device, **self.changes)

    def store(self) -> tieredkv.KVStore:
        """Its sizes are for the three rows of its first forward, and what caches leave behind has to go in the end."""
        packed = self.changes["hot_codec"] is not None
        changes = self.changes | {"hot": "80 tokens" if packed else "64 tokens", "warm": "8 tokens"}
        if self.changes["codec"] != "raw":  # which takes more room
            changes["cold"] = dataclasses.replace(changes["cold"], cap="32 tokens" if packed else "64 tokens")
        return tieredkv.KVStore(self.model, device=self.device, durable=False, **changes)

    @torch.no_grad()
    def forward(self, cache: tieredkv.TieredCache, ids: torch.Tensor) -> None:
        if self.late is None:
            self.device.synchronize()
        else:
            self.late.next_forward()
        store = cache.parts().store
        self.overtaken += store is not None and any(not event.settled for move in store._moves for event in move.events)
        self.logits.append(self.model(ids, past_key_values=cache).logits)

    def decode(self, cache: tieredkv.TieredCache, ids: torch.Tensor) -> None:
        for at in range(ids.shape[1]):
            self.forward(cache, ids[:, at : at + 1])

    def end(self, *caches: tieredkv.TieredCache) -> None:
        audit(*caches)
        self.stats = caches[0].stats()
        assert self.device.clocks.races == 0


class Text:
    """Random tokens `[ROWS, count]`, one piece after another."""

    def __init__(self, seed: int) -> None:
        self._ids, self._at = tokens(600, ROWS, seed), 0

    def next(self, count: int) -> torch.Tensor:
        self._at += count
        return self._ids[:, self._at - count : self._at]


def conversation(run: Run) -> None:
    """Two rows: a prompt in pieces, steps, candidates taken back, moves by request, and a copy that goes on."""
    text = Text(1)
    with run.cache() as cache:
        for count in (41, 1, 17):
            run.forward(cache, text.next(count))
        cache.demote("warm")
        run.decode(cache, text.next(2))
        cache.promote()
        run.forward(cache, text.next(40))
        for kept in (0, 3, 5, 4, 5, 2, 5, 5):
            run.forward(cache, text.next(5))
            cache.crop(kept - 5)
        run.decode(cache, text.next(12))
        cache.crop(-37)
        run.decode(cache, text.next(2))
        twin = copy.deepcopy(cache)
        for turn in range(5):
            run.forward(cache, text.next(12 if turn == 2 else 4))
            run.forward(twin, text.next(14 if turn == 1 else 4))
        twin.crop(-25)
        run.decode(twin, text.next(2))
        audit(cache, twin)
        twin.close()
        cache.demote("cold")
        run.decode(cache, text.next(2))
        cache.promote()
        run.decode(cache, text.next(2))
        run.end(cache)


def neighbours(run: Run) -> None:
    """Caches of a store that keeps prefixes, one of two equal rows: they take turns, and what is kept makes room."""
    prompts, text, rng = [tokens(40, seed=seed) for seed in (1, 2, 3, 4)], Text(5), random.Random(6)
    with run.store() as store:
        for prompt in prompts[:3]:
            with store.cache(prompt.expand(3, -1)) as first:
                run.forward(first, prompt.expand(3, -1))
                run.decode(first, text.next(2)[:1].expand(3, -1))
        rows = {1: prompts[0], 2: prompts[3].expand(2, -1)}
        with store.cache(rows[1]) as one, store.cache(rows[2]) as pair:
            run.forward(one, rows[1][:, one.get_seq_length() :])
            run.forward(pair, rows[2])
            for turn in range(50):
                cache, count = rng.choice([(one, 1), (pair, 2)])
                run.forward(cache, text.next(rng.choice([3, 5, 7]))[:1].expand(count, -1))
                if turn % 10 == 9:
                    cache.crop(-9)
            run.forward(one, text.next(60)[:1])
            run.decode(one, text.next(3)[:1])
            run.decode(pair, text.next(3)[:1].expand(2, -1))
            run.end(one, pair)
        run.evicted = store.stats().evicted_blocks


Scenario = Callable[[Run], None]


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[Late]:
    """Those whose copies end when somebody waits for one."""
    known: list[Late] = []
    join = Event.join_through

    def joins(event: Event) -> None:
        for late in known:
            late.waited_for(event)
        join(event)

    monkeypatch.setattr(Event, "join_through", joins)
    return known


_EXACT: dict[Scenario, list[torch.Tensor]] = {}


def exact_logits(scenario: Scenario, folder: Path) -> list[torch.Tensor]:
    """What a scenario gives without a lossy codec; computed once."""
    if scenario not in _EXACT:
        run = Run(Setting("raw"), folder, None)
        scenario(run)
        _EXACT[scenario] = run.logits
    return _EXACT[scenario]


def check(scenario: Scenario, setting: Setting, folder: Path, waits: list[Late]) -> Run:
    """The same bits under all delays, and others than without the codec; the run in which nothing was late."""
    runs = [Run(setting, folder, delay) for delay in (None, *DELAYS)]
    for run in runs:
        waits[:] = [run.late] if run.late is not None else []
        scenario(run)
    punctual, *others = runs
    assert punctual.overtaken == 0
    for late in others:
        assert late.overtaken >= 5, f"copies were late at {late.overtaken} forwards only: the test proves nothing"
        for number, (wanted, got) in enumerate(zip(punctual.logits, late.logits, strict=True)):
            assert torch.equal(wanted, got), f"forward {number}, {late.delay}: {difference(got, wanted):.3g}"
        assert late.evicted == punctual.evicted
    if setting.codec != "raw":
        lost = max(map(difference, punctual.logits, exact_logits(scenario, folder / "exact")))
        assert lost > 100 * TOLERANCE, "nothing was read through the codec: the test proves nothing"
    return punctual


@pytest.mark.parametrize(
    "setting",
    [
        Setting("int8"),
        Setting("fp8", addresses_host=True),
        Setting("int4", way="gather"),
        Setting("int8", packed=True),
        Setting("raw", addresses_host=True),  # the only one that is attended in place
    ],
    ids=str,
)
def test_a_conversation_is_the_same_bit_by_bit(cold_dir: Path, waits: list[Late], setting: Setting) -> None:
    stats = check(conversation, setting, cold_dir, waits).stats
    assert stats is not None
    borders = BORDERS | (PACKED if setting.packed else set())
    assert set(stats.moves) >= borders, borders - set(stats.moves)
    assert stats.warm.hits and stats.cold.hits and bool(stats.packed.hits) == setting.packed


@pytest.mark.parametrize("setting", [Setting("int8", watermark=0.8), Setting("fp8", packed=True)], ids=str)
def test_caches_of_one_store_are_the_same_bit_by_bit(cold_dir: Path, waits: list[Late], setting: Setting) -> None:
    run = check(neighbours, setting, cold_dir, waits)
    assert run.stats is not None
    assert run.evicted, "no room was made of what is kept"
    assert run.stats.warm.hits and run.stats.cold.hits and bool(run.stats.packed.hits) == setting.packed
