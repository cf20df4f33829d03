"""Published blocks come back in another store and another process; whatever is wrong with them is a miss."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import (
    assert_close,
    assert_generated,
    audit_store,
    difference,
    feed,
    generate,
    oracle,
    store_of,
    tiny,
    tokens,
)

import tieredkv
from tieredkv.device import SimulatedAccelerator
from tieredkv.durable import DurableBlocks, DurableSettings
from tieredkv.errors import ColdTierError
from tieredkv.hf.rates import Rates

SIZES: dict[str, Any] = {"hot": "256 tokens", "warm": "256 tokens", "block_size": 16, "window": 16}
ROOT = Path(__file__).parent.parent.parent


def make(model: Any, folder: Path, **changes: Any) -> tieredkv.KVStore:
    return tieredkv.KVStore(model, **{**SIZES, "durable": DurableSettings(folder, free_floor=0), **changes})


def prefill(folder: Path, ids: torch.Tensor, model: Any = None, salt: str = "", **changes: Any) -> int:
    """In a store of its own: logits are right; how many tokens of each row had to be computed."""
    model = tiny() if model is None else model
    with make(model, folder, **changes) as store, store.cache(ids, salt=salt) as cache:
        known = cache.get_seq_length()
        out = generate(model, ids, cache, 3)
        if changes.get("codec", "raw") == "raw":
            assert_generated(out, ids.shape[1])
        audit_store(store_of(cache))
    return ids.shape[1] - known


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


def test_a_prompt_is_known_in_the_next_store(tmp_path: Path) -> None:
    ids = tokens(100)
    assert prefill(tmp_path, ids) == 100
    assert prefill(tmp_path, ids) == 4
    assert prefill(tmp_path, torch.cat([ids[:, :50], tokens(30, seed=4)], 1)) == 32
    assert prefill(tmp_path, ids[:, :96]) == 1
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in files(tmp_path))


def test_the_cold_folder_keeps_them_by_default(tmp_path: Path) -> None:
    ids = tokens(100)
    cold = tieredkv.ColdSettings(tmp_path, free_floor=0)
    for computed in (100, 4):
        assert prefill(tmp_path, ids, durable=None, cold=cold) == computed
    assert prefill(tmp_path, ids, durable=False, cold=cold) == 100


def test_in_memory_first_then_on_disk(tmp_path: Path) -> None:
    model, ids = tiny(), tokens(200)
    with make(model, tmp_path) as store, store.cache(ids) as cache:
        feed(model, ids, cache)
    with make(model, tmp_path) as store:
        for length, known, restored in ((70, 64, 4), (150, 144, 9), (200, 192, 12), (200, 192, 12)):
            with store.cache(ids[:, :length]) as cache:
                assert cache.get_seq_length() == known
                assert_close(feed(model, ids[:, known:length], cache), oracle(ids[:, :length])[:, known:])
            assert store.stats().restored_blocks == restored


@pytest.mark.parametrize("hot", ["96 tokens", "512 tokens"])
@pytest.mark.parametrize("warm", ["0 tokens", "64 tokens", "512 tokens"])
def test_as_much_as_there_is_room_for(tmp_path: Path, hot: str, warm: str) -> None:
    ids = tokens(150)
    prefill(tmp_path, ids)
    cold = tieredkv.ColdSettings(tmp_path, free_floor=0)
    prefill(tmp_path, ids, hot=hot, warm=warm, cold=cold)


def test_what_waits_in_memory_makes_way_for_what_is_asked_for(tmp_path: Path) -> None:
    model, prompts = tiny(), [tokens(100, seed=seed) for seed in range(4)]
    for ids in prompts:
        prefill(tmp_path, ids, model)
    with make(model, tmp_path, hot="160 tokens", warm=0) as store:
        for ids in prompts:
            with store.cache(ids) as cache:
                assert cache.get_seq_length() == 96
                assert_close(feed(model, ids[:, 96:], cache), oracle(ids)[:, 96:])
                audit_store(store_of(cache))


def test_a_batch_on_a_device_whose_copies_come_late(tmp_path: Path) -> None:
    ids = tokens(150, rows=2)
    prefill(tmp_path, ids)
    device = SimulatedAccelerator(seed=4, max_delay_seconds=0.002)
    assert prefill(tmp_path, ids, device=device, hot="96 tokens") == 6
    assert device.clocks.races == 0


def test_a_lossy_codec_restores_what_it_stored(tmp_path: Path) -> None:
    """The bytes that were published, so the logits are those of a cache whose blocks went below hot and back."""
    model, ids = tiny(), tokens(100)
    changes = {"codec": "int8", "hot": "512 tokens"}
    assert prefill(tmp_path, ids, **changes) == 100
    got = []
    for durable in (DurableSettings(tmp_path, free_floor=0), False):
        with make(model, tmp_path, durable=durable, **changes) as store, store.cache(ids) as cache:
            if durable:
                assert cache.get_seq_length() == 96
            else:
                feed(model, ids[:, :96], cache)
                cache.demote()
            got.append(feed(model, ids[:, 96:], cache, [1, 1]))
            assert store.stats().kept_blocks == (6 if durable else 0)
    assert_close(got[0], got[1])


# ---- what is not found


@pytest.mark.parametrize(
    "other",
    [{"salt": "alice"}, {"block_size": 32}, {"codec": "int8"}, {"dtype": torch.float64}, {"model": "weights"}],
    ids=lambda other: next(iter(other)),
)
def test_others_find_nothing(tmp_path: Path, other: dict[str, Any]) -> None:
    ids = tokens(64)
    prefill(tmp_path, ids)
    model = tiny(dtype=other.pop("dtype", torch.float32))
    if other.pop("model", None):
        with torch.no_grad():
            model.model.embed_tokens.weight.mul_(1.01)
    salt = other.pop("salt", "")
    with make(model, tmp_path, **other) as store, store.cache(ids, salt=salt) as cache:
        assert cache.get_seq_length() == 0
        feed(model, ids, cache)
    assert prefill(tmp_path, ids) == 1, "nor took anything away"


@pytest.mark.parametrize("kind", ["K and V", "header", "cut", "empty", "gone"])
def test_damage_is_a_miss(tmp_path: Path, kind: str) -> None:
    ids = tokens(100)
    prefill(tmp_path, ids)
    for path in files(tmp_path):
        data = bytearray(path.read_bytes())
        if kind == "K and V":
            data[-3000] ^= 4
        elif kind == "header":
            data[30] ^= 4
        path.write_bytes({"cut": data[: len(data) // 2], "empty": b""}.get(kind, data))
        if kind == "gone":
            path.unlink()
    assert prefill(tmp_path, ids) > 4
    assert prefill(tmp_path, ids) == 4, "it was published anew"


def test_a_block_that_is_wrong_ends_the_prefix(tmp_path: Path) -> None:
    """What came before it is used; its file is set aside."""
    model, ids = tiny(), tokens(100)
    prefill(tmp_path, ids)
    (path,) = files(tmp_path)
    data = bytearray(path.read_bytes())
    data[-2 * 2048 + 3 * 700] ^= 1  # somewhere in the last layer
    path.write_bytes(data)
    with make(model, tmp_path) as store, store.cache(ids) as cache:
        known = cache.get_seq_length()
        assert 0 <= known < 96
        assert_close(feed(model, ids[:, known:], cache), oracle(ids)[:, known:])
        stats = store.stats()
        assert stats.durable is not None and stats.durable.set_aside == 1
        assert cache.stats().checksum_failures == 1
        audit_store(store_of(cache))


@pytest.mark.parametrize("where", ["find", "record", "read_all"])
def test_a_disk_that_does_not_answer(tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = tokens(100)
    prefill(tmp_path, ids)

    def late(self: DurableBlocks, *_: Any) -> Iterator[Any]:
        raise ColdTierError("Late.", wanted="an answer", got="none", change="wait")

    monkeypatch.setattr(
        DurableBlocks, where, {"find": lambda *_: 0, "record": lambda *_: None, "read_all": late}[where]
    )
    assert prefill(tmp_path, ids) == 100


def test_reading_that_stops_in_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = tokens(100)
    prefill(tmp_path, ids)
    monkeypatch.setattr("tieredkv.durable.blocks.PIECE_BYTES", 1)  # one layer at once
    original = DurableBlocks.read_all

    def stops(self: DurableBlocks, hashes: Any) -> Iterator[Any]:
        yield next(original(self, hashes))
        raise ColdTierError("Late.", wanted="an answer", got="none", change="wait")

    monkeypatch.setattr(DurableBlocks, "read_all", stops)
    assert prefill(tmp_path, ids) == 100


def test_a_folder_that_cannot_be_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    for _ in range(2):
        assert prefill(tmp_path / "file", tokens(40)) == 40
    assert "without published blocks" in caplog.text


# ---- load or recompute


def test_loading_that_is_slower_than_computing_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny(), tokens(200)
    with make(model, tmp_path) as store, store.cache(ids) as cache:
        feed(model, ids, cache)
    for prefill_seconds, load_seconds, known in ((1.0, 0.5, 192), (1.0, 2.0, 0), (None, 2.0, 192), (1.0, None, 192)):
        monkeypatch.setattr(Rates, "prefill_seconds", prefill_seconds, raising=False)
        with make(model, tmp_path) as store:
            store._rates.prefill_seconds, store._rates.load_seconds = prefill_seconds, load_seconds
            monkeypatch.setattr(store._rates, "loaded", lambda *_: None)
            assert store.cache(ids).get_seq_length() == known


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_what_a_lossy_token_is_read_from_does_not_hang_on_the_clock(tmp_path: Path, codec: str) -> None:
    """Computed again, its K and V are exact for a while; loaded, they are what the codec made of them."""
    model, ids, logits = tiny(head_dim=32), tokens(200), []
    with make(model, tmp_path, codec=codec) as store, store.cache(ids) as cache:
        feed(model, ids, cache)
    for load_seconds in (1e-9, 1e9):
        with make(model, tmp_path, codec=codec) as store:
            store._rates.prefill_seconds, store._rates.load_seconds = 1.0, load_seconds
            cache = store.cache(ids)
            known = cache.get_seq_length()
            assert known == (192 if codec == "int8" or load_seconds < 1 else 0)
            logits.append(feed(model, ids[:, known:], cache)[:, -8:])
    assert difference(*logits) < 1e-5
    assert codec == "raw" or torch.equal(*logits)


def test_rates_are_measured() -> None:
    rates = Rates()
    assert rates.loading_pays
    rates.prefilled(1000, 1.0)
    rates.prefilled(1, 1.0)
    assert rates.prefill_seconds == pytest.approx(0.001)
    rates.loaded(1000, 3.0)
    assert not rates.loading_pays
    rates.loaded(1000, 0.1)
    rates.loaded(1000, 0.1)
    assert rates.loading_pays


def test_a_prefill_is_timed(tmp_path: Path) -> None:
    model, ids = tiny(), tokens(100)
    with make(model, tmp_path) as store, store.cache(ids) as cache:
        feed(model, ids, cache)
        assert store._rates.prefill_seconds is not None and 0 < store._rates.prefill_seconds < 0.1


# ---- processes

CHILD = """
import sys
from pathlib import Path
sys.path[:0] = ["tests", "."]
from support import feed, tiny, tokens
import tieredkv
from tieredkv.durable import DurableSettings
model = tiny()
store = tieredkv.KVStore(model, hot="512 tokens", block_size=16, durable=DurableSettings(sys.argv[1], free_floor=0))
print("ready", flush=True)
for seed in range(int(sys.argv[2]), 10**6):
    ids = tokens(100, seed=seed)
    with store.cache(ids) as cache:
        feed(model, ids[:, cache.get_seq_length():], cache)
    print("published", seed, flush=True)
"""


def publisher(folder: Path, seed: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", "-c", CHILD, str(folder), str(seed)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def test_killed_while_publishing(tmp_path: Path) -> None:
    """Two processes publish into one folder and are killed; what was acknowledged is there, and right."""
    processes = [publisher(tmp_path, seed) for seed in (1000, 2000)]
    said = []
    for process in processes:
        assert process.stdout is not None
        said += [int(process.stdout.readline().split()[1]) for _ in range(2)]
    for process in processes:
        process.kill()
        said += [int(line.split()[1]) for line in process.communicate()[0].splitlines() if line.count(" ") == 1]
    assert len(said) >= 4
    model = tiny()
    with make(model, tmp_path, hot="2048 tokens") as store:
        for seed in dict.fromkeys([*said[:4], *said[-4:]]):
            ids = tokens(100, seed=seed)
            with store.cache(ids) as cache:
                assert cache.get_seq_length() == 96
                assert_close(feed(model, ids[:, 96:], cache), oracle(ids)[:, 96:])
        stats = store.stats().durable
        assert stats is not None and stats.set_aside == 0
