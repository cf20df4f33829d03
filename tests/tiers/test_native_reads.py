"""Many stretches of files in one call, and the cold tier that reads through it."""

from __future__ import annotations

import array
import ctypes
import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import assert_close, audit, feed, oracle, small, store_of, tiny, tokens

import tieredkv
from tieredkv.block import Plane
from tieredkv.checksum import Checksummer
from tieredkv.compiler import Compiler
from tieredkv.errors import ChecksumError, ColdTierError
from tieredkv.tiers import ColdTier
from tieredkv.tiers.native_reads import END, MOST_PIECES, NativeReads, Stretch, reason

LAYERS = [(Plane("k", torch.bfloat16, 3, (64, 16)), Plane("v", torch.float32, 2, (64, 8)))] * 2


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    """As on a machine with two cores, whatever else is tested at the moment."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[tuple[int, np.ndarray]]:
    """(descriptor, contents) of 100,000 bytes."""
    data = np.random.default_rng(0).integers(0, 256, 100_000, dtype=np.uint8)
    (tmp_path / "file").write_bytes(data.tobytes())
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    yield descriptor, data
    os.close(descriptor)


def pieces_of(memory: np.ndarray, sizes: list[int]) -> array.array[int]:
    """Address and bytes of pieces that lie one after the other, a byte apart."""
    pieces, at = array.array("Q"), memory.ctypes.data
    for size in sizes:
        pieces.extend((at, size))
        at += size + 1
    return pieces


def test_every_piece_of_every_stretch(file: tuple[int, np.ndarray]) -> None:
    descriptor, data = file
    many = [3] * (2 * MOST_PIECES + 7)  # more than one call of the system takes
    wanted = [(0, [5, 100, 1]), (777, many), (40_000, [20_000]), (99_999, [1])]
    memories = [np.full(sum(sizes) + len(sizes), 255, np.uint8) for _, sizes in wanted]
    stretches = [
        Stretch(descriptor, at, pieces_of(memory, sizes)) for (at, sizes), memory in zip(wanted, memories, strict=True)
    ]
    assert NativeReads().read(stretches) == ([0] * 4, None)
    for (at, sizes), memory in zip(wanted, memories, strict=True):
        ends = np.cumsum(np.array(sizes) + 1)
        assert np.array_equal(np.delete(memory, ends - 1), data[at : at + sum(sizes)])
        assert (memory[ends - 1] == 255).all()  # what lies between pieces is not touched
    assert NativeReads().read([]) == ([], None)


def test_what_cannot_be_read_is_told_and_the_rest_is_read(file: tuple[int, np.ndarray], tmp_path: Path) -> None:
    descriptor, data = file
    memory = np.zeros((3, 10), np.uint8)
    closed = os.open(tmp_path / "file", os.O_RDONLY)
    os.close(closed)
    pieces = [pieces_of(row, [10]) for row in memory]
    outcomes, _ = NativeReads().read(
        [Stretch(closed, 0, pieces[0]), Stretch(descriptor, 99_995, pieces[1]), Stretch(descriptor, 7, pieces[2])]
    )
    assert outcomes == [errno.EBADF, END, 0]
    assert np.array_equal(memory[2], data[7:17])
    assert reason(errno.EBADF).errno == errno.EBADF
    assert "ends" in str(reason(END))


class ShortReads(Compiler):
    """Compiles for a system whose every read of a file gives so many bytes at most, as any may."""

    def __init__(self, most_bytes: int) -> None:
        super().__init__()
        self._most_bytes = most_bytes

    def load(self, name: str, source: str, defines: Mapping[str, int]) -> ctypes.CDLL:
        short = """
#include <sys/uio.h>
static ssize_t short_preadv(int file, const iovec* pieces, int count, off_t offset) {
  iovec some[64];
  int used = 0;
  for (size_t left = MOST_BYTES; left && used < count && used < 64; used++) {
    some[used] = pieces[used];
    if (some[used].iov_len > left) some[used].iov_len = left;
    left -= some[used].iov_len;
  }
  return preadv(file, some, used, offset);
}
#define preadv short_preadv
"""
        return super().load(name, short + source, {**defines, "MOST_BYTES": self._most_bytes})


@pytest.mark.parametrize("most_bytes", [7, 40, 64, 100])
def test_a_read_that_stops_within_a_piece_goes_on_there_and_is_summed_whole(
    file: tuple[int, np.ndarray], most_bytes: int
) -> None:
    descriptor, data = file
    sizes, blocks, summer = [64, 32], 5, Checksummer()
    memory = np.zeros(blocks * sum(sizes), np.uint64).view(np.uint8)[: blocks * sum(sizes)]
    pieces, at = array.array("Q"), memory.ctypes.data
    for size in sizes * blocks:
        pieces.extend((at, size))
        at += size
    before = pieces[:]
    outcomes, sums = NativeReads(ShortReads(most_bytes)).read(
        [Stretch(descriptor, 13, pieces)], len(sizes), (summer, sum(sizes))
    )
    assert outcomes == [0] and pieces == before
    assert np.array_equal(memory, data[13 : 13 + len(memory)])
    wanted = torch.from_numpy(memory.reshape(blocks, sum(sizes)).copy()).view(torch.int64)
    assert sums == summer.checksum((wanted[None],)).tolist()


def filled(folder: Path, count: int) -> tuple[ColdTier, list[int], list[tuple[torch.Tensor, ...]]]:
    """(tier, slots, what was written to each layer)."""
    tier = ColdTier(folder, LAYERS, block_size=64, codec="raw", fingerprint="0" * 32)
    tier._plan.per_file = 3  # several files
    slots = tier.slots.allocate_many(count)
    written = [tuple(torch.randn(p.kv_heads, count, *p.inner).to(p.dtype) for p in planes) for planes in LAYERS]
    for layer, planes in enumerate(written):
        tier.write(layer, slots, planes)
    return tier, slots, written


def change_a_byte(tier: ColdTier, layer: int, slot: int) -> None:
    """Of what a slot holds of a layer, on disk."""
    number, offset = tier._place(layer, slot)
    with tier._files.path(number).open("r+b") as file:
        file.seek(offset + 3)
        byte = file.read(1)[0]
        file.seek(offset + 3)
        file.write(bytes([byte ^ 16]))


def test_a_tier_reads_the_same_at_once(cold_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, slots, written = filled(cold_dir, 10)
    monkeypatch.setattr("tieredkv.tiers.cold.AT_ONCE_BYTES", 1)
    monkeypatch.setattr(os, "preadv", lambda *_: pytest.fail("read one by one"))
    order = [5, 0, 1, 2, 9, 7]
    for layer, planes in enumerate(written):
        for _ in range(2):  # the second time the addresses are known
            wide = tuple(torch.full((p.kv_heads, 9, *p.inner), 7.0).to(p.dtype) for p in LAYERS[layer])
            tier.read(layer, [slots[i] for i in order], tuple(plane[:, 2:8] for plane in wide))
            for plane, wanted in zip(wide, planes, strict=True):
                assert torch.equal(plane[:, 2:8], wanted[:, order])
                assert (plane[:, [0, 1, 8]] == 7).all()


def test_checksums_are_taken_on_the_way(cold_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, slots, written = filled(cold_dir, 10)
    monkeypatch.setattr("tieredkv.tiers.cold.AT_ONCE_BYTES", 1)
    summer, order = Checksummer(), [5, 0, 1, 2, 9, 7]
    for layer, planes in enumerate(written):
        out = tuple(torch.empty(p.kv_heads, 6, *p.inner, dtype=p.dtype) for p in LAYERS[layer])
        sums = tier.read_summed(layer, [slots[i] for i in order], out, summer)
        assert sums == summer.checksum(tuple(plane[:, order] for plane in planes)).tolist()
        assert all(torch.equal(mine, theirs[:, order]) for mine, theirs in zip(out, planes, strict=True))
    change_a_byte(tier, 0, slots[0])
    out = tuple(torch.empty(p.kv_heads, 2, *p.inner, dtype=p.dtype) for p in LAYERS[0])
    sums, right = tier.read_summed(0, slots[:2], out, summer), summer.checksum(written[0]).tolist()
    assert sums is not None and sums[0] != right[0] and sums[1] == right[1]
    assert sums == summer.checksum(out).tolist()
    assert tier.read_summed(0, slots[:2], out, Checksummer(native=False)) is None


def test_few_bytes_go_the_usual_way(cold_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, slots, _ = filled(cold_dir, 4)
    monkeypatch.setattr(NativeReads, "read", lambda *_: pytest.fail("read at once"))
    tier.read(0, slots, tuple(torch.empty(p.kv_heads, 4, *p.inner, dtype=p.dtype) for p in LAYERS[0]))


def test_a_read_has_no_more_files_open_than_the_tier(cold_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, slots, written = filled(cold_dir, 30)  # ten files
    monkeypatch.setattr("tieredkv.tiers.cold.AT_ONCE_BYTES", 1)
    monkeypatch.setattr("tieredkv.tiers.cold.MAX_OPEN_FILES", 4)
    most, read = [0], NativeReads.read

    def counted(self: NativeReads, stretches: Sequence[Stretch], *rest: Any) -> Any:
        most[0] = max(most[0], len({each.descriptor for each in stretches}))
        return read(self, stretches, *rest)

    monkeypatch.setattr(NativeReads, "read", counted)
    order = [*range(0, 30, 2), *range(1, 30, 2)]  # each file twice, in places apart
    out = tuple(torch.empty(p.kv_heads, 30, *p.inner, dtype=p.dtype) for p in LAYERS[0])
    tier.read(0, [slots[i] for i in order], out)
    assert 1 < most[0] <= 4
    for plane, wanted in zip(out, written[0], strict=True):
        assert torch.equal(plane, wanted[:, order])


def test_a_lost_file_is_an_error(cold_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, slots, _ = filled(cold_dir, 10)
    monkeypatch.setattr("tieredkv.tiers.cold.AT_ONCE_BYTES", 1)
    out = tuple(torch.empty(p.kv_heads, 10, *p.inner, dtype=p.dtype) for p in LAYERS[0])
    tier.read(0, slots, out)
    paths = sorted(tier.folder.rglob("*.safetensors"))
    os.truncate(paths[1], 5000)
    with pytest.raises(ColdTierError, match="cannot be read"):
        tier.read(0, slots, out)
    tier.read(0, slots[:3], tuple(plane[:, :3] for plane in out))


def test_without_a_compiler_files_are_read_one_by_one(
    cold_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, slots, written = filled(cold_dir, 10)
    monkeypatch.setattr("tieredkv.tiers.cold.AT_ONCE_BYTES", 1)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    out = tuple(torch.empty(p.kv_heads, 10, *p.inner, dtype=p.dtype) for p in LAYERS[0])
    with pytest.warns(RuntimeWarning, match="slower without C"):
        tier.read(0, slots, out)
    assert torch.equal(out[0], written[0][0])
    assert "compiler" in (tier.native_reason or "")


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_a_cache_that_streams_from_files_at_once(cold_dir: Path, monkeypatch: pytest.MonkeyPatch, codec: Any) -> None:
    monkeypatch.setattr("tieredkv.tiers.rows.LEAST_PIECE_BYTES", 1)
    calls, read = [0], NativeReads.read

    def counted(self: NativeReads, stretches: Sequence[Stretch], *rest: Any) -> Any:
        calls[0] += 1
        return read(self, stretches, *rest)

    monkeypatch.setattr(NativeReads, "read", counted)
    settings, model, ids, got = tieredkv.CacheSettings(codec=codec), tiny(), tokens(140), []
    for least in (1, 1 << 40):
        monkeypatch.setattr("tieredkv.tiers.cold.AT_ONCE_BYTES", least)
        with small(model, cold_dir, warm=0, settings=settings) as cache:
            got.append(feed(model, ids, cache, [100, 20, *[1] * 20]))
            assert store_of(cache).tiers["cold"].slots.used > 2
            audit(cache)
        assert (calls[0] > 20) == (least == 1)
        calls[0] = 0
    assert torch.equal(*got)
    if codec == "raw":
        assert_close(got[0], oracle(ids))


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_a_byte_that_changed_on_disk_is_seen(cold_dir: Path, monkeypatch: pytest.MonkeyPatch, codec: Any) -> None:
    settings, model, ids = tieredkv.CacheSettings(codec=codec), tiny(), tokens(140)
    with small(model, cold_dir, warm=0, settings=settings) as cache:
        feed(model, ids, cache, [100, 1])
        tier = store_of(cache).tiers["cold"]
        assert isinstance(tier, ColdTier)
        monkeypatch.setattr("tieredkv.tiers.rows.LEAST_PIECE_BYTES", 1)
        monkeypatch.setattr("tieredkv.tiers.cold.AT_ONCE_BYTES", 1)
        block = next(b for b in cache.parts().holder.table.blocks() if b.hot is None and b.cold is not None)
        change_a_byte(tier, 1, block.cold)
        with pytest.raises(ChecksumError, match=f"[Bb]lock {block.id}"):
            feed(model, ids[:, 101:102], cache)
        assert cache.stats().checksum_failures >= 2  # read once more, and no other tier has it
