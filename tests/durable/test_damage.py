"""Files that are cut, changed or of somebody else: absent, set aside when they were ours, never a wrong byte."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from pathlib import Path

import pytest
import torch
from durable_support import IDENTITY, LAYERS, chain, files, hashes, holds, opened, publish, quarantined, row
from hypothesis import given, settings
from hypothesis import strategies as st

from tieredkv.block import Plane
from tieredkv.durable import DurableBlocks, Identity
from tieredkv.durable.folder import Seen
from tieredkv.durable.format import Refusal, encode_header
from tieredkv.durable.scan import examine
from tieredkv.durable.survey import survey, why_not_whole, wrong_rows
from tieredkv.errors import ColdTierError

RECORDS = chain("a", 6)
HEADER_BYTES = len(encode_header(IDENTITY, RECORDS)[0])
FILE_BYTES = HEADER_BYTES + 6 * IDENTITY.block_bytes
CUTS = {
    "nothing": 0,
    "in the length": 5,
    "after the length": 8,
    "in the header": 1000,
    "at the header's end": HEADER_BYTES,
    "in the first row": HEADER_BYTES + 10,
    "between rows": HEADER_BYTES + IDENTITY.row_bytes[0],
    "between layers": HEADER_BYTES + 6 * IDENTITY.row_bytes[0],
    "the last byte": FILE_BYTES - 1,
    "longer": FILE_BYTES + 1,
    "much longer": FILE_BYTES + 4096,
}


@pytest.fixture
def store(cold_dir: Path) -> DurableBlocks:
    made = opened(cold_dir)
    assert publish(made, RECORDS) == 6
    return made


@pytest.fixture
def path(store: DurableBlocks, cold_dir: Path) -> Path:
    return files(cold_dir)[0]


def reads_as_miss(store: DurableBlocks) -> bool:
    with pytest.raises(ColdTierError, match="cannot be had"):
        holds(store, RECORDS)
    return True


@pytest.mark.parametrize("size", CUTS.values(), ids=CUTS.keys())
def test_a_file_of_another_length_is_set_aside(cold_dir: Path, store: DurableBlocks, path: Path, size: int) -> None:
    os.truncate(path, size)
    fresh = opened(cold_dir)
    assert fresh.find(hashes(RECORDS)) == 0 and reads_as_miss(fresh)
    assert fresh.stats().set_aside == 1 and fresh.stats().blocks == 0
    assert quarantined(cold_dir)[0].name == path.name
    # The one that indexed it while it was whole notices too, and everything can be published again.
    assert store.find(hashes(RECORDS)) == 0
    assert publish(store, RECORDS) == 6 and fresh.find(hashes(RECORDS)) == 6
    assert holds(fresh, RECORDS) and holds(store, RECORDS)


@pytest.mark.parametrize("size", CUTS.values(), ids=CUTS.keys())
def test_a_file_cut_after_it_was_found_is_a_miss(cold_dir: Path, store: DurableBlocks, path: Path, size: int) -> None:
    fresh = opened(cold_dir)
    assert fresh.find(hashes(RECORDS)) == 6
    os.truncate(path, size)
    assert reads_as_miss(fresh)
    assert fresh.stats().set_aside == 1 and fresh.stats().misses == 1
    assert fresh.find(hashes(RECORDS)) == 0 and len(quarantined(cold_dir)) == 1


def test_a_file_cut_after_it_was_indexed_is_not_found(cold_dir: Path, store: DurableBlocks, path: Path) -> None:
    os.truncate(path, FILE_BYTES - 1)
    assert store.find(hashes(RECORDS)) == 0
    assert store.stats().set_aside == 1 and len(quarantined(cold_dir)) == 1


def test_a_file_cut_while_it_is_open_is_a_miss(cold_dir: Path, store: DurableBlocks, path: Path) -> None:
    store.read(hashes(RECORDS), 0, torch.empty((6, IDENTITY.row_bytes[0]), dtype=torch.uint8))
    os.truncate(path, FILE_BYTES - 1)
    assert reads_as_miss(store)
    assert store.stats().set_aside == 1


@settings(max_examples=80)
@given(at=st.integers(0, HEADER_BYTES - 1), bit=st.integers(0, 7))
def test_a_flipped_bit_in_the_header_is_seen(tmp_path_factory: pytest.TempPathFactory, at: int, bit: int) -> None:
    header, file = encode_header(IDENTITY, RECORDS)
    changed = bytearray(header)
    changed[at] ^= 1 << bit
    path = tmp_path_factory.mktemp("file") / file.name
    path.write_bytes(bytes(changed) + bytes(FILE_BYTES - HEADER_BYTES))
    found = examine(Seen.of(str(path), path.stat()), IDENTITY)
    assert isinstance(found, Refusal) and found.kind == "damaged"
    path.write_bytes(header + bytes(FILE_BYTES - HEADER_BYTES))
    whole = examine(Seen.of(str(path), path.stat()), IDENTITY)
    assert whole is not None and not isinstance(whole, Refusal)
    assert [whole.record(i) for i in range(6)] == RECORDS


@settings(max_examples=40)
@given(data=st.binary(max_size=9000))
def test_any_bytes_under_our_name_are_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("file") / encode_header(IDENTITY, RECORDS)[1].name
    path.write_bytes(data)
    assert isinstance(examine(Seen.of(str(path), path.stat()), IDENTITY), Refusal)


@pytest.mark.parametrize("length", [0, 8, 2**24, 2**62, 2**64 - 1])
def test_a_header_that_claims_any_length_is_refused(path: Path, cold_dir: Path, length: int) -> None:
    data = path.read_bytes()
    path.write_bytes(length.to_bytes(8, "little") + data[8:])
    assert opened(cold_dir).stats().set_aside == 1


def test_flipped_bytes_of_a_row_are_for_checksums_to_see(cold_dir: Path, store: DurableBlocks, path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(HEADER_BYTES + 6 * IDENTITY.row_bytes[0] + 3 * IDENTITY.row_bytes[1] + 17)
        file.write(b"x")
    fresh = opened(cold_dir)
    assert fresh.find(hashes(RECORDS)) == 6  # data is not read at the start
    (found,) = survey(cold_dir)
    assert not isinstance(found.content, Refusal)
    assert wrong_rows(found.content, found.seen.path) == [(3, 1)]
    fresh.set_aside(RECORDS[3].hash, "checksum of layer 1")
    assert fresh.find(hashes(RECORDS)) == 0


FOREIGN = {
    "model": Identity("model-2", LAYERS, 16, "raw"),
    "dtype": Identity("model-1", ((Plane("k", torch.float16, 2, (16, 4)), LAYERS[0][1]), LAYERS[1]), 16, "raw"),
    "block size": Identity("model-1", LAYERS, 32, "raw"),
    "codec": Identity("model-1", LAYERS, 16, "int8"),
}


@pytest.mark.parametrize("other", FOREIGN.values(), ids=FOREIGN.keys())
def test_a_whole_file_of_another_identity_among_ours_is_left_alone(
    cold_dir: Path, store: DurableBlocks, path: Path, tmp_path: Path, other: Identity
) -> None:
    records = chain("b", 3, identity=other)
    publish(opened(tmp_path / "other", other), records)
    (foreign,) = files(tmp_path / "other")
    put = path.parent.parent / foreign.name[:2] / foreign.name
    put.parent.mkdir(exist_ok=True)
    shutil.copy(foreign, put)
    fresh = opened(cold_dir)
    assert fresh.find(hashes(records)) == 0 and fresh.find(hashes(RECORDS)) == 6
    assert fresh.stats().foreign == 1 and fresh.stats().set_aside == 0
    assert put.read_bytes() == foreign.read_bytes()


@pytest.mark.parametrize("version", ["0", "2"])
def test_another_format_version_is_left_alone(
    cold_dir: Path, store: DurableBlocks, path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("tieredkv.durable.identity.FORMAT_VERSION", version)
        theirs = Identity("model-1", LAYERS, 16, "raw")
        header, file = encode_header(theirs, RECORDS)
        assert theirs.digest() != IDENTITY.digest()
    (path.parent / file.name).write_bytes(header + bytes(6 * IDENTITY.block_bytes))
    path.unlink()
    fresh = opened(cold_dir)
    assert fresh.find(hashes(RECORDS)) == 0
    assert fresh.stats().foreign == 1 and fresh.stats().set_aside == 0
    assert files(cold_dir) == [path.parent / file.name]


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EACCES, errno.EIO])
def test_a_file_that_cannot_be_opened_now_is_unreadable_and_left_alone(
    cold_dir: Path, store: DurableBlocks, path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    real = os.open

    def refused(name: str | Path, *args: int, **kwargs: int) -> int:
        if str(name) == str(path):
            raise OSError(code, os.strerror(code))
        return real(name, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refused)
        fresh = opened(cold_dir)
        (found,) = survey(cold_dir)
        assert fresh.stats().set_aside == 0 and fresh.stats().blocks == 0
        wrong = why_not_whole(found)
    assert isinstance(found.content, Refusal) and found.content.kind == "unreadable"
    assert wrong is not None and wrong.kind == "unreadable" and os.strerror(code) in wrong.why
    assert files(cold_dir) == [path] and opened(cold_dir).find(hashes(RECORDS)) == 6


def test_a_file_whose_rows_cannot_be_opened_now_is_unreadable(
    cold_dir: Path, store: DurableBlocks, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (found,) = survey(cold_dir)
    assert why_not_whole(found) is None

    def refused(*args: object, **kwargs: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refused)
        wrong = why_not_whole(found)
    assert wrong is not None and wrong.kind == "unreadable"
    os.truncate(path, FILE_BYTES - 1)
    wrong = why_not_whole(found)
    assert wrong is not None and wrong.kind == "damaged"
    path.unlink()
    assert why_not_whole(found) is None


def test_what_other_programs_put_there_is_left_alone(cold_dir: Path, store: DurableBlocks, path: Path) -> None:
    put = [path.parent / name for name in ("notes.txt", "x.safetensors", f"{path.name}.bak")]
    for one in put:
        one.write_bytes(b"mine")
    (path.parent / "folder").mkdir()
    (path.parent / ("f" * 64 + "-" + "0" * 16 + ".safetensors")).symlink_to(path)
    fresh = opened(cold_dir)
    assert fresh.find(hashes(RECORDS)) == 6
    assert fresh.stats().foreign == 3 and fresh.stats().set_aside == 0
    assert all(one.read_bytes() == b"mine" for one in put)


def test_a_file_that_others_removed_is_a_miss(cold_dir: Path, store: DurableBlocks, path: Path) -> None:
    fresh = opened(cold_dir)
    assert fresh.find(hashes(RECORDS)) == 6
    path.unlink()
    assert reads_as_miss(fresh)
    assert fresh.stats().misses == 1 and fresh.stats().set_aside == 0
    assert fresh.find(hashes(RECORDS)) == store.find(hashes(RECORDS)) == 0
    assert publish(fresh, RECORDS) == 6 and store.find(hashes(RECORDS)) == 6


def test_a_file_removed_while_it_is_open_is_read_to_its_last_layer(store: DurableBlocks, path: Path) -> None:
    store.read(hashes(RECORDS), 0, torch.empty((6, IDENTITY.row_bytes[0]), dtype=torch.uint8))
    path.unlink()
    assert holds(store, RECORDS)
    assert reads_as_miss(store)


def test_a_directory_removed_under_a_store_is_a_miss(cold_dir: Path, store: DurableBlocks) -> None:
    fresh = opened(cold_dir)
    shutil.rmtree(cold_dir)
    assert fresh.find(hashes(RECORDS)) == 0 and reads_as_miss(fresh)
    assert publish(fresh, RECORDS) == 0
    assert fresh.stats().failures == 1


@pytest.mark.parametrize(("code", "aside"), [(errno.EIO, 1), (errno.EMFILE, 0)])
def test_a_disk_that_cannot_read_is_a_miss(
    cold_dir: Path, path: Path, monkeypatch: pytest.MonkeyPatch, code: int, aside: int
) -> None:
    """A file is only set aside for what is the file's fault."""
    fresh = opened(cold_dir)

    def fail(*args: object) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        assert reads_as_miss(fresh)
    assert fresh.stats().set_aside == aside
    assert fresh.find(hashes(RECORDS)) == (0 if aside else 6)


def test_each_file_set_aside_is_told_once(
    cold_dir: Path, store: DurableBlocks, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    os.truncate(path, 100)
    with caplog.at_level(logging.WARNING, "tieredkv"):
        fresh = opened(cold_dir)
        for _ in range(3):
            fresh.find(hashes(RECORDS))
            opened(cold_dir)
    assert len(caplog.records) == 1 and path.name in caplog.text


def test_read_all_stops_at_what_is_lost(cold_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tieredkv.durable.writing.MAX_FILE_BLOCKS", 2)
    store = opened(cold_dir)
    publish(store, RECORDS)
    fresh = opened(cold_dir)
    held = fresh.record(RECORDS[4].hash)
    assert held is not None
    next(path for path in files(cold_dir) if path.name.startswith(RECORDS[5].hash)).unlink()
    seen = []
    with pytest.raises(ColdTierError, match="cannot be had"):
        for piece in fresh.read_all(hashes(RECORDS)):
            for layer, rows in zip(piece.layers, piece.rows, strict=True):
                seen.append((layer, piece.first))
                assert torch.equal(rows[0], row(RECORDS[piece.first].hash, layer))
    assert seen == [(0, 0), (1, 0), (0, 2), (1, 2)]
