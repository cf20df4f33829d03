"""Every wait is load-bearing: with each one taken out, the simulated accelerator finds an unordered access.

One scenario reaches every copy there is: write-through of a long prefill, demotion to make room, streaming, a tail
that is copied, blocks freed while copies use them, slots used again. It runs clean as the code is; then each wait and
each `after` is taken out in turn. All of it is attended by the native kernel, and by the partials.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import DIM, UNSERVED_DIM, Attention, config_of, store_of

import tieredkv
from tieredkv.device import Event, SimulatedAccelerator
from tieredkv.device.simulated import ClockedEvent, SimulatedStream
from tieredkv.errors import RaceError
from tieredkv.hf import forwarding, seam
from tieredkv.prefetcher import Prefetcher
from tieredkv.store import moves, planner
from tieredkv.store.blocks import BlockStore
from tieredkv.store.restore import Export, Restore

BLOCK = 16
NATIVE, PARTIALS = DIM, UNSERVED_DIM
"""Dims that the native kernel takes, and dims that it leaves to the partials."""


def forward(cache: tieredkv.TieredCache, tokens: int, layers: int = 2) -> None:
    """One forward of random K, V and queries through both layers, attended over blocks."""
    module, dim = Attention().eval(), cache.model_config.head_dim
    for layer in range(layers):
        k, v = cache.update(torch.randn(1, 2, tokens, dim), torch.randn(1, 2, tokens, dim), layer, kwargs={})
        seam.attention(module, torch.randn(1, 4, tokens, dim), k, v, None)


def scenario(device: SimulatedAccelerator, folder: Path, dim: int) -> None:
    """Every copy there is, on three slots hot, two warm, the rest cold."""
    config = config_of("llama", head_dim=dim)
    config._attn_implementation = "tieredkv"
    with tieredkv.TieredCache(
        config, hot="64 tokens", warm="32 tokens", cold=folder, block_size=BLOCK, window=16, device=device
    ) as cache:
        forward(cache, 20)
        forward(cache, 150)  # most of it is written through
        cache.gather_layer(0)  # and read back while the forward is open
        for _ in range(40):  # streams at each step, seals and demotes, uses slots again
            forward(cache, 1)
        cache.crop(-30)  # into a block that lies below
        for _ in range(3):
            forward(cache, 1)
        cache.demote("cold")
        cache.promote()
        for _ in range(20):
            forward(cache, 1)
        cache.reset()
        forward(cache, 150)
        cache.crop(-100)  # frees what was just written through
        forward(cache, 40)
        forward(cache, 1)
        published_and_back(cache)


@dataclasses.dataclass
class Rows:
    """Some layers of some blocks, as a directory of published blocks gives them."""

    layers: range
    first: int
    rows: tuple[torch.Tensor, ...]


def exported(cache: tieredkv.TieredCache, tokens: int) -> tuple[BlockStore, list[tuple[int, ...]], list[torch.Tensor]]:
    """The store; of the blocks that so many tokens seal the checksums, and for each layer the rows, [n, bytes]."""
    forward(cache, tokens)
    cache.crop(-1)  # ends the forward, and seals
    forward(cache, 1)
    store, holder = store_of(cache), cache.parts().holder
    assert holder is not None
    with store.lock:
        blocks = [block for block in holder.table.blocks() if block.sealed]
        export = Export(store, blocks)
        sums = [export.checksums(index) for index in range(len(blocks))]
        layers = [torch.stack([export.rows(i, layer) for i in range(len(blocks))]) for layer in range(2)]
    return store, sums, layers


def published_and_back(cache: tieredkv.TieredCache) -> None:
    """Blocks leave as bytes, and come back into slots that attention has only just read."""
    cache.reset()
    store, sums, layers = exported(cache, 40)
    forward(cache, 1)
    cache.reset()
    with store.lock:
        coming = Restore(store, [str(index) for index in range(len(sums))], sums)
        for layer, rows in enumerate(layers):
            coming.take(Rows(range(layer, layer + 1), 0, (rows,)))
        found = coming.finish()
        assert len(found) == len(sums) and any(block.hot is not None for block in found)
        reads = [("hot", block.hot) for block in found if block.hot is not None]
        store.device.run(lambda: None, reads=reads, name="attend what came back")
        for block in found:
            block.refs = 0
            store.release(block)


def run(folder: Path, dim: int, seed: int = 0) -> int:
    """The scenario's races on a slow accelerator."""
    torch.manual_seed(seed)
    device = SimulatedAccelerator(seed=seed, max_delay_seconds=0.002)
    try:
        with contextlib.suppress(RaceError):
            scenario(device, folder, dim)
    finally:
        races = device.clocks.races
        device.close()
    return races


@pytest.fixture(params=[NATIVE, PARTIALS], ids=["native", "partials"])
def dim(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.mark.parametrize("seed", range(3))
def test_nothing_races(cold_dir: Path, seed: int, dim: int) -> None:
    torch.manual_seed(seed)
    with SimulatedAccelerator(seed=seed, max_delay_seconds=0.002) as device:
        scenario(device, cold_dir, dim)
        assert device.clocks.races == 0


def without_after(monkeypatch: pytest.MonkeyPatch, operation: str) -> None:
    """Submissions whose name starts like this wait for nothing."""
    submit = SimulatedStream.submit

    def hasty(
        self: SimulatedStream, work: Callable[[], object], *, name: str = "", after: Any = (), **rest: Any
    ) -> Event:
        return submit(self, work, name=name, after=() if name.startswith(operation) else after, **rest)

    monkeypatch.setattr(SimulatedStream, "submit", hasty)


def without_wait(monkeypatch: pytest.MonkeyPatch, owner: Any, method: str) -> None:
    """Inside this method, waiting for an event teaches the host nothing."""
    original = getattr(owner, method)

    def hasty(*args: Any, **kwargs: Any) -> Any:
        with deaf():
            return original(*args, **kwargs)

    monkeypatch.setattr(owner, method, hasty)


@contextlib.contextmanager
def deaf() -> Iterator[None]:
    wait, done = ClockedEvent.wait, ClockedEvent.done
    ClockedEvent.wait = Event.wait
    ClockedEvent.done = Event.done
    try:
        yield
    finally:
        ClockedEvent.wait, ClockedEvent.done = wait, done


AFTER = {
    ("transfer", "demote"): "demote hot",
    ("transfer", "write_through"): "write through",
    ("prefetcher", "_submit"): "load layer",
    ("blocks", "load_hot"): "promote",
    ("restore", "_write"): "restore",
}
"""What is submitted after something, by module and function: the name of the operation."""

WAITS: dict[tuple[str, str], tuple[Any, str]] = {
    ("prefetcher", "_wait"): (Prefetcher, "_wait"),
    ("prefetcher", "flush"): (Prefetcher, "flush"),
    ("moves", "_apply"): (moves.MoveQueue, "_apply"),
    ("blocks", "load_hot"): (BlockStore, "load_hot"),
    ("blocks", "release"): (BlockStore, "release"),
    ("gather", "read_layer"): (forwarding, "read_layer"),
    ("planner", "commit"): (planner, "commit"),
    ("restore", "_wait"): (Restore, "_wait"),
}
"""Where the host waits, by module and function: what is replaced to take the wait out."""

OTHERWISE = {
    ("transfer", "_hold"): "bounds memory: tests/test_transfer.py",
    ("links", "_rate"): "ends what is timed",
    ("blocks", "close"): "the device is closed next, which ends what runs and cancels the rest",
}
"""Waits that order no two accesses."""

MODULES = (
    *("transfer", "prefetcher", "store/blocks", "store/gather", "store/links", "store/moves", "store/planner"),
    "store/restore",
)


def functions_with(found: Callable[[ast.Call], bool]) -> set[tuple[str, str]]:
    """(module, innermost function) of the calls for which `found` holds."""
    package, places = Path(tieredkv.__file__).parent, set()
    for module in MODULES:
        tree = ast.parse((package / f"{module}.py").read_text())
        for function in (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)):
            calls = (n for n in ast.walk(function) if isinstance(n, ast.Call))
            if any(found(call) for call in calls):
                places.add((Path(module).name, function.name))
    return places


def test_every_wait_has_its_case() -> None:
    waits = functions_with(lambda c: isinstance(c.func, ast.Attribute) and c.func.attr in ("wait", "join"))
    assert waits == {*WAITS, *OTHERWISE}
    assert functions_with(lambda c: any(k.arg == "after" for k in c.keywords)) == set(AFTER)


@pytest.mark.parametrize("operation", AFTER.values())
def test_what_a_copy_comes_after(monkeypatch: pytest.MonkeyPatch, cold_dir: Path, operation: str, dim: int) -> None:
    without_after(monkeypatch, operation)
    assert run(cold_dir, dim)


@pytest.mark.parametrize("place", WAITS, ids="_".join)
def test_what_the_host_waits_for(
    monkeypatch: pytest.MonkeyPatch, cold_dir: Path, place: tuple[str, str], dim: int
) -> None:
    without_wait(monkeypatch, *WAITS[place])
    assert run(cold_dir, dim)


def restored_through_two_rooms(device: SimulatedAccelerator) -> bool:
    """Whether blocks come back as they were from pieces whose bytes are overwritten by the second next one."""
    config = config_of("llama")
    config._attn_implementation = "tieredkv"
    with tieredkv.TieredCache(config, hot="256 tokens", warm=0, block_size=BLOCK, window=16, device=device) as cache:
        store, sums, layers = exported(cache, 100)
        wanted = [(index, layer, layers[layer][index]) for index in range(len(sums)) for layer in range(2)]
        cache.reset()
        rooms = [torch.empty_like(wanted[0][2]).unsqueeze(0) for _ in "ab"]
        with store.lock:
            coming = Restore(store, [str(index) for index in range(len(sums))], sums)
            for number, (index, layer, row) in enumerate(wanted):
                rooms[number % 2].copy_(row)
                assert coming.take(Rows(range(layer, layer + 1), index, (rooms[number % 2],)))
            found = coming.finish()
            device.synchronize()
            again = Export(store, found)
            return all(torch.equal(again.rows(index, layer), row) for index, layer, row in wanted)


@pytest.mark.parametrize("waits", [True, False])
def test_a_restored_piece_is_written_before_its_bytes_are_overwritten(
    monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    if not waits:
        monkeypatch.setattr(Restore, "_wait", lambda self: None)
    with SimulatedAccelerator(seed=0, max_delay_seconds=0.01) as device:
        assert restored_through_two_rooms(device) == waits
