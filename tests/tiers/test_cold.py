"""The cold tier: safetensors files, caps and floors, failures of the disk, and what is left behind."""

from __future__ import annotations

import errno
import gc
import json
import os
import random
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tieredkv.block import Plane, Planes
from tieredkv.device import CudaDevice
from tieredkv.errors import BudgetError, ColdTierError, ConfigError, MismatchError
from tieredkv.tiers import ColdTier, blocks_per_file, cold_bytes, pack_rows, slot_bytes
from tieredkv.tiers.cold import MAX_OPEN_FILES
from tieredkv.tiers.cold_folder import LOCK_NAME

LAYERS = [
    (Plane("k", torch.bfloat16, 2, (16, 4)), Plane("v", torch.bfloat16, 2, (16, 8))),
    (Plane("k", torch.float32, 1, (16, 4)), Plane("v", torch.float32, 1, (16, 2))),
]
SAYS = {"block_size": 16, "codec": "raw", "fingerprint": "model-1"}
PER_FILE = blocks_per_file(slot_bytes(LAYERS))


@pytest.fixture
def tier(cold_dir: Path) -> Iterator[ColdTier]:
    made = ColdTier(cold_dir, LAYERS, **SAYS)
    yield made
    made.close()


def fill(tier: ColdTier, slots: list[int]) -> list[Planes]:
    written = []
    for layer, planes in enumerate(tier.layers):
        data = tuple(torch.randn(p.kv_heads, len(slots), *p.inner).to(p.dtype) for p in planes)
        tier.write(layer, slots, data)
        written.append(data)
    return written


def holds(tier: ColdTier, slots: list[int], written: list[Planes]) -> bool:
    same = True
    for layer, planes in enumerate(tier.layers):
        out = tuple(plane.empty(len(slots)) for plane in planes)
        tier.read(layer, slots, out)
        same &= all(torch.equal(a, b) for a, b in zip(out, written[layer], strict=True))
    return same


def files(tier: ColdTier) -> list[Path]:
    return sorted(tier.folder.rglob("*.safetensors"))


def disk_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


# ---- format


def test_files_are_valid_safetensors_and_say_what_they_are(tier: ColdTier) -> None:
    slots = tier.slots.allocate_many(PER_FILE + 2)
    written = fill(tier, slots)
    assert [path.name for path in files(tier)] == ["00000000.safetensors", "00000001.safetensors"]
    for number, path in enumerate(files(tier)):
        with safe_open(path, framework="pt") as opened:
            about = opened.metadata()
            assert list(opened.keys()) == ["layer.0", "layer.1"]
            for layer, planes in enumerate(tier.layers):
                rows = opened.get_tensor(f"layer.{layer}")
                assert rows.dtype == torch.uint8
                first = number * PER_FILE
                count = min(PER_FILE, len(slots) - first)
                wanted = torch.empty((count, rows.shape[1]), dtype=torch.uint8)
                pack_rows(planes, tuple(p[:, first : first + count] for p in written[layer]), wanted)
                assert torch.equal(rows[:count], wanted)
        assert about | SAYS | {"block_size": "16"} == about
        assert about["format_version"] == "1"
        assert json.loads(about["geometry"])[0] == [["k", "bfloat16", 2, [16, 4]], ["v", "bfloat16", 2, [16, 8]]]


def test_rows_begin_at_a_multiple_of_4096(tier: ColdTier) -> None:
    fill(tier, tier.slots.allocate_many(1))
    with files(tier)[0].open("rb") as file:
        assert (8 + int.from_bytes(file.read(8), "little")) % 4096 == 0


def test_one_layer_of_neighbours_is_one_read(tier: ColdTier, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = tier.slots.allocate_many(PER_FILE)
    fill(tier, slots)
    sizes: list[int] = []
    real = os.preadv

    def counted(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        sizes.append(sum(len(buffer) for buffer in buffers))
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    rows = tier.read_rows(0, slots[3:40])
    assert sizes == [rows.numel()]


def test_short_writes_and_reads_are_carried_on(tier: ColdTier, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = tier.slots.allocate_many(5)
    pwritev, preadv = os.pwritev, os.preadv
    fill(tier, slots)
    monkeypatch.setattr(os, "pwritev", lambda fd, data, offset: pwritev(fd, [data[0][:100]], offset))
    monkeypatch.setattr(os, "preadv", lambda fd, data, offset: preadv(fd, [data[0][:77]], offset))
    assert holds(tier, slots, fill(tier, slots))


@pytest.mark.parametrize("most", [777, 100_000])
def test_large_pieces_are_read_straight_into_place(cold_dir: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    layers = [(Plane("k", torch.bfloat16, 3, (64, 16)), Plane("v", torch.float32, 2, (64, 8)))]
    tier = ColdTier(cold_dir, layers, **SAYS)
    slots = tier.slots.allocate_many(7)
    written = tuple(torch.randn(p.kv_heads, 7, *p.inner).to(p.dtype) for p in layers[0])
    tier.write(0, slots, written)
    real = os.preadv
    monkeypatch.setattr("tieredkv.tiers.cold_files.MOST_PIECES", 4)

    def some(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        return real(descriptor, [buffers[0][:most], *(buffers[1:] if most > len(buffers[0]) else [])], offset)

    monkeypatch.setattr(os, "preadv", some)
    monkeypatch.setattr(tier, "read_rows", lambda *_: pytest.fail("read in a second place first"))
    order = [5, 0, 1, 2, 6]
    wide = tuple(torch.full((p.kv_heads, 9, *p.inner), 7.0).to(p.dtype) for p in layers[0])
    tier.read(0, [slots[i] for i in order], tuple(plane[:, 2:7] for plane in wide))
    for plane, wanted in zip(wide, written, strict=True):
        assert torch.equal(plane[:, 2:7], wanted[:, order])
        assert bool((plane[:, [0, 1, 7, 8]] == 7).all())
    tier.close()


@pytest.mark.gpu
@pytest.mark.parametrize("pin_limit_bytes", [0, 1 << 24])
def test_blocks_are_read_to_a_device_through_pinned_memory(cold_dir: Path, pin_limit_bytes: int) -> None:
    with CudaDevice(pin_limit_bytes=pin_limit_bytes) as device:
        tier = ColdTier(cold_dir, LAYERS, bounce=device.bounce, **SAYS)
        slots = tier.slots.allocate_many(5)
        for layer, written in enumerate(fill(tier, slots)):
            out = tuple(plane.empty(5, device.torch_device) for plane in LAYERS[layer])
            tier.read(layer, slots, out)
            assert all(torch.equal(a.cpu(), b) for a, b in zip(out, written, strict=True))
        tier.close()


def test_rows_are_read_and_written_as_they_lie(tier: ColdTier) -> None:
    slots = tier.slots.allocate_many(3)
    rows = torch.randint(0, 256, (3, 768), dtype=torch.uint8)
    tier.write_rows(0, slots, rows)
    out = torch.empty((2, 768), dtype=torch.uint8)
    assert tier.read_rows(0, [slots[2], slots[0]], out) is out
    assert torch.equal(out, rows[[2, 0]])
    for bad in (rows[:2], rows.to(torch.int8), torch.empty((3, 1536), dtype=torch.uint8)[:, ::2], rows.to("meta")):
        with pytest.raises(MismatchError):
            tier.write_rows(0, slots, bad)


@pytest.mark.parametrize(("block_bytes", "wanted"), [(1, 64), (1 << 20, 8), (3 << 20, 3), (40 << 20, 1)])
def test_files_are_several_megabytes(block_bytes: int, wanted: int) -> None:
    assert blocks_per_file(block_bytes) == wanted


def test_nobody_else_may_look(cold_dir: Path, tier: ColdTier) -> None:
    fill(tier, tier.slots.allocate_many(1))
    assert stat.S_IMODE(cold_dir.stat().st_mode) == 0o700
    for path in [tier.folder, *tier.folder.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_many_files_are_fanned_out_and_few_are_open(cold_dir: Path) -> None:
    layers = [(Plane("k", torch.uint8, 1, (16, 1)),)]
    with_files = 300
    tier = ColdTier(cold_dir, layers, **SAYS)
    slots = [tier.slots.allocate_many(64)[0] for _ in range(with_files)]
    rows = torch.randint(0, 256, (with_files, 16), dtype=torch.uint8)
    tier.write_rows(0, slots, rows)
    open_now = sum(str(tier.folder) in os.readlink(f"/proc/self/fd/{fd}") for fd in descriptors())
    assert open_now == MAX_OPEN_FILES + 1  # and the lock
    order = random.sample(range(with_files), with_files)
    assert torch.equal(tier.read_rows(0, [slots[i] for i in order]), rows[order])
    assert len(files(tier)) == with_files
    assert sorted(path.name for path in tier.folder.iterdir()) == ["0000", "0001", LOCK_NAME]
    tier.close()
    assert not any(str(tier.folder) in os.readlink(f"/proc/self/fd/{fd}") for fd in descriptors())


def test_the_file_used_last_stays_open(cold_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tieredkv.tiers.cold.MAX_OPEN_FILES", 2)
    monkeypatch.setattr("tieredkv.tiers.cold.MAX_FILE_BLOCKS", 1)
    tier = ColdTier(cold_dir, LAYERS, **SAYS)
    slots = tier.slots.allocate_many(3)
    fill(tier, slots[:2])
    tier.read_rows(0, slots[:1])
    fill(tier, slots[2:])  # closes the second file
    for path in files(tier):
        path.unlink()
    tier.read_rows(0, slots[:1])
    with pytest.raises(ColdTierError, match="cannot be opened"):
        tier.read_rows(0, slots[1:2])
    tier.close()


@pytest.mark.parametrize("cap_bytes", [None, 1 << 24])
def test_free_slots_of_files_that_exist_are_used_first(cold_dir: Path, cap_bytes: int | None) -> None:
    tier = ColdTier(cold_dir, LAYERS, cap_bytes=cap_bytes, **SAYS)
    slots = tier.slots.allocate_many(5)
    fill(tier, slots)
    tier.slots.release(slots[1])
    fill(tier, tier.slots.allocate_many(3))
    assert len(files(tier)) == 1
    tier.close()


def descriptors() -> list[str]:
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]


def test_threads_share_a_tier(cold_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tieredkv.tiers.cold.MAX_OPEN_FILES", 2)
    monkeypatch.setattr("tieredkv.tiers.cold.MAX_FILE_BLOCKS", 3)
    tier = ColdTier(cold_dir, LAYERS, **SAYS)
    failures: list[object] = []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        try:
            for _ in range(20):
                slots = tier.slots.allocate_many(7)
                chance.shuffle(slots)
                rows = torch.full((7, 768), seed, dtype=torch.uint8)
                tier.write_rows(0, slots, rows)
                if not torch.equal(tier.read_rows(0, slots), rows):
                    failures.append(f"thread {seed} read what it did not write")
                for slot in slots[:4]:
                    tier.slots.release(slot)
        except Exception as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tier.close()
    assert failures == []


# ---- caps and floors


@pytest.mark.parametrize("blocks", [1, 3, PER_FILE, PER_FILE + 1, 3 * PER_FILE - 1])
def test_the_cap_counts_headers_too_and_is_hard(cold_dir: Path, blocks: int) -> None:
    cap_bytes = cold_bytes(LAYERS, blocks, **SAYS)
    tier = ColdTier(cold_dir, LAYERS, cap_bytes=cap_bytes, **SAYS)
    assert tier.budget_bytes == cap_bytes
    assert tier.slots.total == tier.free_blocks() == blocks
    slots = tier.slots.allocate_many(blocks)
    assert holds(tier, slots, fill(tier, slots))
    with pytest.raises(BudgetError) as caught:
        tier.slots.allocate()
    assert caught.value.tier == "cold"
    assert disk_bytes(tier.folder) == tier.reserved_bytes == cap_bytes
    for path in files(tier):
        with safe_open(path, framework="pt") as opened:
            assert opened.get_slice("layer.0").get_shape()[0] <= PER_FILE
    tier.close()
    smaller = ColdTier(cold_dir, LAYERS, cap_bytes=cap_bytes - 1, **SAYS) if blocks > 1 else None
    if smaller is not None:
        assert smaller.slots.total == blocks - 1
        smaller.close()


def test_a_cap_below_one_block_is_refused_before_anything_is_made(cold_dir: Path) -> None:
    cap_bytes = cold_bytes(LAYERS, 1, **SAYS) - 1
    with pytest.raises(ConfigError, match=str(cap_bytes + 1)):
        ColdTier(cold_dir, LAYERS, cap_bytes=cap_bytes, **SAYS)
    assert not cold_dir.exists()


def disk_with(free_bytes: int) -> Callable[[object], object]:
    class Disk:
        f_bavail, f_frsize = free_bytes, 1

    return lambda path: Disk


FILE_BYTES = cold_bytes(LAYERS, PER_FILE, **SAYS)


def test_slots_without_a_cap_end_at_the_floor(cold_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = ColdTier(cold_dir, LAYERS, free_floor_bytes=1000, **SAYS)
    monkeypatch.setattr(os, "statvfs", disk_with(1000 + 2 * FILE_BYTES + 5))
    assert tier.free_blocks() == 2 * PER_FILE
    # Nothing is written yet: what was promised to these slots counts all the same.
    slots = tier.slots.allocate_many(2 * PER_FILE)
    assert tier.free_blocks() == 0
    with pytest.raises(BudgetError, match="floor") as caught:
        tier.slots.allocate()
    assert caught.value.tier == "cold"
    assert holds(tier, slots, fill(tier, slots))
    tier.close()


def test_the_floor_holds_when_others_took_the_disk_meanwhile(cold_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = ColdTier(cold_dir, LAYERS, cap_bytes=10 * FILE_BYTES, free_floor_bytes=1000, **SAYS)
    slots = tier.slots.allocate_many(PER_FILE + 1)
    written = fill(tier, slots[:PER_FILE])
    monkeypatch.setattr(os, "statvfs", disk_with(999 + FILE_BYTES))
    assert tier.free_blocks() == 0
    with pytest.raises(ColdTierError, match="free space on that disk") as caught:
        fill(tier, slots[PER_FILE:])
    assert isinstance(caught.value.__cause__, OSError)
    assert len(files(tier)) == 1
    assert holds(tier, slots[:PER_FILE], written)
    monkeypatch.setattr(os, "statvfs", disk_with(1000 + FILE_BYTES))
    assert tier.free_blocks() == PER_FILE - 1
    assert holds(tier, slots[PER_FILE:], fill(tier, slots[PER_FILE:]))
    tier.close()


# ---- a failing disk


def test_a_slot_never_written_is_not_read(tier: ColdTier) -> None:
    with pytest.raises(ColdTierError, match="never written"):
        tier.read_rows(0, [tier.slots.allocate()])


def test_a_truncated_file_is_an_error(tier: ColdTier) -> None:
    slots = tier.slots.allocate_many(4)
    fill(tier, slots)
    os.truncate(files(tier)[0], FILE_BYTES - (PER_FILE - 1) * slot_bytes(LAYERS))
    with pytest.raises(ColdTierError, match="bytes short") as caught:
        tier.read_rows(1, slots)
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("call", ["pwritev", "preadv", "posix_fallocate", "open"])
def test_a_failing_call_is_a_typed_error_and_leaves_nothing_half_made(
    tier: ColdTier, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    slots = tier.slots.allocate_many(2)

    def fail(*args: object, **kwargs: object) -> object:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        if call == "preadv":
            fill(tier, slots)
        patch.setattr(os, call, fail)
        with pytest.raises(ColdTierError, match=os.strerror(code)) as caught:
            holds(tier, slots, []) if call == "preadv" else fill(tier, slots)
        assert isinstance(caught.value.__cause__, OSError)
        assert call == "preadv" or files(tier) == []
    assert holds(tier, slots, fill(tier, slots))


def test_a_file_system_without_preallocation_serves(tier: ColdTier, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    slots = tier.slots.allocate_many(2)
    assert holds(tier, slots, fill(tier, slots))
    assert files(tier)[0].stat().st_size == FILE_BYTES


def test_a_directory_lost_in_mid_run_is_an_error(tier: ColdTier) -> None:
    slots = tier.slots.allocate_many(PER_FILE + 1)
    written = fill(tier, slots[:PER_FILE])
    os.rename(tier.folder, tier.folder.with_name("gone"))
    assert holds(tier, slots[:PER_FILE], written)  # still open
    with pytest.raises(ColdTierError) as caught:
        fill(tier, slots[PER_FILE:])
    assert "do not remove" in str(caught.value)
    with pytest.raises(ColdTierError, match="lost"):
        tier.free_blocks()
    tier.close()


@pytest.mark.parametrize("kind", ["file", "below a file", "dead link"])
def test_a_path_that_is_no_directory_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    if kind == "dead link":
        path.symlink_to(tmp_path / "nowhere" / "x")
        (tmp_path / "nowhere").touch()
    else:
        path.touch()
    with pytest.raises(ColdTierError, match="To change"):
        ColdTier(path / "below" if kind == "below a file" else path, LAYERS, **SAYS)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_an_unwritable_path_is_refused(cold_dir: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    cold_dir.mkdir()
    real = os.mkdir

    def fail(path: object, *args: object, **kwargs: object) -> None:
        if "spill-" in str(path):
            raise OSError(code, os.strerror(code))
        real(path, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "mkdir", fail)
    with pytest.raises(ColdTierError, match="cold directory elsewhere"):
        ColdTier(cold_dir, LAYERS, **SAYS)
    assert list(cold_dir.iterdir()) == []


# ---- the end


def test_closing_removes_the_folder(cold_dir: Path, tier: ColdTier) -> None:
    fill(tier, tier.slots.allocate_many(1))
    (cold_dir / "of the user").touch()
    tier.close()
    tier.close()
    assert [path.name for path in cold_dir.iterdir()] == ["of the user"]


@pytest.mark.parametrize("cap_bytes", [None, 10 * FILE_BYTES])
def test_an_abandoned_tier_is_removed_without_the_cycle_collector(cold_dir: Path, cap_bytes: int | None) -> None:
    tier = ColdTier(cold_dir, LAYERS, cap_bytes=cap_bytes, **SAYS)
    fill(tier, tier.slots.allocate_many(1))
    gc.disable()
    try:
        del tier
        assert list(cold_dir.iterdir()) == []
    finally:
        gc.enable()


def test_a_file_in_use_is_closed_after_its_last_read(tier: ColdTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """A descriptor closed under a reader could be another file's by the time it is used."""
    slots = tier.slots.allocate_many(1)
    written = fill(tier, slots)
    real = os.preadv

    def close_first(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        tier.close()
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", close_first)
    got = tier.read_rows(0, slots)
    wanted = torch.empty_like(got)
    pack_rows(LAYERS[0], written[0], wanted)
    assert torch.equal(got, wanted)
    assert not any(str(tier.folder) in os.readlink(f"/proc/self/fd/{fd}") for fd in descriptors())
