"""A saved conversation goes on exactly: in a new object, in a new process, and as a DynamicCache."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from support import assert_close, audit, feed, oracle, small, tiny, tokens
from transformers import DynamicCache

import tieredkv
from tieredkv.cache import TieredCache
from tieredkv.device import SimulatedAccelerator
from tieredkv.errors import MismatchError, SessionError, UnsupportedModelError

SIZES: dict[str, Any] = {"hot": "96 tokens", "warm": "64 tokens", "block_size": 16, "window": 16}
TURNS = [(0, 50), (50, 51), (51, 93), (93, 94), (94, 140)]
FAMILIES = ["llama", "gemma3", "gemma3n", "mistral", "qwen3next", "mla"]


def wanted(name: str, ids: torch.Tensor) -> torch.Tensor:
    """Logits of the same pieces through a DynamicCache: linear attention in pieces is rougher than at once."""
    model = tiny(name)
    return feed(model, ids, DynamicCache(config=model.config), [last - first for first, last in TURNS])


@pytest.mark.parametrize("name", FAMILIES)
def test_several_turns_each_in_a_new_object(tmp_path: Path, name: str) -> None:
    ids, file = tokens(140, rows=2), tmp_path / "talk.session"
    got = []
    for number, (first, last) in enumerate(TURNS):
        model = tiny(name)
        options: dict[str, Any] = {**SIZES, "cold": tmp_path / "cold"}
        if number % 2:
            options |= {"hot": "320 tokens", "block_size": 32, "window": 32}  # sizes may change from turn to turn
        make = tieredkv.TieredCache(model, **options) if not number else None
        with make or tieredkv.TieredCache.load(file, model, **options) as cache:
            assert cache.get_seq_length() == first
            got.append(feed(model, ids[:, first:last], cache))
            cache.save(file)
            audit(cache)
    assert_close(torch.cat(got, 1), wanted(name, ids))
    assert os.stat(file).st_mode & 0o777 == 0o600
    assert set(os.listdir(tmp_path)) - {"cold"} == {"talk.session"}  # nothing half written is left


def test_a_saved_cache_goes_on_as_if_nothing_was(tmp_path: Path) -> None:
    model, ids = tiny(), tokens(120)
    with small(model, tmp_path / "cold") as cache:
        got = [feed(model, ids[:, :70], cache)]
        cache.save(tmp_path / "a")
        got.append(feed(model, ids[:, 70:], cache, [1, 20]))
        assert_close(torch.cat(got, 1), oracle(ids))
        cache.save(tmp_path / "a")
    with tieredkv.TieredCache.load(tmp_path / "a", model, **SIZES) as cache:
        assert cache.get_seq_length() == 120


def test_on_a_device_whose_copies_come_late(tmp_path: Path) -> None:
    model, ids = tiny(), tokens(200)
    with SimulatedAccelerator(seed=1, max_delay_seconds=0.002) as device:
        with small(model, tmp_path / "cold", device=device) as cache:
            got = [feed(model, ids[:, :150], cache, [90, 1])]
            cache.save(tmp_path / "a")
        assert device.clocks.races == 0
    with SimulatedAccelerator(seed=2, max_delay_seconds=0.002) as device:
        sizes = {**SIZES, "cold": tmp_path / "cold"}
        with tieredkv.TieredCache.load(tmp_path / "a", model, device=device, **sizes) as cache:
            got.append(feed(model, ids[:, 150:], cache, [1, 20]))
            assert_close(torch.cat(got, 1), oracle(ids))
        assert device.clocks.races == 0


def test_rows_that_share_blocks_share_them_again(tmp_path: Path) -> None:
    model, ids = tiny(), tokens(64)
    with tieredkv.TieredCache(model, hot="512 tokens", block_size=16) as cache:
        feed(model, ids, cache)
        cache.batch_repeat_interleave(3)
        cache.save(tmp_path / "a")
    with tieredkv.TieredCache.load(tmp_path / "a", model, hot="512 tokens", block_size=16) as cache:
        more = tokens(1, rows=3, seed=4)
        assert_close(feed(model, more, cache), oracle(torch.cat([ids.expand(3, -1), more], 1))[:, 64:])
        assert len({entry.block_id for entry in cache.block_table()}) == 4 + 3


def test_one_layer_at_a_time_is_read_to_be_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids, alive, most, reads = tiny(), tokens(120), weakref.WeakSet[torch.Tensor](), 0, 0
    real = TieredCache.gather_layer

    def counted(self: TieredCache, layer_idx: int) -> Any:
        nonlocal most, reads
        pair = real(self, layer_idx)
        reads, most = reads + 1, max(most, len(alive) + 2)
        alive.update(pair or ())
        return pair

    with small(model, tmp_path / "cold") as cache:
        feed(model, ids, cache)
        monkeypatch.setattr(TieredCache, "gather_layer", counted)
        cache.save(tmp_path / "a")
    layers = model.config.num_hidden_layers
    assert layers > 1 and reads == layers
    assert most <= 3  # K and V of one layer, and the tensor that is being written


def test_a_cache_that_knows_no_model(tmp_path: Path) -> None:
    model, ids = tiny(), tokens(60)
    with small(model.config, None, warm="200 tokens") as cache:
        feed(model, ids[:, :40], cache)
        cache.save(tmp_path / "a")
    with tieredkv.TieredCache.load(tmp_path / "a", model, **SIZES) as cache:
        assert_close(feed(model, ids[:, 40:], cache), oracle(ids)[:, 40:])


def test_an_empty_cache(tmp_path: Path) -> None:
    model, ids = tiny(), tokens(30)
    with tieredkv.TieredCache(model, **SIZES) as cache:
        cache.save(tmp_path / "a")
    with tieredkv.TieredCache.load(tmp_path / "a", model, **SIZES) as cache:
        assert cache.get_seq_length() == 0
        assert_close(feed(model, ids, cache, [20]), oracle(ids))


def test_other_tools_can_look_inside(tmp_path: Path) -> None:
    model = tiny()
    with tieredkv.TieredCache(model, **SIZES) as cache:
        feed(model, tokens(40), cache)
        k, _ = cache.gather_layer(1) or (None, None)
        cache.save(tmp_path / "a")
    with safe_open(tmp_path / "a", "pt") as file:
        assert torch.equal(file.get_tensor("k.1"), k)
        assert file.metadata()["format"] == "tieredkv.session"


def test_positions_are_watched_over_a_restart(tmp_path: Path) -> None:
    model, ids = tiny(), tokens(40)
    with tieredkv.TieredCache(model, **SIZES) as cache:
        feed(model, ids, cache)
        cache.save(tmp_path / "a")
    with tieredkv.TieredCache.load(tmp_path / "a", model, **SIZES) as cache:
        with pytest.raises(tieredkv.PositionError):
            feed(model, ids, cache, position_ids=torch.arange(40)[None])
        assert cache.get_seq_length() == 40


# ---- what a model keeps outside of the cache


def test_what_the_model_keeps_goes_along(tmp_path: Path) -> None:
    model, ids = tiny(), tokens(30)
    model.model.rope_deltas = torch.tensor([[7]])
    with tieredkv.TieredCache(model, **SIZES) as cache:
        feed(model, ids, cache)
        cache.save(tmp_path / "a")
    other = tiny()
    tieredkv.TieredCache.load(tmp_path / "a", other, **SIZES).close()
    assert torch.equal(other.model.rope_deltas, torch.tensor([[7]]))


def test_a_config_alone_does_not_say_what_the_model_keeps(tmp_path: Path) -> None:
    model = tiny()
    model.config.rope_parameters["mrope_section"] = [2, 1, 1]
    with tieredkv.TieredCache(model.config, **SIZES) as cache:
        feed(model, tokens(30), cache)
        with pytest.raises(UnsupportedModelError, match="positions"):
            cache.save(tmp_path / "a")
        assert not list(tmp_path.iterdir())
        cache.save(tmp_path / "a", model)


def test_state_of_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    model = tiny("gemma3")
    with tieredkv.TieredCache(model, **SIZES) as cache:
        feed(model, tokens(30), cache)
        cache.layers[0].something = object()
        with pytest.raises(UnsupportedModelError, match="something"):
            cache.save(tmp_path / "a")
    assert not list(tmp_path.iterdir())


# ---- refusals


@torch.no_grad()
@pytest.mark.parametrize("other", ["weights", "dtype", "layers", "family"])
def test_another_model_is_refused(tmp_path: Path, other: str) -> None:
    model = tiny()
    with tieredkv.TieredCache(model, **SIZES) as cache:
        feed(model, tokens(40), cache)
        cache.save(tmp_path / "a")
    if other == "weights":
        model.model.layers[0].mlp.up_proj.weight[0, 0] += 1
    else:
        model = {
            "dtype": lambda: tiny(dtype=torch.bfloat16),
            "layers": lambda: tiny(num_hidden_layers=3),
            "family": lambda: tiny("gemma3"),
        }[other]()
    with pytest.raises(MismatchError, match="another model"):
        tieredkv.TieredCache.load(tmp_path / "a", model, **SIZES)
    assert model.config._attn_implementation != "tieredkv"


def test_damage_is_found(tmp_path: Path) -> None:
    model, file = tiny(), tmp_path / "a"
    with tieredkv.TieredCache(model, **SIZES) as cache:
        feed(model, tokens(40), cache)
        cache.save(file)
    whole = file.read_bytes()
    places = [0, 9, len(whole) // 3, len(whole) // 2, len(whole) - 40, len(whole) - 1]
    damaged = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in places]
    damaged += [whole[:cut] for cut in (0, 5, 60, len(whole) // 2, len(whole) - 1)] + [whole + b"\0"]
    for number, data in enumerate(damaged):
        file.write_bytes(data)
        with pytest.raises(SessionError):
            tieredkv.TieredCache.load(file, model, **SIZES)
        assert model.config._attn_implementation == "sdpa", number
    with pytest.raises(SessionError):
        tieredkv.TieredCache.load(tmp_path / "none", model, **SIZES)


def test_a_disk_that_refuses_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, file = tiny(), tmp_path / "a"
    with tieredkv.TieredCache(model, **SIZES) as cache:
        feed(model, tokens(40), cache)
        cache.save(file)
        before = file.read_bytes()
        feed(model, tokens(5), cache)

        def full(*_: Any) -> int:
            raise OSError(28, "No space left on device")

        for step in ("write", "fsync", "replace"):
            with monkeypatch.context() as patch:
                patch.setattr(os, step, full)
                with pytest.raises(SessionError, match="No space"):
                    cache.save(file)
            assert file.read_bytes() == before
            assert [each.name for each in tmp_path.iterdir()] == ["a"]
        cache.save(file)
        with pytest.raises(SessionError):
            cache.save(tmp_path / "no folder" / "a")
    with tieredkv.TieredCache.load(file, model, **SIZES) as cache:
        assert cache.get_seq_length() == 45


def test_what_killed_writers_left_is_swept_in_time(tmp_path: Path) -> None:
    old, new, other = (tmp_path / name for name in (f".a.{'0' * 16}", f".a.{'1' * 16}", f".b.{'0' * 16}"))
    for left in (old, new, other):
        left.write_bytes(b"half")
    for left in (old, other):
        os.utime(left, (1, 1))
    with tieredkv.TieredCache(tiny(), **SIZES) as cache:
        feed(tiny(), tokens(20), cache)
        cache.save(tmp_path / "a")
    assert {path.name for path in tmp_path.iterdir()} == {"a", new.name, other.name}


# ---- other processes

CHILD = """
import sys, torch
sys.path[:0] = ["tests", "."]
from support import feed, tiny, tokens
import tieredkv
file, name, first, last = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
model = tiny(name)
cache = tieredkv.TieredCache.load(file, model, hot="160 tokens", warm="64 tokens", block_size=16)
logits = feed(model, tokens(140, rows=2)[:, first:last], cache)
cache.save(file)
torch.save(logits, file + ".logits")
print("saving", flush=True)
for round in range(10**6 if len(sys.argv) > 5 else 0):
    cache.save(file)
"""


def child(*arguments: object) -> list[str]:
    return [sys.executable, "-W", "ignore", "-c", CHILD, *map(str, arguments)]


ROOT = Path(__file__).parent.parent.parent


def test_a_conversation_goes_on_in_another_process(tmp_path: Path) -> None:
    ids, file, model = tokens(140, rows=2), tmp_path / "a", tiny("gemma3")
    with tieredkv.TieredCache(model, **SIZES) as cache:
        got = [feed(model, ids[:, :50], cache)]
        cache.save(file)
    subprocess.run(child(file, "gemma3", 50, 93), check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    got.append(torch.load(f"{file}.logits"))
    with tieredkv.TieredCache.load(file, model, **SIZES) as cache:
        got.append(feed(model, ids[:, 93:], cache, [1]))
    assert_close(torch.cat(got, 1), oracle(ids, "gemma3"))


def test_killed_while_saving_the_file_is_whole(tmp_path: Path) -> None:
    """At many points of saving over and over; every time the file loads, and holds all tokens."""
    ids, file, model = tokens(140, rows=2), tmp_path / "a", tiny()
    with tieredkv.TieredCache(model, **SIZES) as cache:
        feed(model, ids[:, :50], cache)
        cache.save(file)
    generator = torch.Generator().manual_seed(0)
    process = subprocess.Popen(child(file, "llama", 50, 140, "again"), cwd=ROOT, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"saving\n"
        for _ in range(25):
            time.sleep(float(torch.rand(1, generator=generator)) * 0.02)
            os.kill(process.pid, signal.SIGSTOP)
            with tieredkv.TieredCache.load(file, model, **SIZES) as cache:
                assert cache.get_seq_length() == 140
            os.kill(process.pid, signal.SIGCONT)
    finally:
        process.kill()
        process.communicate()
    with tieredkv.TieredCache.load(file, model, **SIZES | {"warm": "160 tokens"}) as cache:
        ids = torch.cat([ids, ids[:, :5]], 1)
        assert_close(feed(model, ids[:, 140:], cache), oracle(ids)[:, 140:])


# ---- DynamicCache


@pytest.mark.parametrize(
    ("name", "with_config"),
    # A hybrid model needs a DynamicCache with its config.
    [(name, True) for name in FAMILIES] + [(name, False) for name in ("llama", "gemma3", "gemma3n")],
)
def test_from_a_dynamic_cache_and_back_in_mid_conversation(tmp_path: Path, name: str, with_config: bool) -> None:
    ids, model = tokens(140, rows=2), tiny(name)
    dynamic = DynamicCache(config=model.config) if with_config else DynamicCache()
    got = [feed(model, ids[:, :50], dynamic), feed(model, ids[:, 50:51], dynamic)]
    with tieredkv.TieredCache.from_dynamic(dynamic, model, cold=tmp_path / "cold", **SIZES) as cache:
        assert dynamic.get_seq_length(1) == 51
        got += [feed(model, ids[:, 51:93], cache), feed(model, ids[:, 93:94], cache)]
        back = cache.to_dynamic()
        again = feed(model, ids[:, 94:], cache)
    got.append(feed(model, ids[:, 94:], back))
    assert_close(again, got[-1])
    assert_close(torch.cat(got, 1), wanted(name, ids))


def test_a_dynamic_cache_of_another_model_is_refused() -> None:
    dynamic = DynamicCache(config=tiny("gemma3").config)
    with pytest.raises(MismatchError, match="layers"):
        tieredkv.TieredCache.from_dynamic(dynamic, tiny(), **SIZES)
    dynamic = DynamicCache(config=tiny(num_hidden_layers=3).config)
    with pytest.raises(MismatchError, match="layers"):
        tieredkv.TieredCache.from_dynamic(dynamic, tiny(), **SIZES)
