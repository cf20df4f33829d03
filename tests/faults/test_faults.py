"""Nothing that was spoiled on its way, or where it lay, is ever attended: thousands of faults, each of them found.

Every crossing there is, each with flipped bits, truncation, torn writes, swapped blocks, stale blocks of the same slot
and blocks of other sequences. Each step gives the right logits, or an error that names block, layer, tier and both
values. What the tiers handed over wrong and what was noticed are counted on both sides and must be equal, so that a
fault too small to be seen in logits counts too.
"""

from __future__ import annotations

import dataclasses
import os
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from faults.faulty import KINDS, Faults, Key, Row, key_of, spoil
from support import TOLERANCE, audit, difference, oracle, small, store_of, tiny, tokens

import tieredkv
from tieredkv.device import CpuDevice, SimulatedAccelerator
from tieredkv.errors import ChecksumError, ColdTierError

DIMS: dict[str, Any] = {"head_dim": 32}
"""One head of a block is large enough to be read from a file straight into its place."""

PROMPT, STEPS = 300, 8
LIMIT = 5 * TOLERANCE
"""Over thousands of steps the worst rounding of fp32 is seen; the smallest faults are found by counting."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """How one cache of the campaign is made."""

    way: str = "blocks"
    codec: str = "raw"
    verify: str = "always"
    simulated: bool = False
    in_place: bool = False
    packed: bool = False


SETTINGS = (
    Setting(),
    Setting(simulated=True),
    Setting(way="gather"),
    Setting(codec="int8"),
    Setting(way="gather", codec="int4", simulated=True),
    Setting(in_place=True),
    Setting(codec="int8", packed=True),
    Setting(way="gather", codec="int4", packed=True),
    Setting(codec="fp8", packed=True, simulated=True),
)


class Trial:
    """One cache whose lower tiers are faulty, and one of the same settings whose tiers are not."""

    def __init__(
        self, seed: int, folder: Path, setting: Setting, strangers: dict[int, list[Row]], **rates: float
    ) -> None:
        self.setting, self.rng = setting, random.Random(seed)
        self.model, self.ids = tiny(**DIMS), tokens(PROMPT + STEPS * 4 + 128, seed=seed)
        self.device = SimulatedAccelerator(seed=seed, max_delay_seconds=0.0005) if setting.simulated else CpuDevice()
        self.faults = Faults(
            seed, **{"read_rate": 0.15, "write_rate": 0.12, "twice": 0.03, **rates}, strangers=strangers
        )
        self.faults.way = setting.way
        self.cache, self.plain = (self.make(folder / name, device) for name, device in self.names())
        self.wanted = oracle(self.ids, **DIMS)
        self.errors: Counter[str] = Counter()
        self.wrong_logits = 0
        self.at = 0

    def names(self) -> list[tuple[str, Any]]:
        plain = CpuDevice()
        # As many staging buffers, and so as many hot slots: what is read through a lossy codec depends on them.
        plain.copies_aside = self.device.copies_aside
        return [("faulty", self.device), ("plain", plain)]

    def make(self, folder: Path, device: Any) -> tieredkv.TieredCache:
        settings = tieredkv.CacheSettings(
            read_in_place=self.setting.in_place, verify=self.setting.verify, chunk_tokens=64
        )
        changes = {"warm": "112 tokens", "codec": self.setting.codec, "settings": settings, "device": device}
        if self.setting.packed:
            changes |= {"hot": "128 tokens", "hot_codec": self.setting.codec}
        return small(self.model.config, folder, **changes)

    def forward(self, count: int) -> None:
        """The next tokens, until there is no error: right logits in the end, and never wrong ones."""
        ids = self.ids[:, self.at : self.at + count]
        wanted = self.reference(ids, count)
        self.persist(lambda: self.attempt(ids, wanted))
        self.at += count

    def attempt(self, ids: torch.Tensor, wanted: torch.Tensor) -> None:
        """One forward; what failed in the last layer counts as a whole one until it is cut off."""
        self.cache.crop(self.at - self.cache.get_seq_length())
        got = self.run(self.cache, ids)
        self.wrong_logits += difference(got, wanted) > LIMIT

    def run(self, cache: tieredkv.TieredCache, ids: torch.Tensor) -> torch.Tensor:
        self.model.set_attn_implementation("tieredkv" if self.setting.way == "blocks" else "sdpa")
        with torch.no_grad():
            return self.model(ids, past_key_values=cache).logits

    def reference(self, ids: torch.Tensor, count: int) -> torch.Tensor:
        plain = self.run(self.plain, ids)
        if self.setting.codec == "raw":
            assert difference(plain, self.wanted[:, self.at : self.at + count]) <= LIMIT
        return plain

    def persist(self, action: Callable[[], object]) -> None:
        """Do it until it works; what an error names is put right in between, as no cache can do by itself."""
        for _ in range(200):
            try:
                action()
            except (ChecksumError, ColdTierError) as error:
                self.errors[type(error).__name__] += 1
                self.faults.repair(key_of(error, store_of(self.cache)))
            else:
                return
        raise AssertionError("no end of errors")

    def whole(self) -> None:
        """Read every layer back, until all that lies wrong was found."""
        for layer in range(2):

            def read(layer: int = layer) -> None:
                found, wanted = (cache.gather_layer(layer) for cache in (self.cache, self.plain))
                assert found is not None and wanted is not None
                self.wrong_logits += any(difference(a, b) > 0 for a, b in zip(found, wanted, strict=True))

            self.persist(read)

    def spoil_at_rest(self) -> None:
        """Change some blocks where they lie: bytes of a file, bytes of a pool, the length of a file."""
        store = store_of(self.cache)
        with store.lock:
            store.wait_all()
            store.prefetcher.flush()
        roles = [role for role in self.faults.tiers if role != "warm" or not self.setting.in_place]
        blocks = [b for h in store.holders for row in h.table for b in row]
        for role in roles:
            slots = [getattr(b, role) for b in blocks if getattr(b, role) is not None]
            for slot in self.rng.sample(slots, min(2, len(slots))):
                key = (role, self.rng.randrange(2), slot)
                if key not in self.faults.lasting:
                    self.spoil_one(key, self.rng.choice((*KINDS, *["truncated"] * 4)))

    def spoil_one(self, key: Key, kind: str) -> None:
        role, layer, slot = key
        tier = self.faults.tiers[role]
        if role == "cold" and kind == "truncated":
            path, offset = tier.file_of(layer, slot)
            length = offset + self.rng.randrange(len(self.faults.right(key)))
            os.truncate(path, length)
            self.faults.cut_off(path, length)
            return
        old, other = self.faults.relatives(key)
        tier.put(layer, slot, spoil(kind, self.faults.right(key), self.rng, old=old, other=other))
        self.faults.lie(role, layer, slot, kind)

    def begin(self) -> None:
        """Some tokens, so that there is a store; its tiers are faulty from then on."""
        self.forward(100)
        self.cache.crop(0)
        store_of(self.cache).wait_all()
        self.faults.into(store_of(self.cache))

    def go(self) -> None:
        """Everything that moves blocks."""
        self.begin()
        self.forward(PROMPT - 100)
        for round_number in range(3):
            for _ in range(STEPS):
                self.forward(1)
            if round_number == 0:
                self.both(lambda c: c.demote("warm"), may_not_fit=True)
                self.promote()
                if self.setting.packed:
                    self.forward(64)  # packed has room again
                    self.both(lambda c: c.demote("packed"), may_not_fit=True)
                    self.promote()
            elif round_number == 1:
                self.both(lambda c: c.demote("cold"))
                self.promote()
                self.forward(64)  # warm has room again
                self.spoil_at_rest()
            else:
                self.both(lambda c: c.crop(-40))
                self.at -= 40
                self.forward(20)
                self.spoil_at_rest()
        self.faults.read_rate = self.faults.write_rate = 0.0
        self.whole()
        for key in self.faults.lasting:
            if key[0] != "cold":
                self.faults.repair(key)  # below a hot copy, and never read
        self.both(lambda c: c.demote("cold"))  # hot copies do not hide what lies wrong in a file
        self.whole()
        self.check()

    def promote(self) -> None:
        """What lies wrong is found first: here, a read that fails has no forward that could be made again."""
        rate, self.faults.read_rate = self.faults.read_rate, 0.0
        self.whole()
        self.faults.read_rate = rate
        self.both(lambda c: c.promote())

    def both(self, action: Callable[[tieredkv.TieredCache], object], may_not_fit: bool = False) -> None:
        """The same with both caches."""
        try:
            action(self.plain)
        except tieredkv.BudgetError:
            assert may_not_fit
            return
        self.persist(lambda: action(self.cache))

    def check(self) -> None:
        counters = store_of(self.cache).counters
        if self.setting.verify == "always":
            assert self.wrong_logits == 0
            assert self.faults.lasting == []
            assert counters.checksum_failures == self.faults.handed_over_wrong
        assert counters.tier_failures == self.faults.refused + self.faults.given_up
        audit(self.cache)

    def close(self) -> None:
        if isinstance(self.device, SimulatedAccelerator):
            assert self.device.clocks.races == 0
        self.cache.close()
        self.plain.close()
        self.faults.leave()


def campaign(folder: Path, faults: int, seed: int) -> tuple[Counter[tuple[str, str]], Counter[str]]:
    """So many faults, over caches of every setting; (faults by crossing and kind, errors)."""
    injected: Counter[tuple[str, str]] = Counter()
    errors: Counter[str] = Counter()
    strangers: dict[int, list[Row]] = {}
    number = 0
    while injected.total() < faults or number < len(SETTINGS):
        trial = Trial(seed + number, folder / str(number), SETTINGS[number % len(SETTINGS)], strangers)
        trial.go()
        trial.close()
        injected += trial.faults.injected
        errors += trial.errors
        number += 1
    return injected, errors


CROSSINGS = {
    "through -> packed",
    "hot -> packed",
    "packed -> warm",
    "packed -> cold",
    "packed -> staging (blocks)",
    "packed -> staging (gather)",
    "packed -> hot",
    "at rest in packed",
    "through -> warm",
    "through -> cold",
    "hot -> warm",
    "hot -> cold",
    "warm -> cold",
    "warm -> staging (blocks)",
    "warm -> staging (gather)",
    "cold -> staging (blocks)",
    "cold -> staging (gather)",
    "cold -> hot",
    "cold -> warm",
    "at rest in warm",
    "at rest in cold",
}


def totals(injected: Counter[tuple[str, str]]) -> tuple[dict[str, int], dict[str, int]]:
    """Faults by crossing, and by kind."""
    by_crossing: dict[str, int] = defaultdict(int)
    by_kind: dict[str, int] = defaultdict(int)
    for (crossing, kind), count in injected.items():
        by_crossing[crossing] += count
        by_kind[kind] += count
    return dict(by_crossing), dict(by_kind)


def check_coverage(injected: Counter[tuple[str, str]]) -> None:
    by_crossing, by_kind = totals(injected)
    assert set(by_crossing) >= CROSSINGS, CROSSINGS - set(by_crossing)
    assert set(by_kind) >= set(KINDS), set(KINDS) - set(by_kind)
    in_packed = {kind for crossing, kind in injected if "packed" in crossing}
    assert in_packed >= set(KINDS), set(KINDS) - in_packed


def test_no_fault_is_believed(tmp_path: Path) -> None:
    injected, errors = campaign(tmp_path, 500, seed=1)
    assert injected.total() >= 500 and set(errors) == {"ChecksumError", "ColdTierError"}
    check_coverage(injected)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_faults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    injected, errors = campaign(tmp_path, 10_000, seed=1000)
    check_coverage(injected)
    by_crossing, by_kind = totals(injected)
    with capsys.disabled():
        print(f"\n{injected.total()} faults, no wrong logits; reported: {dict(errors)}")
        for name, count in [*sorted(by_crossing.items()), *sorted(by_kind.items())]:
            print(f"{count:8} {name}")


def test_the_test_sees_wrong_logits(tmp_path: Path) -> None:
    """Without verification the same faults do harm, and are seen to."""
    trial = Trial(3, tmp_path, Setting(verify="off"), {}, write_rate=0.0)
    trial.begin()
    trial.forward(PROMPT - 100)
    for _ in range(STEPS):
        trial.forward(1)
    assert trial.wrong_logits > STEPS // 2
    trial.close()
