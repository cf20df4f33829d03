"""Whole blocks from one memory to another in one call: the same bytes and sums as layer by layer, or not at all."""

from __future__ import annotations

from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from support import assert_close, audit, feed, locations, oracle, small, store_of, tiny, tokens

from tieredkv.block import Plane
from tieredkv.checksum import Checksummer
from tieredkv.compiler import Compiler
from tieredkv.device import Bounce, Event
from tieredkv.device.event import settled_event
from tieredkv.device.memory import PinnedMemory, normal_empty
from tieredkv.errors import ClosedError, MismatchError
from tieredkv.tiers import HotTier, NativeMoves, WarmTier

LAYERS = [
    (Plane("k", torch.float32, 3, (16, 24)), Plane("v", torch.float32, 3, (16, 8))),
    (Plane("k", torch.bfloat16, 1, (16, 4)), Plane("v", torch.bfloat16, 1, (16, 40))),
]


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return normal_empty(shape, dtype, "cpu")


def tiers(slots: int = 12, **warm: object) -> tuple[HotTier, WarmTier]:
    """Hot full of random bytes; nothing of warm is written."""
    hot = HotTier(LAYERS, slots, empty)
    for planes in hot.planes:
        for plane in planes:
            plane.view(torch.uint8).random_(256)
    return hot, WarmTier(LAYERS, slots, empty, **warm)  # type: ignore[arg-type]


@hypothesis.settings(max_examples=40)
@hypothesis.given(data=st.data(), summed=st.booleans())
def test_bytes_and_sums_are_those_of_single_layers(data: st.DataObject, summed: bool) -> None:
    hot, warm = tiers()
    count = data.draw(st.integers(1, 6))
    some = st.permutations(range(12)).map(lambda order: order[:count])
    sources, targets = data.draw(some), data.draw(some)
    sums = NativeMoves(Checksummer()).move(hot, sources, warm, targets, summed=summed)
    assert sums is not None
    for layer, planes in enumerate(LAYERS):
        wanted = tuple(pool[:, sources] for pool in hot.planes[layer])
        got = tuple(plane.empty(count) for plane in planes)
        warm.read(layer, targets, got)
        for a, b in zip(wanted, got, strict=True):
            assert torch.equal(a.contiguous().view(torch.uint8), b.view(torch.uint8))
        its = slice(layer * count, (layer + 1) * count)
        known = Checksummer(native=False, compiled=False).checksum(wanted).tolist() if summed else []
        assert list(sums.read[its]) == list(sums.lying[its]) == known


def test_nothing_but_the_slots_is_written() -> None:
    hot, warm = tiers()
    for layer in range(len(LAYERS)):
        for plane in warm.run(layer, 0, 12):
            plane.view(torch.uint8).fill_(7)
    assert NativeMoves(Checksummer()).move(hot, [3], warm, [5], summed=True) is not None
    for layer in range(len(LAYERS)):
        for plane in warm.run(layer, 0, 12):
            others = plane[:, [slot for slot in range(12) if slot != 5]]
            assert (others.contiguous().view(torch.uint8) == 7).all()


def test_memory_in_several_pieces_or_behind_something_is_left_to_others() -> None:
    moves, block_bytes = NativeMoves(Checksummer()), tiers()[0].slot_bytes
    hot, warm = tiers(pieces="growing", first_piece_bytes=4 * block_bytes)
    assert moves.move(hot, [0], warm, [0], summed=True) is None and warm.reserved_bytes == 0
    bounce = Bounce(PinnedMemory(0), lambda: settled_event(Event("nothing")))
    assert moves.move(*swapped(tiers(bounce=bounce)), summed=True) is None
    assert moves.native_reason is None


def swapped(both: tuple[HotTier, WarmTier]) -> tuple[HotTier, list[int], WarmTier, list[int]]:
    return both[0], [0], both[1], [0]


def test_a_slot_that_is_none_and_a_closed_tier_are_refused() -> None:
    moves, (hot, warm) = NativeMoves(Checksummer()), tiers()
    for sources, targets in (([12], [0]), ([0], [12]), ([-1], [0])):
        with pytest.raises(MismatchError, match="outside"):
            moves.move(hot, sources, warm, targets, summed=True)
    assert moves.move(hot, [0], warm, [0], summed=True) is not None
    warm.close()
    with pytest.raises(ClosedError):
        moves.move(hot, [0], warm, [0], summed=True)


def test_without_a_compiler_it_says_so_once(tmp_path: Path) -> None:
    moves = NativeMoves(Checksummer(), Compiler(tmp_path, str(tmp_path / "none")))
    moves._compiler._build = no_compiler  # type: ignore[method-assign, union-attr]
    with pytest.warns(RuntimeWarning, match="copies down in memory"):
        assert moves.move(*swapped(tiers()), summed=True) is None
    assert "copies down" in (moves.native_reason or "")
    assert moves.move(*swapped(tiers()), summed=True) is None


def no_compiler(*_: object) -> Path:
    raise FileNotFoundError("no C++ compiler")


@pytest.mark.parametrize("verify", ["always", "first", "off"])
def test_a_cache_moves_its_blocks_so(monkeypatch: pytest.MonkeyPatch, verify: str) -> None:
    calls, move = [], NativeMoves.move

    def noted(*arguments: object, **summed: bool) -> object:
        calls.append(summed["summed"])
        return move(*arguments, **summed)  # type: ignore[arg-type]

    monkeypatch.setattr(NativeMoves, "move", noted)
    monkeypatch.setattr(WarmTier, "write", None)
    model, ids = tiny(), tokens(40)
    with small(model, None, warm="512 tokens", verify=verify) as cache:
        first = feed(model, ids[:, :33], cache)
        assert cache.demote("warm") == 2
        assert locations(cache)[:2] == ["warm"] * 2 and calls == [verify != "off"]
        sums = [block.checksums for block in cache.parts().holder.table.rows[0][:2]]  # type: ignore[union-attr]
        assert all((value is None) == (verify == "off") for each in sums for value in each)
        rest = feed(model, ids[:, 33:], cache)
        assert_close(torch.cat([first, rest], 1), oracle(ids))
        assert store_of(cache).counters.checksum_failures == 0
        audit(cache)
