"""A lower tier that spoils what goes through it, and knows what it spoiled.

It keeps the right bytes of every block and layer that was written, so that it knows of each read whether what it hands
over is right: a wrong piece that nobody notices is found by counting, however small its effect on logits.

Imports: tieredkv, numpy, torch.
"""

from __future__ import annotations

import array
import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tieredkv.block import LOWER, Block, Planes
from tieredkv.checksum import Checksummer
from tieredkv.errors import ChecksumError, ColdTierError
from tieredkv.store import BlockStore
from tieredkv.tiers import Tier, pack_rows, row_bytes, unpack_rows
from tieredkv.tiers.native_moves import Sums
from tieredkv.transfer import Move, Mover

Row = np.ndarray[Any, np.dtype[np.uint8]]
"""One block of one layer as bytes, in row order."""

Key = tuple[str, int, int]
"""(tier, layer, slot)."""

IN_MEMORY = ("packed", "warm")
"""Tiers that compare what was written as soon as it has arrived."""

KINDS = ("bit", "bits", "signs", "lanes", "truncated", "torn", "swapped", "stale", "foreign")


def spoil(kind: str, right: Row, rng: random.Random, *, old: Row, other: Row) -> Row:
    """A wrong version of a row; one flipped bit where the kind would change nothing."""
    row = right.copy()
    words = row.view(np.uint64)
    if kind == "bits":
        for _ in range(rng.randint(2, 64)):
            row[rng.randrange(len(row))] ^= 1 << rng.randrange(8)
    elif kind == "signs":
        for index in rng.sample(range(len(words)), 2):
            words[index] ^= np.uint64(1 << 63)
    elif kind == "lanes":
        first, second = rng.sample(range(len(words)), 2)
        words[[first, second]] = words[[second, first]]
    elif kind == "truncated":
        row[rng.randrange(len(row)) :] = 0
    elif kind == "torn":
        at = rng.randrange(len(row))
        row[at:] = old[at:]
    elif kind == "stale":
        row[:] = old
    elif kind in ("foreign", "swapped"):
        row[:] = other
    if np.array_equal(row, right):
        row[rng.randrange(len(row))] ^= 1 << rng.randrange(8)
    return row


class Faults:
    """What was spoiled in one cache, and what came of it. Thread-safe.

    Args:
        seed: decides every fault, by tier, layer, slot and how often that was used: threads do not matter.
        read_rate: share of the pieces (one block, one layer) that are spoiled in a read.
        write_rate: the same in a write; what is spoiled on its way to a disk stays so until it is repaired.
        twice: share of the spoiled reads of which the repetition is spoiled too.
        strangers: rows of other caches, by size; filled here.
    """

    def __init__(
        self, seed: int, *, read_rate: float, write_rate: float, twice: float, strangers: dict[int, list[Row]]
    ) -> None:
        self._seed, self.read_rate, self.write_rate, self._twice = seed, read_rate, write_rate, twice
        self._strangers = strangers
        self._lock = threading.RLock()
        self._right: dict[Key, Row] = {}
        self._old: dict[Key, Row] = {}
        self._uses: Counter[Key] = Counter()
        self._next: dict[Key, str] = {}  # "right" or "wrong": what the repetition of a read or write is to be
        self._lasting: dict[Key, tuple[str, str]] = {}  # (crossing, kind) of bytes that lie wrong in a tier
        self._cut: set[Key] = set()
        self._gone: set[Key] = set()
        self._ways: dict[int | tuple[str, int], str] = {}  # of the last move of a block, and out of a slot
        self.injected: Counter[tuple[str, str]] = Counter()  # by (crossing, kind), once handed over
        self.handed_over_wrong = 0
        self.refused = 0
        self.given_up = 0  # copies to a lower tier of what lay wrong where they were taken from
        self.tiers: dict[str, Faulty] = {}
        self.way = "blocks"
        self._local = threading.local()

    @property
    def total(self) -> int:
        """Faults so far."""
        return sum(self.injected.values())

    def into(self, store: BlockStore) -> None:
        """Put a faulty tier in front of each lower tier of a store at rest; writes say what they are for."""
        staging = {buffer.memory.untyped_storage().data_ptr() for buffer in store.prefetcher._buffers}
        for role in LOWER:
            if role in store.tiers:
                inner = store.tiers[role]
                self.tiers[role] = Faulty(inner, self, staging)
                store.tiers[role] = self.tiers[role]  # type: ignore[assignment]
                slots = [slot for slot in range(inner.slots.total) if inner.slots.holds(slot)]
                for layer in range(len(inner.layers)):
                    for slot, row in zip(slots, self.tiers[role].rows(layer, slots), strict=True):
                        self._right[(role, layer, slot)], self._old[(role, layer, slot)] = row, np.zeros_like(row)
        self._label(store.mover)
        tell = store._lower_failed

        def counted(target: str, failure: Exception) -> None:
            self.given_up += isinstance(failure, ChecksumError) and failure.tier != target
            tell(target, failure)

        store._lower_failed = counted  # type: ignore[method-assign]

    def _label(self, mover: Mover) -> None:
        """Know of each copy on its way down which crossing it is."""
        demote, store = mover.demote, mover._store

        def demotes(blocks: Sequence[Block], source: str, target: str, *rest: Any) -> Move:
            for block in blocks:
                self._ways[block.id] = self._ways[source, getattr(block, source)] = f"{source} -> {target}"
            return demote(blocks, source, target, *rest)

        def stores(layer: int, blocks: Sequence[Block], target: str, *rest: Any, **keywords: Any) -> None:
            self._local.crossing = self._ways.get(blocks[0].id, f"through -> {target}")
            store(layer, blocks, target, *rest, **keywords)

        move = mover._native_moves.move

        def moves(source: Tier, source_slots: Sequence[int], target: Any, slots: Sequence[int], *, summed: bool) -> Any:
            if type(target) is not Faulty:
                return move(source, source_slots, target, slots, summed=summed)
            self._local.crossing = f"{source.role} -> {target.role}"
            return target.moved(lambda inner: move(source, source_slots, inner, slots, summed=summed), slots)

        mover.demote, mover._store = demotes, stores  # type: ignore[method-assign]
        mover._native_moves.move = moves  # type: ignore[method-assign]

    def way_out_of(self, role: str, slot: int) -> str:
        """The crossing of the move that reads a slot."""
        return self._ways[role, slot]

    def written(self, role: str, layer: int, slots: Sequence[int], rows: Row) -> None:
        """Take note of right rows [n, row_bytes] on their way into a tier, and spoil some of them in place."""
        with self._lock:
            for slot, row in zip(slots, rows, strict=True):
                key = (role, layer, slot)
                old = self._right.get(key)
                if old is None or not np.array_equal(old, row):  # else the same once more
                    self._old[key] = np.zeros_like(row) if old is None else old
                    self._right[key] = row.copy()
                self._lasting.pop(key, None)
            self._spoil_some(role, layer, slots, rows, self.write_rate, self._local.crossing, lasting=True)

    def arrived(self, role: str, layer: int, slots: Sequence[int]) -> None:
        """What was written to memory is compared at once."""
        with self._lock:
            for slot in slots:
                self._hand_over((role, layer, slot))

    def read(self, role: str, layer: int, slots: Sequence[int], rows: Row, crossing: str) -> bool:
        """Spoil some of the rows [n, row_bytes] that were read; whether any was."""
        with self._lock:
            before = rows.copy()
            self._spoil_some(role, layer, slots, rows, self.read_rate, crossing, lasting=False)
            for slot, row in zip(slots, rows, strict=True):
                key = (role, layer, slot)
                if not np.array_equal(row, self._right[key]):
                    self.handed_over_wrong += 1
                    if key in self._lasting:
                        self.injected[self._lasting[key]] += 1
                        self._lasting[key] = ("again", "")
            del self.injected[("again", "")]
            return not np.array_equal(before, rows)

    def refuse(self, layer: int, slots: Sequence[int]) -> None:
        """A cold read failed."""
        with self._lock:
            self.refused += 1
            for key in [("cold", layer, slot) for slot in slots]:
                if key in self._gone:
                    self._gone.discard(key)
                    self.injected[("at rest in cold", "truncated")] += 1

    def cut_off(self, path: Path, length: int) -> None:
        """A file was cut by a test: what lay behind is gone, until the next `repair`."""
        with self._lock:
            cold = self.tiers["cold"]
            for key in self._right:
                if key[0] == "cold":
                    own_path, offset = cold.file_of(key[1], key[2])
                    if own_path == path and offset + len(self._right[key]) > length:
                        self._gone.add(key)
                        self._cut.add(key)

    def lie(self, role: str, layer: int, slot: int, kind: str) -> None:
        """A block at rest was spoiled by a test."""
        with self._lock:
            self._lasting[(role, layer, slot)] = (f"at rest in {role}", kind)

    def right(self, key: Key) -> Row:
        """The right bytes."""
        return self._right[key]

    def relatives(self, key: Key) -> tuple[Row, Row]:
        """(what the slot held before, some other block of the layer, if there is one)."""
        rng = random.Random(f"{self._seed} {key}")
        return self._old[key], self._other(key, rng)

    @property
    def lasting(self) -> list[Key]:
        """What lies wrong in a tier, in a slot that is in use."""
        return [key for key in self._lasting if self.tiers[key[0]].slots.holds(key[2])]

    def repair(self, key: Key) -> None:
        """Put the right bytes back where they lie, those of a file that was cut too."""
        with self._lock:
            for role, layer, slot in (key, *self._cut):
                self._lasting.pop((role, layer, slot), None)
                self.tiers[role].put(layer, slot, self._right[(role, layer, slot)])
            self._cut.clear()

    def leave(self) -> None:
        """Show this cache's rows to those that come after."""
        for row in list(self._right.values())[-40:]:
            self._strangers.setdefault(len(row), []).append(row)
            del self._strangers[len(row)][:-40]

    def _hand_over(self, key: Key) -> None:
        if key in self._lasting:
            self.injected[self._lasting[key]] += 1
            self.handed_over_wrong += 1

    def _spoil_some(
        self, role: str, layer: int, slots: Sequence[int], rows: Row, rate: float, crossing: str, *, lasting: bool
    ) -> None:
        spoiled: set[int] = set()
        # Where no forward could be made again, nothing is wrong twice: such failures have tests of their own.
        twice = self._twice if "staging" in crossing else 0.0
        for index, slot in enumerate(slots):
            key = (role, layer, slot)
            self._uses[key] += 1
            rng = random.Random(f"{self._seed} {key} {self._uses[key]} {lasting}")
            asked = self._next.pop(key, None)
            is_wrong = rng.random() < rate if asked is None else asked == "wrong"
            if not is_wrong or index in spoiled or key in self._lasting:
                continue
            kind, partner = rng.choice(KINDS), index
            if kind == "swapped" and len(slots) > 1:
                partner = (index + rng.randrange(1, len(slots))) % len(slots)
                if partner in spoiled or (role, layer, slots[partner]) in self._lasting:
                    partner = index
            for at, other in {index: partner, partner: index}.items():
                known = self._right[(role, layer, slots[other])] if at != other else self._other(key, rng)
                one = (role, layer, slots[at])
                rows[at] = spoil(kind, self._right[one], rng, old=self._old[one], other=known)
                spoiled.add(at)
                if lasting:
                    self._lasting[one] = (crossing, kind)
                else:
                    self.injected[(crossing, kind)] += 1
                if not lasting:
                    self._next[one] = "wrong" if asked is None and rng.random() < twice else "right"
        if lasting and spoiled and role in IN_MEMORY:
            self._next |= {(role, layer, slot): "right" for slot in slots}  # all of them are written again

    def _other(self, key: Key, rng: random.Random) -> Row:
        """A row of another sequence, or of another block of this one."""
        right = self._right[key]
        strangers = self._strangers.get(len(right), [])
        own = [row for other, row in self._right.items() if other != key and len(row) == len(right)]
        return rng.choice(strangers or own or [right])


class Faulty:
    """A tier that is like another in everything but that its reads and writes go through `Faults`."""

    def __init__(self, inner: Tier, faults: Faults, staging: set[int]) -> None:
        self._inner, self._faults, self._staging = inner, faults, staging

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @property
    def __class__(self) -> Any:
        """Copies ask whether a tier lies on the device: they are told of the inner one."""
        return type(self._inner)

    def write(self, layer: int, slots: Sequence[int], planes: Planes, **_: Any) -> None:
        spec = self._inner.layers[layer]
        rows = torch.empty((len(slots), row_bytes(spec)), dtype=torch.uint8)
        pack_rows(spec, planes, rows)
        self._faults.written(self._inner.role, layer, slots, rows.numpy())
        out = tuple(plane.empty(len(slots)) for plane in spec)
        unpack_rows(spec, rows, out)
        self._inner.write(layer, slots, out)
        if self._inner.role in IN_MEMORY:
            self._faults.arrived(self._inner.role, layer, slots)

    def moved(self, move: Callable[[Tier], Sums | None], slots: Sequence[int]) -> Sums | None:
        """A move of whole blocks into slots, all layers at once, some of which come to lie as other bytes."""
        sums = move(self._inner)
        for layer in range(len(self._inner.layers) if sums is not None else 0):
            rows = np.stack(self.rows(layer, slots))
            self._faults.written(self._inner.role, layer, slots, rows)
            for index, slot in enumerate(slots):
                self.put(layer, slot, rows[index])
            if sums is not None and sums.lying:
                first = layer * len(slots)
                lying = Checksummer().checksum_rows(torch.from_numpy(rows))
                sums.lying[first : first + len(slots)] = array.array("q", lying.tolist())
            self._faults.arrived(self._inner.role, layer, slots)
        return sums

    def read(self, layer: int, slots: Sequence[int], out: Planes, **_: Any) -> None:
        try:
            self._inner.read(layer, slots, out)
        except ColdTierError:
            self._faults.refuse(layer, slots)
            raise
        if threading.current_thread().name in ("tieredkv-down", "tieredkv-disk"):
            crossing = self._faults.way_out_of(self._inner.role, slots[0])
        elif out[0].untyped_storage().data_ptr() in self._staging:
            crossing = f"{self._inner.role} -> staging ({self._faults.way})"
        else:
            crossing = f"{self._inner.role} -> hot"
        spec = self._inner.layers[layer]
        rows = torch.empty((len(slots), row_bytes(spec)), dtype=torch.uint8)
        pack_rows(spec, out, rows)
        if self._faults.read(self._inner.role, layer, slots, rows.numpy(), crossing):
            unpack_rows(spec, rows, out)

    def read_summed(self, layer: int, slots: Sequence[int], out: Planes, checksummer: Checksummer) -> list[int] | None:
        if self._inner.read_summed(layer, slots, out, checksummer) is None:
            return None
        self.read(layer, slots, out)  # spoiled between the medium and the memory that is summed
        return checksummer.checksum(out).tolist()

    def rows(self, layer: int, slots: Sequence[int]) -> list[Row]:
        """What lies in slots."""
        spec = self._inner.layers[layer]
        rows = torch.empty((len(slots), row_bytes(spec)), dtype=torch.uint8)
        out = tuple(plane.empty(len(slots)) for plane in spec)
        if slots:
            self._inner.read(layer, slots, out)
            pack_rows(spec, out, rows)
        return [row.numpy().copy() for row in rows]

    def put(self, layer: int, slot: int, row: Row) -> None:
        """Write bytes into the medium itself, past everything."""
        if self._inner.role in IN_MEMORY:
            views = self._inner.run(layer, slot, 1)
            assert views is not None
            unpack_rows(self._inner.layers[layer], torch.from_numpy(row.copy())[None], views)
            return
        path, offset = self.file_of(layer, slot)
        with path.open("r+b") as file:
            os.pwrite(file.fileno(), row.tobytes(), offset)

    def file_of(self, layer: int, slot: int) -> tuple[Path, int]:
        """(file, position) of a cold block's layer."""
        cold: Any = self._inner
        number, offset = cold._place(layer, slot)
        return cold._files.path(number), offset


def key_of(error: ChecksumError | ColdTierError, store: BlockStore) -> Key:
    """What an error names; fails the test if it names nothing."""
    if isinstance(error, ChecksumError):
        block, layer, tier = error.block, error.layer, error.tier
        assert str(error.wanted).startswith("0x") and str(error.got).startswith("0x") and error.wanted != error.got
    else:
        words = error.what.replace(",", "").rstrip(".").split()
        assert (words[0], words[2], words[4:8]) == ("Block", "layer", ["cannot", "be", "read", "from"]), error.what
        block, layer, tier = int(words[1]), int(words[3]), words[8]
        assert "checksum 0x" in str(error.wanted)
    slots = [getattr(b, tier) for holder in store.holders for row in holder.table for b in row if b.id == block]
    assert slots and slots[0] is not None, error
    return (tier, layer, slots[0])
