"""Every wait is load-bearing: with each one taken out, the simulated accelerator finds an unordered access.

One scenario reaches every copy there is: write-through of a long prefill, demotion to make room, streaming, a tail
that is copied, blocks freed while copies use them, slots used again. It runs clean as the code is; then each wait, each
event that is recorded and each `after` is found in the sources, and taken out by itself: two in one function are two
cases. All of it is attended by the native kernel, and by the partials.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib
import inspect
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from support import DIM, UNSERVED_DIM, Attention, config_of, store_of

import tieredkv
from tieredkv.device import Event, SimulatedAccelerator
from tieredkv.device.event import settled_event
from tieredkv.durable import Piece
from tieredkv.errors import RaceError
from tieredkv.hf import seam
from tieredkv.store.blocks import BlockStore
from tieredkv.store.restore import Export, Restore
from tieredkv.transfer import Mover

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
        lent(cache)
        forward(cache, 1)
        cache.reset()
        forward(cache, 150, layers=1)  # breaks off while its blocks are on their way down
        cache.reset()
        forward(cache, 20)
        published_and_back(cache)


def lent(cache: tieredkv.TieredCache) -> None:
    """Something else is computed in a staging buffer, between loads."""
    store = store_of(cache)
    with store.prefetcher.lend() as memory:
        store.device.run(memory.zero_, writes=[("stage", 0)], name="lent")


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
            coming.take(Piece(range(layer, layer + 1), 0, (rows,)))
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
    device = SimulatedAccelerator(seed=seed, max_delay_seconds=0.002)
    with device:
        scenario(device, cold_dir, dim)
        assert device.clocks.races == 0


@dataclasses.dataclass(frozen=True)
class Site:
    """A place in the sources where an order is made.

    Args:
        module: file below the package, without its ending.
        function: qualified name of the method or function that it stands in.
        kind: "wait", or "record" for an event of the compute stream, or "after" for what an operation comes after.
        number: among those of its kind in the function.
    """

    module: str
    function: str
    kind: str
    number: int = 0

    def __str__(self) -> str:
        return f"{self.module.split('/')[-1]}-{self.function}-{self.kind}-{self.number}"


BROKEN_OFF = Site("store/moves", "MoveQueue._queue", "wait")

OTHERWISE = {
    BROKEN_OFF: "test_waits.py::test_slots_of_a_move_that_was_broken_off_are_free_when_its_copy_is_over",
    Site("transfer", "Mover._hold", "wait"): "test_arrival.py::test_no_more_is_kept_alive_than_the_limit",
    Site("store/links", "_rate", "wait", 0): "store/test_link_rates.py::test_a_rate_is_of_work_that_is_done",
    Site("store/links", "_rate", "wait", 1): "store/test_link_rates.py::test_a_rate_is_of_work_that_is_done",
    Site("store/links", "_rate", "record", 0): "store/test_link_rates.py::test_a_rate_is_of_work_that_is_done",
    Site("store/links", "_rate", "record", 1): "store/test_link_rates.py::test_a_rate_is_of_work_that_is_done",
    Site("prefetcher", "Prefetcher.__init__", "record"): (
        "test_prefetcher.py::test_a_fresh_buffer_is_loaded_after_what_was_computed_before_the_ring_was_made"
    ),
}
"""Places that the scenario does not need: the test that fails without them."""

REDUNDANT = {
    Site("store/blocks", "BlockStore._end", "wait"): "the device is closed next: that ends what runs, cancels the rest",
}
"""Places that no access needs: why they are there."""

MODULES = (
    *("inflight", "transfer", "prefetcher", "verified"),
    *sorted(f"store/{path.stem}" for path in (Path(tieredkv.__file__).parent / "store").glob("*.py")),
)


class Finder(ast.NodeTransformer):
    """Finds the places of a module; takes one of them out on its way.

    Args:
        module: file below the package, without its ending.
        out: what is to be taken out.
    """

    def __init__(self, module: str, out: Site | None = None) -> None:
        self._module, self._out = module, out
        self._names: list[str] = []
        self._depth = 0
        self.found: list[Site] = []

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self._names.append(node.name)
        self.generic_visit(node)
        self._names.pop()
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if self._depth:  # a function in a function: its code is a part of the outer one's
            return self.generic_visit(node)
        self._depth += 1
        self.visit_ClassDef(node)  # type: ignore[arg-type]  # it has a name and is visited alike
        self._depth -= 1
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        for keyword in node.keywords:
            if keyword.arg == "after":
                if self._is_out("after"):
                    keyword.value = ast.Tuple([], ast.Load())
                else:
                    keyword.value.is_after = True  # type: ignore[attr-defined]  # what is recorded there is no other
        self.generic_visit(node)
        if not isinstance(node.func, ast.Attribute) or isinstance(node.func.value, ast.Constant):
            return node  # of a constant `join` joins words
        if node.func.attr in ("wait", "join") and self._is_out("wait"):
            return ast.Call(_parsed("unheard"), [node.func.value], [])
        if node.func.attr == "record" and self._is_out("record"):
            return ast.Call(_parsed("nothing"), [], [])
        return node

    def visit_List(self, node: ast.List) -> ast.AST:
        return node if getattr(node, "is_after", False) else self.generic_visit(node)

    def _is_out(self, kind: str) -> bool:
        function = ".".join(self._names)
        number = sum((site.function, site.kind) == (function, kind) for site in self.found)
        self.found.append(Site(self._module, function, kind, number))
        return self.found[-1] == self._out


def _parsed(name: str) -> ast.expr:
    """A function of this file as the sources can name it."""
    return ast.parse(f"__import__({__name__!r}, fromlist=['x']).{name}", mode="eval").body


def unheard(event: Event) -> None:
    """A wait from which the host learns nothing."""
    Event.wait(event)


def nothing() -> Event:
    """An event that comes after nothing."""
    return settled_event(Event("nothing"))


def tree_of(module: str) -> ast.Module:
    return ast.parse((Path(tieredkv.__file__).parent / f"{module}.py").read_text())


def sites() -> list[Site]:
    """All there are."""
    found: list[Site] = []
    for module in MODULES:
        finder = Finder(module)
        finder.visit(tree_of(module))
        found += finder.found
    return found


def take_out(monkeypatch: pytest.MonkeyPatch, site: Site) -> None:
    """Give the function a code that lacks one place, whoever has imported it."""
    finder = Finder(site.module, site)
    tree = ast.fix_missing_locations(finder.visit(tree_of(site.module)))
    assert site in finder.found
    codes = [compile(tree, f"without {site}", "exec", dont_inherit=True)]
    for code in codes:
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
    owner = importlib.import_module(f"tieredkv.{site.module.replace('/', '.')}")
    function: Any = owner
    for name in site.function.split("."):
        function = getattr(function, name)
    function = inspect.unwrap(function)
    monkeypatch.setattr(function, "__code__", next(code for code in codes if code.co_qualname == site.function))


def test_what_is_not_in_the_scenario_is_tested_elsewhere() -> None:
    assert {*OTHERWISE, *REDUNDANT} <= set(sites())
    for test in OTHERWISE.values():
        file, name = test.split("::")
        assert f"def {name}(" in (Path(__file__).parent / file).read_text()


@pytest.mark.parametrize("site", [site for site in sites() if site not in {**OTHERWISE, **REDUNDANT}], ids=str)
def test_each_place_is_needed(monkeypatch: pytest.MonkeyPatch, cold_dir: Path, site: Site, dim: int) -> None:
    take_out(monkeypatch, site)
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
                assert coming.take(Piece(range(layer, layer + 1), index, (rooms[number % 2],)))
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
    device = SimulatedAccelerator(seed=0, max_delay_seconds=0.01)
    with device:
        assert restored_through_two_rooms(device) == waits


@pytest.mark.parametrize("waits", [True, False])
def test_slots_of_a_move_that_was_broken_off_are_free_when_its_copy_is_over(
    monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    def interrupted(self: Mover, *args: Any) -> None:
        demote(self, *args)
        raise KeyboardInterrupt

    demote = Mover.demote
    device = SimulatedAccelerator(latency_seconds=0.005)
    cache = tieredkv.TieredCache(config_of("llama"), hot="96 tokens", warm="96 tokens", block_size=BLOCK, device=device)
    with device, contextlib.nullcontext() if waits else pytest.raises(RaceError), cache:
        exported(cache, 40)
        if not waits:
            take_out(monkeypatch, BROKEN_OFF)
        monkeypatch.setattr(Mover, "demote", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cache.demote("warm")
        slots = store_of(cache).tiers["warm"].slots
        assert slots.free == slots.total
        device.host_access(writes=[("warm", slot) for slot in range(slots.total)])
