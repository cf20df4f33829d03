"""Published blocks: found again by hash, in this process, in another view of the directory, and after a restart."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import secrets
import stat
import threading
from pathlib import Path

import pytest
import torch
from durable_support import IDENTITY, LAYERS, chain, files, hashes, holds, opened, publish, quarantined, row, rows_of
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from tieredkv.block import Plane
from tieredkv.durable import BlockRecord, DurableBlocks, Identity, salt_digest
from tieredkv.errors import ClosedError, ColdTierError, MismatchError
from tieredkv.tiers.cold_layout import ALIGN_BYTES


def forbidden(i: int, layer: int) -> torch.Tensor:
    raise AssertionError("a block that is there is not asked for again")


def read_all(store: DurableBlocks, wanted: list[BlockRecord]) -> bool:
    """Whether `read_all` gives each layer of each block once, and rightly."""
    seen: set[tuple[int, int]] = set()
    for piece in store.read_all(hashes(wanted)):
        for layer, rows in zip(piece.layers, piece.rows, strict=True):
            for i, found in enumerate(rows, start=piece.first):
                assert (layer, i) not in seen
                seen.add((layer, i))
                if not torch.equal(found, row(wanted[i].hash, layer, store.identity)):
                    return False
    return len(seen) == len(wanted) * len(store.identity.layers)


def test_what_is_published_is_found_after_a_restart(cold_dir: Path) -> None:
    records = chain("a", 150)
    with_first = opened(cold_dir)
    assert with_first.find(hashes(records)) == 0
    assert publish(with_first, records) == 150
    with_first.close()
    for store in (opened(cold_dir), opened(cold_dir)):
        assert store.find(hashes(records)) == 150
        assert holds(store, records) and read_all(store, records)
        assert [store.record(record.hash) for record in records] == records
        assert store.stats().blocks == 150
        assert store.stats().bytes_ == sum(path.stat().st_size for path in files(cold_dir))


def test_only_a_run_from_the_first_block_on_is_found(cold_dir: Path) -> None:
    store, records, other = opened(cold_dir), chain("a", 9), chain("b", 2)
    publish(store, records[:3])
    publish(store, records[5:])
    assert store.find(hashes(records)) == 3
    assert store.find(hashes(records[5:])) == 4
    assert store.find([*hashes(records[:2]), other[0].hash, records[2].hash]) == 2
    assert store.find(hashes(other)) == store.find([]) == 0
    assert store.record(other[0].hash) is None


def test_blocks_that_are_there_are_neither_asked_for_nor_written(cold_dir: Path) -> None:
    store, records = opened(cold_dir), chain("a", 10)
    assert publish(store, records[:4]) == 4
    before = {path: path.stat().st_mtime_ns for path in files(cold_dir)}
    asked: list[int] = []

    def rows(i: int, layer: int) -> torch.Tensor:
        asked.append(i)
        return row(records[i].hash, layer)

    assert store.publish(records, rows) == 10
    assert set(asked) == set(range(4, 10))
    assert store.publish(records, forbidden) == 10
    assert {path: path.stat().st_mtime_ns for path in files(cold_dir)}.items() >= before.items()
    assert store.stats().published == 10


@pytest.mark.parametrize("piece_bytes", [1, 64 * IDENTITY.row_bytes[0], 1 << 20])
def test_blocks_are_read_in_any_order_and_from_several_files(
    cold_dir: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    store, records, other = opened(cold_dir), chain("a", 70), chain("b", 3)
    publish(store, records)
    publish(store, other)
    mixed = [records[66], other[1], records[2], records[3], records[2], other[2], records[69]]
    assert holds(store, mixed) and read_all(store, mixed)
    monkeypatch.setattr("tieredkv.durable.blocks.PIECE_BYTES", piece_bytes)
    assert read_all(store, records)
    store.read([], 0, torch.empty((0, IDENTITY.row_bytes[0]), dtype=torch.uint8))
    assert list(store.read_all([])) == []


def test_two_sequences_in_one_publication_share_no_file(cold_dir: Path) -> None:
    """A file that held the ends of two could not be dropped without breaking one of them."""
    store = opened(cold_dir)
    records = [*chain("a", 3), *chain("b", 2), *chain("a", 2)]
    assert publish(store, records) == len(records)
    assert len(files(cold_dir)) == 2
    assert store.stats().blocks == 5


def test_files_are_valid_safetensors_that_say_what_they_are(cold_dir: Path) -> None:
    salt = salt_digest("alice")
    records = chain("a", 3, salt=salt)
    publish(opened(cold_dir), records)
    (path,) = files(cold_dir)
    with safe_open(path, framework="pt") as file:
        assert list(file.keys()) == ["layer.0", "layer.1"]
        for layer in range(2):
            assert torch.equal(file.get_tensor(f"layer.{layer}"), torch.stack([row(r.hash, layer) for r in records]))
        about = file.metadata()
    assert about["format"] == "tieredkv.durable" and about["format_version"] == "1"
    assert (about["fingerprint"], about["block_size"], about["codec"]) == ("model-1", "16", "raw")
    assert json.loads(about["geometry"])[1][0] == ["k", "float32", 1, [16, 4]]
    assert about["hashes"] == "".join(hashes(records)) and about["parent"] == ""
    assert about["tokens"] == "16,16,16" and about["salt"] == salt
    header = path.read_bytes()[: -3 * IDENTITY.block_bytes]
    assert len(header) % ALIGN_BYTES == 0
    # The name: the last hash, where it is filed by; the header's digest; the salt.
    digest = hashlib.sha256(header).hexdigest()[:16]
    assert path.name == f"{records[-1].hash}-{digest}-{salt[:16]}.safetensors"
    assert path.parent.name == path.name[:2]


def test_nobody_else_may_look(cold_dir: Path) -> None:
    old = os.umask(0)
    try:
        publish(opened(cold_dir), chain("a", 2))
    finally:
        os.umask(old)
    for path in [cold_dir, *cold_dir.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_one_layer_of_neighbours_is_one_read(cold_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, records = opened(cold_dir), chain("a", 60)
    publish(store, records)
    sizes: list[int] = []
    real = os.preadv

    def counted(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        sizes.append(sum(len(buffer) for buffer in buffers))
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    assert holds(store, records[5:50])
    assert sizes == [45 * row_bytes for row_bytes in IDENTITY.row_bytes]
    sizes.clear()
    assert read_all(store, records)
    assert sizes == [60 * IDENTITY.block_bytes]  # a whole file from front to back


def test_short_reads_and_writes_are_carried_on(cold_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv, pwritev = os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", lambda fd, data, offset: preadv(fd, [data[0][:77]], offset))
    monkeypatch.setattr(os, "pwritev", lambda fd, data, offset: pwritev(fd, [data[0][:900]], offset))
    store, records = opened(cold_dir), chain("a", 5)
    publish(store, records)
    assert holds(store, records)


def test_salts_share_nothing(cold_dir: Path) -> None:
    store = opened(cold_dir)
    alice, bob = (chain("a", 3, salt=salt_digest(name)) for name in ("alice", "bob"))
    publish(store, alice)
    assert store.find(hashes(bob)) == 0
    assert publish(store, [*alice, *bob]) == 6
    assert len(files(cold_dir)) == 2
    assert salt_digest("") == "" and salt_digest("alice") != salt_digest("bob")


def test_a_file_is_of_one_salt(cold_dir: Path) -> None:
    """So that all of one owner, and nothing else, can be deleted."""
    store, first = opened(cold_dir), chain("a", 2, salt=salt_digest("alice"))
    records = [first[0], dataclasses.replace(first[1], salt=salt_digest("bob"))]
    assert publish(store, records) == 2
    assert len(files(cold_dir)) == 2
    assert [store.record(record.hash) for record in records] == records


@pytest.mark.parametrize(
    "other",
    [
        Identity("model-2", LAYERS, 16, "raw"),
        Identity("model-1", LAYERS, 32, "raw"),
        Identity("model-1", LAYERS, 16, "int8"),
        Identity("model-1", LAYERS[:1], 16, "raw"),
        Identity("model-1", ((Plane("k", torch.float16, 2, (16, 4)), LAYERS[0][1]), LAYERS[1]), 16, "raw"),
    ],
    ids=["fingerprint", "block size", "codec", "layers", "dtype"],
)
def test_identities_share_a_directory_and_nothing_else(cold_dir: Path, other: Identity) -> None:
    records = chain("a", 3)
    mine, theirs = opened(cold_dir), opened(cold_dir, other)
    publish(mine, records)
    assert theirs.find(hashes(records)) == opened(cold_dir, other).find(hashes(records)) == 0
    same = [BlockRecord(r.hash, r.parent, r.tokens, "", (7,) * len(other.layers)) for r in records]
    assert publish(theirs, same) == 3
    assert holds(theirs, same) and holds(mine, records)
    assert other.digest() != IDENTITY.digest()
    assert mine.stats().set_aside == theirs.stats().set_aside == 0


def test_two_writers_of_one_block_are_harmless(cold_dir: Path) -> None:
    """Also when they computed other bytes for it, as the same tokens in another batch may."""
    one, two, records = opened(cold_dir), opened(cold_dir), chain("a", 4)
    doubled = [BlockRecord(r.hash, r.parent, r.tokens, r.salt, (1, 2)) for r in records[:2]]

    def rows(i: int, layer: int) -> torch.Tensor:
        # The other writer comes first, after this one has looked.
        if not two.stats().published:
            publish(two, records)
        return torch.full((IDENTITY.row_bytes[layer],), i, dtype=torch.uint8)

    assert one.publish(doubled, rows) == 2
    assert len(files(cold_dir)) == 2
    fresh = opened(cold_dir)
    assert fresh.find(hashes(records)) == 4 and fresh.stats().blocks == 4
    for layer in range(2):
        out = torch.empty((4, IDENTITY.row_bytes[layer]), dtype=torch.uint8)
        fresh.read(hashes(records), layer, out)
        for i, record in enumerate(records):
            found = fresh.record(record.hash)
            assert found is not None
            # Whichever of the two serves, checksums and bytes belong together.
            wanted = row(record.hash, layer) if found.checksums == record.checksums else torch.full_like(out[i], i)
            assert torch.equal(out[i], wanted)
    # When one file goes, the other one serves.
    fresh.set_aside(records[0].hash, "test")
    assert fresh.find(hashes(records[:2])) == 2
    again = opened(cold_dir)
    assert again.find(hashes(records[:2])) == 2


def test_the_same_bytes_published_twice_are_one_file(cold_dir: Path) -> None:
    one, two, records = opened(cold_dir), opened(cold_dir), chain("a", 4)

    def rows(i: int, layer: int) -> torch.Tensor:
        if not two.stats().published:
            publish(two, records)
        return row(records[i].hash, layer)

    assert one.publish(records, rows) == 4
    assert len(files(cold_dir)) == 1
    assert holds(one, records) and holds(two, records)


def test_a_wrong_checksum_sets_the_file_aside(cold_dir: Path) -> None:
    store, records = opened(cold_dir), chain("a", 70)
    publish(store, records)
    store.set_aside(records[2].hash, "checksum of layer 1")
    store.set_aside(records[2].hash, "again, by another reader")
    assert store.stats().set_aside == 1 and len(quarantined(cold_dir)) == 1
    assert store.find(hashes(records)) == 0
    with pytest.raises(ColdTierError, match="compute it again"):
        holds(store, records)
    assert opened(cold_dir).find(hashes(records)) == 0
    assert publish(store, records) == 70  # what followed was whole: only the lost file is written again
    assert store.stats().published == 70 + 64
    assert store.find(hashes(records)) == 70 and holds(store, records)


def test_what_rows_raises_is_passed_on_and_nothing_is_left(cold_dir: Path) -> None:
    store, records = opened(cold_dir), chain("a", 3)

    def rows(i: int, layer: int) -> torch.Tensor:
        if layer == 1 and i == 2:
            raise ColdTierError("lost", wanted="", got="", change="")
        return row(records[i].hash, layer)

    with pytest.raises(ColdTierError, match="lost"):
        store.publish(records, rows)
    with pytest.raises(MismatchError, match="not the rows"):
        store.publish(records, lambda i, layer: torch.zeros(3, dtype=torch.uint8))
    assert [path for path in cold_dir.rglob("*") if path.is_file()] == [cold_dir / "durable" / "lock"]
    assert store.stats().failures == 0
    assert publish(store, records) == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"hash": "12"},
        {"hash": "G" * 64},
        {"parent": "12"},
        {"tokens": 0},
        {"tokens": 17},
        {"salt": "alice"},
        {"salt": "a/" * 8},
        {"checksums": (1,)},
    ],
    ids=str,
)
def test_records_that_cannot_be_are_refused(cold_dir: Path, changes: dict[str, object]) -> None:
    good = chain("a", 1)[0]
    fields = {name: getattr(good, name) for name in ("hash", "parent", "tokens", "salt", "checksums")}
    with pytest.raises(MismatchError):
        opened(cold_dir).publish([BlockRecord(**(fields | changes))], forbidden)
    assert files(cold_dir) == []


def test_out_must_fit(cold_dir: Path) -> None:
    store, records = opened(cold_dir), chain("a", 2)
    publish(store, records)
    size = IDENTITY.row_bytes[0]
    for bad in (
        torch.empty((1, size), dtype=torch.uint8),
        torch.empty((2, size), dtype=torch.int8),
        torch.empty((2, 2 * size), dtype=torch.uint8)[:, ::2],
        torch.empty((2, size), dtype=torch.uint8, device="meta"),
    ):
        with pytest.raises(MismatchError):
            store.read(hashes(records), 0, bad)


def test_closed_or_after_a_fork_it_refuses(cold_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, records = opened(cold_dir), chain("a", 1)
    publish(store, records)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        with pytest.raises(ClosedError, match="fork"):
            store.find(hashes(records))
        store.close()  # its parent's
    assert store.find(hashes(records)) == 1
    store.close()
    store.close()
    for use in (
        lambda: store.find(hashes(records)),
        lambda: store.publish(records, forbidden),
        lambda: store.record(records[0].hash),
        lambda: holds(store, records),
        lambda: list(store.read_all(hashes(records))),
        lambda: store.set_aside(records[0].hash, ""),
    ):
        with pytest.raises(ClosedError, match="closed one"):
            use()


def test_few_files_are_open_and_none_for_long(cold_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tieredkv.durable.writing.MAX_FILE_BLOCKS", 1)
    monkeypatch.setattr("tieredkv.durable.reading.MAX_OPEN_FILES", 5)
    store, records = opened(cold_dir), chain("a", 12)
    publish(store, records)
    assert len(files(cold_dir)) == 12

    def open_files() -> int:
        paths = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        return sum(str(cold_dir) in os.readlink(path) for path in paths if os.path.lexists(path))

    out = [torch.empty((12, row_bytes), dtype=torch.uint8) for row_bytes in IDENTITY.row_bytes]
    store.read(hashes(records), 0, out[0])
    assert open_files() == 5
    store.read(hashes(records), 1, out[1])
    assert open_files() == 0  # the space of a deleted file is the disk's again
    assert holds(store, records) and read_all(store, records) and open_files() == 0
    store.read(hashes(records), 0, out[0])
    store.close()
    assert open_files() == 0


def test_threads_share_a_store(cold_dir: Path) -> None:
    stores = [opened(cold_dir), opened(cold_dir)]
    failures: list[object] = []

    def work(seed: int) -> None:
        try:
            for number in range(6):
                records = chain(f"{(seed + number) % 4}", 4 + number)
                store = stores[(seed + number) % 2]
                if publish(store, records) != len(records) or store.find(hashes(records)) != len(records):
                    failures.append("lost")
                if not (holds(store, records) and read_all(store, records)):
                    failures.append("wrong")
        except Exception as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert all(store.stats().failures == store.stats().set_aside == 0 for store in stores)


OPERATIONS = st.one_of(
    st.tuples(st.just("publish"), st.integers(0, 2), st.integers(0, 7), st.integers(0, 7)),
    st.tuples(st.just("find"), st.integers(0, 2), st.integers(0, 7), st.just(0)),
    st.tuples(st.just("set aside"), st.integers(0, 2), st.integers(0, 6), st.just(0)),
    st.tuples(st.just("restart"), st.just(0), st.just(0), st.just(0)),
)
CHAINS = [chain(str(number), 7) for number in range(3)]


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 1), OPERATIONS), max_size=14))
def test_two_views_of_a_directory_agree_with_a_set(
    memory_dir: Path, steps: list[tuple[int, tuple[str, int, int, int]]]
) -> None:
    """Without a cap, what was published is found in every view until it is set aside, and then by none."""
    path = memory_dir / secrets.token_hex(8)
    views = [opened(path), opened(path)]
    present: set[str] = set()
    for number, (what, which, first, second) in steps:
        view, records = views[number], CHAINS[which]
        if what == "publish":
            part = records[min(first, second) : max(first, second)]
            assert publish(view, part) == len(part)
            present |= set(hashes(part))
        elif what == "find":
            part = records[:first]
            wanted = next((n for n, record in enumerate(part) if record.hash not in present), len(part))
            assert view.find(hashes(part)) == wanted
            assert holds(view, part[:wanted])
        elif what == "set aside":
            view.find(hashes(records))
            before = {file.name for file in files(path)}
            view.set_aside(records[first].hash, "test")
            assert len(before) - len(files(path)) in (0, 1)
            present = {hash for file in files(path) for hash in said(file)}
        else:
            views[number] = opened(path)
            assert views[number].stats().blocks == len(present)


def said(path: Path) -> list[str]:
    """The hashes that a file's header lists."""
    with safe_open(path, framework="pt") as file:
        joined = file.metadata()["hashes"]
    return [joined[start : start + 64] for start in range(0, len(joined), 64)]


def test_rows_of_gives_what_the_hash_says() -> None:
    """The helper that all of this rests on: other hashes, other bytes."""
    records = chain("a", 2)
    rows = rows_of(records)
    assert torch.equal(rows(0, 0), row(records[0].hash, 0))
    assert not torch.equal(rows(0, 0), rows(1, 0))


def test_bytes_are_on_the_disk_before_the_name_and_the_name_before_it_counts(
    cold_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that stops keeps what was synced only: the file's bytes, then its name, in this order."""
    store, records, calls = opened(cold_dir), chain("a", 2), []
    real = {name: getattr(os, name) for name in ("pwritev", "fsync", "rename")}

    def path_of(descriptor: int) -> str:
        return os.readlink(f"/proc/self/fd/{descriptor}")

    def rename(source: Path, target: Path) -> None:
        assert store.record(records[0].hash) is None
        calls.append(("rename", str(source), str(target)))
        real["rename"](source, target)

    def write(descriptor: int, *args: object) -> object:
        calls.append(("write", path_of(descriptor)))
        return real["pwritev"](descriptor, *args)

    def sync(descriptor: int) -> None:
        assert store.record(records[0].hash) is None
        calls.append(("sync", path_of(descriptor)))
        real["fsync"](descriptor)

    for name, fake in (("rename", rename), ("pwritev", write), ("fsync", sync)):
        monkeypatch.setattr(os, name, fake)
    publish(store, records)
    (path,) = files(cold_dir)
    (index,) = [i for i, call in enumerate(calls) if call[0] == "rename"]
    temporary = calls[index][1]
    assert calls[index] == ("rename", temporary, str(path))
    before = [call for call in calls[:index] if call[1] == temporary]
    assert before == [("write", temporary)] * 3 + [("sync", temporary)]
    assert ("sync", str(path.parent.parent)) in calls[:index]  # the folder is new: its name too
    assert calls[index + 1 :] == [("sync", str(path.parent))]
