"""Lookahead: chunks are on their way before they are wanted, across layers and steps, and never into a buffer in use.

The ring is watched from outside, by the operations that a simulated accelerator was given, in their order; and by
itself, over blocks of a store, with more buffers than a pass has chunks and in orders that nobody announced. That each
of its waits is needed is what tests/test_waits.py shows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import pytest
import torch
from support import DIM, Attention, config_of, store_of

import tieredkv
from tieredkv.device import Device, SimulatedAccelerator, Traced
from tieredkv.errors import RaceError
from tieredkv.hf import seam
from tieredkv.plan import Chunk
from tieredkv.prefetcher import Prefetcher, Staging

BLOCK, LAYERS = 16, 3
START = "start"
"""Marks in the trace where a forward is announced."""


def opened(device: Device, hot: str = "96 tokens") -> tieredkv.TieredCache:
    """A cache of three layers, two staging buffers of one block, with room below for the rest."""
    config = config_of("llama", num_hidden_layers=LAYERS)
    config._attn_implementation = "tieredkv"
    return tieredkv.TieredCache(config, hot=hot, warm="1024 tokens", block_size=BLOCK, window=16, device=device)


def forward(cache: tieredkv.TieredCache, tokens: int) -> None:
    """One forward of random K, V and queries through all layers."""
    module = Attention().eval()
    for layer in range(LAYERS):
        k, v = cache.update(torch.randn(1, 2, tokens, DIM), torch.randn(1, 2, tokens, DIM), layer, kwargs={})
        seam.attention(module, torch.randn(1, 4, tokens, DIM), k, v, None)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[list[Traced]]:
    """The operations of five steps of one token, each from where the one before ended, of a cache that streams."""
    start = Prefetcher.start

    def marked(self: Prefetcher, layers: Sequence[int], chunks: Sequence[Chunk]) -> None:
        device.trace.append(Traced("host", START, (), ()))
        start(self, layers, chunks)

    monkeypatch.setattr(Prefetcher, "start", marked)
    device = SimulatedAccelerator(is_traced=True)
    with device, opened(device) as cache:
        forward(cache, 241)
        forward(cache, 1)  # what is read changes once more: a block went down
        found = []
        for _ in range(5):
            first = len(device.trace)
            forward(cache, 1)
            found.append(device.trace[first:])
        assert [step[0].name for step in found] == [START] * 5
        assert len(places(found[0], "load layer 0")) > 2  # a layer has more chunks than there are buffers
        assert not device.clocks.races
    return found


def places(step: Sequence[Traced], name: str) -> list[int]:
    """Where operations of this name stand."""
    return [index for index, each in enumerate(step) if each.name == name]


def test_the_next_layer_is_on_its_way_before_the_last_chunk_of_one_is_attended(steps: list[list[Traced]]) -> None:
    for step in steps:
        attended = places(step, "attend chunk")
        for layer in range(LAYERS - 1):
            last = attended[(layer + 1) * len(attended) // LAYERS - 1]
            assert places(step, f"load layer {layer + 1}")[0] < last


def test_the_next_step_is_on_its_way_before_it_is_announced(steps: list[list[Traced]]) -> None:
    for step in steps:
        announced, last = places(step, START)[0], places(step, "attend chunk")[-1]
        # Nothing is loaded as the step begins: its first chunks were, by the step before; the next one's are by this.
        assert places(step, "load layer 0")[0] > places(step, "attend chunk")[0] > announced
        assert step[-1].name == "load layer 0" and places(step, "load layer 0")[-2] < last


def test_each_chunk_is_loaded_once_and_attended_from_the_buffer_it_came_into(steps: list[list[Traced]]) -> None:
    """In each step all chunks of all layers, and loads are two ahead of what is attended."""
    operations = [each for step in steps for each in step]
    loads = [each for each in operations if each.name.startswith("load layer")]
    attended = [each for each in operations if each.name == "attend chunk"]
    assert len(loads) == len(attended)
    for load, later in zip(loads, attended[2:], strict=False):
        assert load.writes == later.reads
    chunks = len(attended) // len(steps) // LAYERS
    for layer in range(LAYERS):
        blocks = [load.reads for load in loads if load.name == f"load layer {layer}"]
        assert len(set(blocks)) == chunks and len(blocks) == chunks * len(steps)


def test_what_is_computed_hides_what_is_copied() -> None:
    """Copying takes half as long as attending: all but the very first load is done when it is wanted."""
    config = config_of("llama")
    config._attn_implementation = "tieredkv"
    chunk_seconds, steps = 0.03, 10
    bytes_per_second = 2 * 2 * DIM * BLOCK * 4 / (chunk_seconds / 2)  # a chunk is K and V of two heads of a block
    device = SimulatedAccelerator(
        bytes_per_second=bytes_per_second, compute_seconds={"attend chunk": chunk_seconds}, is_traced=True
    )
    with (
        device,
        tieredkv.TieredCache(
            config, hot="96 tokens", warm="1024 tokens", block_size=BLOCK, window=16, device=device
        ) as cache,
    ):
        module = Attention().eval()
        for tokens in [82, *[1] * steps]:
            for layer in range(2):
                k, v = cache.update(torch.randn(1, 2, tokens, DIM), torch.randn(1, 2, tokens, DIM), layer, kwargs={})
                seam.attention(module, torch.randn(1, 4, tokens, DIM), k, v, None)
        stats = cache.stats()
        # Two chunks of each of two layers: without a look across layers or steps no more than half would be hidden.
        assert len(places(device.trace, "attend chunk")) == 2 * 2 * steps
        assert stats.decode.transfer_seconds >= 2 * 2 * steps * chunk_seconds / 2
        assert stats.overlap_efficiency >= 0.8


# ---- the ring by itself


@dataclasses.dataclass
class Streamed:
    """Blocks that lie below, what they hold, and a device on which nothing has been streamed yet.

    Args:
        cache: whose blocks they are.
        device: its device.
        chunks: of one block each.
        k: for each layer the keys of all blocks, [kv_heads, tokens, dim].
    """

    cache: tieredkv.TieredCache
    device: SimulatedAccelerator
    chunks: list[Chunk]
    k: list[torch.Tensor]

    def ring(self, buffers: int) -> Prefetcher:
        """A ring of its own."""
        store = store_of(self.cache)
        made = [
            Staging(store.layers, store.mover, 1, BLOCK, lossless=True, empty=self.device.empty) for _ in range(buffers)
        ]
        return Prefetcher(self.device, store.mover, made, store.counters)

    def attend(self, ring: Prefetcher, layers: Sequence[int], chunks: Sequence[Chunk], layer: int, index: int) -> None:
        """Read a chunk out of its buffer, and see that it is what was stored."""
        wanted = self.k[layer][:, chunks[index].position :][:, :BLOCK]
        with ring.chunk(layers, chunks, layer, index) as (k, _, buffer):
            got = self.device.run(k.clone, reads=[("stage", buffer)], name="attend")
        assert torch.equal(got, wanted), (layer, index)

    @property
    def loads(self) -> list[int]:
        """The layer of each load so far."""
        return [int(each.name.split()[-1]) for each in self.device.trace if each.name.startswith("load layer")]


@pytest.fixture
def streamed() -> Iterator[Streamed]:
    device = SimulatedAccelerator(is_traced=True, max_delay_seconds=0.002)
    with device, opened(device, "512 tokens") as cache:
        stored = []
        for layer in range(LAYERS):
            stored.append(torch.randn(1, 2, 5 * BLOCK, DIM))
            cache.update(stored[-1], torch.randn_like(stored[-1]), layer, kwargs={})
        assert cache.demote("warm") == 5
        holder = cache.parts().holder
        assert holder is not None
        chunks = [Chunk((0,), i * BLOCK, (block,), BLOCK) for i, block in enumerate(holder.table.blocks())]
        yield Streamed(cache, device, chunks, [k[0] for k in stored])
        assert not device.clocks.races


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("layers", [1, 2])
def test_loads_are_at_most_one_pass_ahead(streamed: Streamed, layers: int, chunks: int) -> None:
    """With buffers for more than a pass each chunk is loaded once until it was attended."""
    ring, some, order = streamed.ring(7), streamed.chunks[:chunks], range(layers)
    ring.start(order, some)
    ahead = layers * chunks
    assert len(streamed.loads) == ahead
    for step in range(3):
        for layer in order:
            for index in range(chunks):
                streamed.attend(ring, order, some, layer, index)
                assert len(streamed.loads) == ahead + 1 + (step * layers + layer) * chunks + index
    ring.flush()


def test_no_more_loads_are_under_way_than_there_are_buffers(streamed: Streamed) -> None:
    ring = streamed.ring(2)
    ring.start(range(LAYERS), streamed.chunks)
    assert streamed.loads == [0, 0]
    for index in range(5):
        streamed.attend(ring, range(LAYERS), streamed.chunks, 0, index)
    assert streamed.loads == [0] * 5 + [1, 1]
    ring.flush()


@pytest.mark.parametrize("buffers", [2, 3, 6])
def test_another_order_than_was_announced_is_right_too(streamed: Streamed, buffers: int) -> None:
    ring, chunks = streamed.ring(buffers), streamed.chunks
    ring.start(range(LAYERS), chunks)
    random = torch.randperm(LAYERS * len(chunks)).tolist()
    for place in [0, 4, 4, 14, 0, 1, *random]:
        streamed.attend(ring, range(LAYERS), chunks, place // len(chunks), place % len(chunks))
    streamed.attend(ring, [2, 0], chunks[::-1], 2, 0)  # nor was this
    streamed.attend(ring, [2, 0], chunks[::-1], 2, 1)
    streamed.attend(ring, range(1), chunks[2:], 0, 2)
    ring.flush()


def test_a_forward_that_begins_otherwise_than_was_guessed_starts_again(streamed: Streamed) -> None:
    ring, chunks = streamed.ring(2), streamed.chunks
    for index in range(5):
        streamed.attend(ring, range(1), chunks, 0, index)
    assert len(streamed.loads) == 7  # two ahead, of the same chunks once more
    ring.start(range(1), chunks[1:])
    assert len(streamed.loads) == 9
    ring.start(range(1), chunks[1:])
    ring.start(range(1), [dataclasses.replace(chunk) for chunk in chunks[1:]])  # other chunks of the same blocks
    assert len(streamed.loads) == 9
    ring.start(range(1), chunks[1:2])  # a pass of one chunk has no room for two loads
    for _ in range(2):
        streamed.attend(ring, range(1), chunks[1:2], 0, 0)
    ring.start(range(1), [])  # all of it is resident by now
    assert not ring.holds(chunks[1].blocks[0])


def test_what_is_loaded_ahead_is_known_until_it_was_attended(streamed: Streamed) -> None:
    ring, (first, second, third, *_) = streamed.ring(2), streamed.chunks
    ring.start(range(1), [first, second, third])
    assert [ring.holds(chunk.blocks[0]) for chunk in (first, second, third)] == [True, True, False]
    streamed.attend(ring, range(1), [first, second, third], 0, 0)
    assert [ring.holds(chunk.blocks[0]) for chunk in (first, second, third)] == [False, True, True]
    ring.flush()
    assert not any(ring.holds(chunk.blocks[0]) for chunk in (first, second, third))


@pytest.mark.parametrize("before", [True, False])
def test_a_fresh_buffer_is_loaded_after_what_was_computed_before_the_ring_was_made(
    streamed: Streamed, before: bool
) -> None:
    """Whoever had its memory may be reading it yet; what is computed later is for the reader to order."""
    ring = None if before else streamed.ring(2)
    streamed.device.run(lambda: None, reads=[("stage", 0)], name="a former owner")
    ring = ring or streamed.ring(2)
    if before:
        ring.start(range(1), streamed.chunks)
        ring.flush()
        return
    with pytest.raises(RaceError):
        ring.start(range(1), streamed.chunks)
    streamed.device.clocks.races = 0
