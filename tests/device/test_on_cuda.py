"""The whole cache on an emulated CUDA GPU, where everything is done as late, and in as odd an order, as is legal."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_cuda import FLASH, EmulatedGpu, compiled_flex
from support import difference, feed, oracle, small, store_of, tiny, tokens

from tieredkv import CacheSettings, KVStore, TieredCache
from tieredkv.attention import kernels
from tieredkv.checksum import Checksummer
from tieredkv.device import CudaDevice, Event, cuda
from tieredkv.errors import TieredKVError
from tieredkv.hf.step import Member, StepCache
from tieredkv.tiers import WarmTier

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")

PIECES = [100, 30, 1, 1, 1, 13, 1, 1, 1, 1]
"""A long prompt that is written through, steps that stream, and what comes back from a user."""
COUNT = sum(PIECES)


@contextlib.contextmanager
def on_gpu(seed: int, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Iterator[tuple[EmulatedGpu, Any, Any]]:
    """(GPU, model on it, a small cache of it)."""
    monkeypatch.setattr(kernels, "_compile", compiled_flex)
    model = tiny(changes.pop("name", "llama"), dtype=changes.pop("dtype", torch.float32))
    if hasattr(model, "set_experts_implementation") and "Experts" in repr(model):
        model.set_experts_implementation("eager")  # the fused kernel for them is one of CUDA's own
    given = model if changes.pop("way", "blocks") == "blocks" else model.config
    order = changes.pop("eagerness", 0.2), changes.pop("computes_ahead", False)
    with EmulatedGpu(seed, *order) as gpu, CudaDevice("cuda:0") as device:
        gpu.put_module(model)
        with small(given, changes.pop("cold", None), **{"warm": "600 tokens", "device": device, **changes}) as cache:
            yield gpu, model, cache


def logits(gpu: EmulatedGpu, model: Any, cache: TieredCache) -> torch.Tensor:
    return gpu.get(feed(model, gpu.put(tokens(COUNT)), cache, PIECES))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("changes", [{}, {"way": "gather"}, {"warm": "32 tokens"}], ids=["warm", "gather", "cold"])
def test_logits_are_those_without_a_cache(
    monkeypatch: pytest.MonkeyPatch, cold_dir: Path, seed: int, changes: dict[str, Any]
) -> None:
    cold = cold_dir if "warm" in changes else None
    with on_gpu(seed, monkeypatch, cold=cold, **changes) as (gpu, model, cache):
        assert difference(logits(gpu, model, cache), oracle(tokens(COUNT))) < 2e-5
        assert cache.stats().decode.streamed_bytes > 0


@torch.no_grad()
def padded_logits(
    gpu: EmulatedGpu, model: Any, cache: TieredCache, ids: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Of all tokens of several rows, given in pieces with what hides their padding."""
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    got, last = [], 0
    for piece in PIECES:
        first, last = last, last + piece
        part, seen, at = (gpu.put(x) for x in (ids[:, first:last], mask[:, :last], positions[:, first:last]))
        got.append(gpu.get(model(part, attention_mask=seen, position_ids=at, past_key_values=cache).logits))
    return torch.cat(got, 1)


@pytest.mark.parametrize("name", ["llama", "gptoss", "gemma3", "gemma2"])
def test_rows_with_padding_sinks_and_windows(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    ids = tokens(COUNT, rows=3)
    mask = torch.ones_like(ids)
    mask[0, :37] = 0
    with on_gpu(1, monkeypatch, name=name, warm="200 tokens") as (gpu, model, cache):
        got = padded_logits(gpu, model, cache, ids, mask)
        assert cache.mode == "blocks" and cache.stats().decode.streamed_bytes > 0
    assert difference(got[mask.bool()], oracle(ids, name, mask=mask)[mask.bool()]) < 2e-5


@pytest.mark.parametrize("hot", ["96 tokens", "400 tokens"], ids=["streamed", "hot"])
def test_a_row_of_nothing_but_padding(monkeypatch: pytest.MonkeyPatch, hot: str) -> None:
    ids = tokens(COUNT, rows=2)
    mask = torch.ones_like(ids)
    mask[0] = 0
    with on_gpu(1, monkeypatch, warm="200 tokens", hot=hot) as (gpu, model, cache):
        got = padded_logits(gpu, model, cache, ids, mask)
    assert difference(got[1:], oracle(ids, mask=mask)[1:]) < 2e-5


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
def test_caches_of_unlike_lengths_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_compile", compiled_flex)
    model, texts = tiny(), [tokens(count, seed=count) for count in (5, 131, 16, 65)]
    options: dict[str, Any] = {"hot": "192 tokens", "warm": "400 tokens", "block_size": 16, "window": 16}
    with EmulatedGpu(seed=3) as gpu, torch.no_grad():
        gpu.put_module(model)
        with KVStore(model, durable=False, **options) as store:
            caches = [store.cache(text) for text in texts]
            for cache, text in zip(caches, texts, strict=True):
                model(gpu.put(text), past_key_values=cache)
            step = StepCache(model.config)
            for turn in range(3):
                members = [Member(cache, tokens(1, seed=turn)[0]) for cache in caches]
                texts = [torch.cat([text, tokens(1, seed=turn)], 1) for text in texts]
                given = step.begin(members)
                ids, positions = (gpu.put(x) if x.device.type == "cpu" else x for x in (given.ids, given.positions))
                got = gpu.get(model(ids, position_ids=positions, past_key_values=step).logits)[0, given.last]
                step.end()
            assert store_of(caches[1]).counters.moves()["warm_to_hot"].bytes > 0
            for cache in caches:
                cache.close()
    for row, text in enumerate(texts):
        assert difference(got[row], oracle(text)[0, -1]) < 2e-5


def test_what_is_dropped_is_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window and sinks, with nothing between them: the same as where the native kernel attends."""
    settings = CacheSettings(sinks=16, window=32, beyond="drop")
    changes: dict[str, Any] = {"settings": settings, "window": 32, "warm": 0, "hot": "224 tokens"}
    model = tiny()
    with small(model, None, **changes) as cache:
        wanted = feed(model, tokens(COUNT), cache, PIECES)
    with on_gpu(2, monkeypatch, **changes) as (gpu, model, cache):
        assert difference(logits(gpu, model, cache), wanted) < 2e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_attended_by_the_flash_operator(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    exact = oracle(tokens(COUNT), dtype=torch.float64)
    stock = difference(oracle(tokens(COUNT), dtype=dtype), exact)
    with on_gpu(0, monkeypatch, dtype=dtype) as (gpu, model, cache):
        assert difference(logits(gpu, model, cache), exact) < 2 * stock
        assert gpu.asked[FLASH] > 0 and cache.stats().decode.streamed_bytes > 0


@pytest.mark.parametrize("rows", [1, 2])
def test_a_step_stops_the_host_for_nothing_but_what_arrives(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    with on_gpu(0, monkeypatch) as (gpu, model, cache):
        ids = tokens(COUNT + 4).repeat(rows, 1)
        if rows > 1:
            ids[1, 100:] = ids[1, 100:].flip(0)  # the rows share their first blocks
        ids = gpu.put(ids)
        with torch.no_grad():
            model(ids[:, :COUNT], cache=cache)
            model(ids[:, COUNT : COUNT + 1], cache=cache)
            gpu.host_waits.clear()
            before = cache.stats().decode.streamed_bytes
            for step in range(1, 4):
                model(ids[:, COUNT + step : COUNT + step + 1], cache=cache)
            assert cache.stats().decode.streamed_bytes > before
        # Neither what computes nor what copies stops for a value: only what compares checksums does.
        assert {thread for thread, _ in gpu.host_waits} <= {"tieredkv-up-finish"}


@pytest.mark.parametrize("lossy", [False, True])
def test_what_arrives_wrong_is_read_again_before_it_is_used(monkeypatch: pytest.MonkeyPatch, lossy: bool) -> None:
    read, wrong = WarmTier.read, [3]

    def at_times_wrong(self: WarmTier, layer: int, slots: Any, out: Any, *, non_blocking: bool = False) -> None:
        read(self, layer, slots, out, non_blocking=non_blocking)
        if non_blocking and wrong[0]:
            wrong[0] -= 1
            out[1][:, -1:].view(torch.int8).add_(1)

    codec: dict[str, Any] = {"codec": "int8"} if lossy else {}
    with on_gpu(1, monkeypatch, **codec) as (gpu, model, cache):
        wanted = logits(gpu, model, cache)
    monkeypatch.setattr(WarmTier, "read", at_times_wrong)
    with on_gpu(2, monkeypatch, **codec) as (gpu, model, cache):
        got = logits(gpu, model, cache)
        stats = cache.stats()
    assert wrong == [0] and (stats.checksum_failures, stats.retries) == (3, 3)
    assert torch.equal(got, wanted)


def without_order(monkeypatch: pytest.MonkeyPatch, lane: type) -> None:
    """What a lane does begins when what comes before is enqueued."""
    issue = lane.issue  # type: ignore[attr-defined]

    def hasty(self: Any, operation: Any, work: Any) -> None:
        for event in operation.after:
            Event.join(event)
        operation.after = ()
        issue(self, operation, work)

    monkeypatch.setattr(lane, "issue", hasty)


def without_after(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy is enqueued behind nothing."""
    without_order(monkeypatch, cuda.CopyLane)


def without_waiting_for_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for a copy goes on when it is enqueued."""
    monkeypatch.setattr(cuda.CudaEvent, "join", Event.join)
    monkeypatch.setattr(cuda.CudaEvent, "done", Event.done)


def without_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes after computing does not."""
    monkeypatch.setattr(CudaDevice, "record", lambda self: cuda.settled_event(Event("record")))


def without_waiting_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    """What arrived is compared when its copy is enqueued."""
    without_order(monkeypatch, cuda.FinishLane)


def without_waiting_for_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was decoded is attended when that is enqueued."""

    def hasty(self: Any, operation: Any, work: Any) -> None:
        for event in operation.after:
            event.wait()
        with torch.cuda.stream(self._stream):
            work()

    monkeypatch.setattr(cuda.FinishLane, "issue", hasty)


def without_waiting_to_take_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long a copy took is asked before its end, where nothing was compared that came after it."""
    queue = cuda.CudaStream.queue

    def hasty(self: Any, work: Any, finish: Any, operation: Any) -> Event:
        copied = operation.event
        return queue(self, work, finish and (lambda result, took: finish(result, lambda: copied.seconds)), operation)

    monkeypatch.setattr(cuda.CudaStream, "queue", hasty)


TAKEN_OUT = [
    (without_after, {}),
    (without_waiting_for_the_end, {}),
    (without_a_record, {}),
    (without_waiting_to_compare, {}),
    (without_waiting_to_take_the_time, {"settings": CacheSettings(verify="off")}),
    (without_waiting_for_decoding, {"codec": "int8"}),
]


ORDERS: list[dict[str, Any]] = [
    {"eagerness": 0.0},  # as late as can be
    {"eagerness": 0.0, "computes_ahead": True},  # what streams bring is as late as can be, and is attended at once
    {"eagerness": 0.2},
]
"""Each wait that is taken out shows in one of these whatever the threads of the host do: chance is only in the last."""


@pytest.mark.parametrize(("take_out", "changes"), TAKEN_OUT, ids=lambda value: getattr(value, "__name__", ""))
def test_each_wait_on_the_gpu_is_needed(
    monkeypatch: pytest.MonkeyPatch, take_out: Callable[[pytest.MonkeyPatch], None], changes: dict[str, Any]
) -> None:
    with on_gpu(0, monkeypatch, **changes) as (gpu, model, cache):
        wanted = logits(gpu, model, cache)
        assert not cache.stats().retries
    for order in ORDERS:
        with on_gpu(1, monkeypatch, **order, **changes) as (gpu, model, cache):
            assert torch.equal(logits(gpu, model, cache), wanted)
    take_out(monkeypatch)
    for seed in range(15):
        try:
            with on_gpu(seed, monkeypatch, **ORDERS[seed % len(ORDERS)], **changes) as (gpu, model, cache):
                if not torch.equal(logits(gpu, model, cache), wanted) or cache.stats().retries:
                    return
        except (TieredKVError, RuntimeError):
            return
    pytest.fail("nothing went wrong without it")


def test_weights_of_a_checksum_are_there_for_every_stream() -> None:
    """A longer row needs more weights; a kernel of another stream may not have read the ones before."""
    with EmulatedGpu(eagerness=0.0) as gpu:
        checksummer, one, other = Checksummer(), torch.cuda.Stream(), torch.cuda.Stream()
        short, long = gpu.put(torch.arange(64.0).view(1, 1, 8, 8)), gpu.put(torch.arange(4096.0).view(1, 1, 64, 64))
        gpu.synchronize()
        with torch.cuda.stream(one):
            wanted = checksummer.checksum((short,)).tolist()
        with torch.cuda.stream(other):
            got = checksummer.checksum((short,))  # is not done yet
        with torch.cuda.stream(one):
            checksummer.checksum((long,)).tolist()
            torch.empty(8, device="cuda").tolist()
        with torch.cuda.stream(other):
            assert got.tolist() == wanted
