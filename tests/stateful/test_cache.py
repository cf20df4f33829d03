"""The whole cache against plain tensors: appends, cuts, beams, copies and moves in any order, in tiny budgets.

Every value is read back bitwise, attention is held against float64, and slots, references and budgets are audited.
`TIEREDKV_STATEFUL_EXAMPLES=500` runs longer, and makes what fails small.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support import audit, config_of, store_of
from transformers.masking_utils import causal_mask_function

import tieredkv
from tieredkv.attention.masks import MaskSpec
from tieredkv.device import CpuDevice, SimulatedAccelerator
from tieredkv.errors import BudgetError
from tieredkv.hf import seam
from tieredkv.store import BlockStore

EXAMPLES = int(os.environ.get("TIEREDKV_STATEFUL_EXAMPLES", "100"))
SHRINKS = "TIEREDKV_STATEFUL_EXAMPLES" in os.environ
"""Making a failure small takes minutes; without it the failing steps are printed at once."""
LAYERS, HEADS, KV_HEADS, BLOCK = 3, 4, 2, 16
MOST_TOKENS, MOST_ROWS, MOST_CACHES = 200, 4, 3

Pair = tuple[torch.Tensor, torch.Tensor]
"""K and V of one layer, [rows, kv_heads, tokens, dim]."""


@dataclasses.dataclass(frozen=True)
class PackedExactly(tieredkv.CacheSettings):
    """Blocks outside the window lie in a second place on the device, as they are: of no use, but comparable bitwise."""

    hot_codec: str | None = "raw"

    def __post_init__(self) -> None:
        """Else refused."""


class DummyAttention(torch.nn.Module):
    """What the attention function reads of a model's attention module."""

    is_causal = True
    num_key_value_groups = HEADS // KV_HEADS


@dataclasses.dataclass
class Plain:
    """A cache and what it has to hold."""

    cache: tieredkv.TieredCache
    layers: list[Pair]
    seen: torch.Tensor  # bool [rows, tokens], False where a token is padding
    broke_off: bool = False

    def attend_by(self, way: str) -> None:
        """Select an attention implementation, as `model.set_attn_implementation` does."""
        self.cache._attachment.config._attn_implementation = seam.NAME if way == "blocks" else "sdpa"

    @property
    def rows(self) -> int:
        return self.seen.shape[0]

    @property
    def count(self) -> int:
        return self.seen.shape[1]

    def take_rows(self, indices: Iterable[int]) -> None:
        index = list(indices)
        self.layers = [(k[index], v[index]) for k, v in self.layers]
        self.seen = self.seen[index]

    def keep(self, count: int) -> None:
        self.layers = [(k[:, :, :count], v[:, :, :count]) for k, v in self.layers]
        self.seen = self.seen[:, :count]
        if not count:
            self.layers, self.seen = [], torch.zeros(0, 0, dtype=torch.bool)


def account(store: BlockStore) -> None:
    """free + live + in flight is all there is, and what is not free is a block's or a move's; waits for nothing."""
    with store.lock:
        blocks = {b.id: b for holder in store.holders for row in holder.table for b in row}
        blocks |= {b.id: b for move in store._moves for b in move.blocks}
        for role, tier in store.tiers.items():
            slots = tier.slots
            assert slots.free + slots.live + slots.in_flight == slots.total, role
            held = [slot for block in blocks.values() if (slot := getattr(block, role)) is not None]
            coming = [slot for move in store._moves if move.target == role for slot in move.slots]
            assert len({*held, *coming}) == len(held) + len(coming) == slots.used, f"{role}: {held} {coming}"
            assert slots.in_flight == len(coming), role


class CacheMachine(RuleBasedStateMachine):
    """Rules over up to three caches, some of which share a store."""

    def make_device(self, seed: int) -> Any:
        return CpuDevice()

    @initialize(
        seed=st.integers(0, 2**16),
        hot_blocks=st.integers(3, 6),
        warm_blocks=st.integers(0, 3),
        cold_cap=st.sampled_from([None, None, "48 tokens", "160 tokens", "none"]),
        window=st.sampled_from([None, 1, 16, 20]),
        dims=st.sampled_from([(16, 16), (16, 16), (16, 32), (8, 8), (8, 12)]),
        dtype=st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16]),
        verify=st.sampled_from(["always", "first", "off"]),
        is_watched=st.booleans(),
        is_packed=st.sampled_from([False, False, True]),
        read_in_place=st.booleans(),
    )
    def start(self, seed: int, hot_blocks: int, warm_blocks: int, cold_cap: str | None, **drawn: Any) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.dims, self.dtype, self.is_watched = drawn["dims"], drawn["dtype"], drawn["is_watched"]
        self.folder = tempfile.TemporaryDirectory(prefix="tieredkv-stateful-")
        cold = None if cold_cap == "none" else tieredkv.ColdSettings(self.folder.name, cap=cold_cap, free_floor=0)
        config = config_of("llama", num_hidden_layers=LAYERS)
        kind = PackedExactly if drawn["is_packed"] else tieredkv.CacheSettings
        hot_blocks += 4 * drawn["is_packed"]
        chosen = kind(
            hot=f"{hot_blocks * BLOCK + BLOCK} tokens",
            warm=f"{warm_blocks * BLOCK} tokens",
            cold=cold,
            block_size=BLOCK,
            window=drawn["window"],
            verify=drawn["verify"],
            read_in_place=drawn["read_in_place"],
        )
        cache = tieredkv.TieredCache(config, settings=chosen, device=self.make_device(seed))
        self.pairs = [Plain(cache, [], torch.zeros(0, 0, dtype=torch.bool))]

    def pick(self, index: int) -> Plain:
        return self.pairs[index % len(self.pairs)]

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random).to(self.dtype)

    # ---- forwards

    @rule(
        index=st.integers(0, 2),
        count=st.one_of(st.just(1), st.integers(1, 40), st.integers(30, 90)),
        rows=st.integers(1, 3),
        way=st.sampled_from(["blocks", "blocks", "gather"]),
        mask=st.sampled_from(["spec", "bool", "additive", "none"]),
        padding=st.sampled_from(["none", "none", "left", "holes"]),
    )
    def append(self, index: int, count: int, rows: int, way: str, mask: str, padding: str) -> None:
        self.append_tokens(self.pick(index), count, rows, way, mask, padding)

    def append_tokens(self, pair: Plain, count: int, rows: int, way: str, mask: str, padding: str) -> None:
        rows = pair.rows or rows
        if pair.count + count > MOST_TOKENS:
            return
        pair.attend_by(way)
        fresh = [
            (self.draw(rows, KV_HEADS, count, self.dims[0]), self.draw(rows, KV_HEADS, count, self.dims[1]))
            for _ in range(LAYERS)
        ]
        seen = self.new_seen(pair, rows, count, padding)
        past = pair.layers or [(k[:, :, :0], v[:, :, :0]) for k, v in fresh]
        whole = [(torch.cat([a, k], 2), torch.cat([b, v], 2)) for (a, b), (k, v) in zip(past, fresh, strict=True)]
        for layer in range(LAYERS):
            try:
                key, value = pair.cache.update(*(t.clone() for t in fresh[layer]), layer, kwargs={})
            except BudgetError as refusal:
                assert layer == 0, "refused after a write"
                self.check_refusal(pair, refusal, rows, count)
                return
            if way == "gather":
                assert torch.equal(key, whole[layer][0]) and torch.equal(value, whole[layer][1]), f"layer {layer}"
            else:
                self.attend(pair, key, value, whole[layer], seen, count, mask)
        pair.layers, pair.seen = whole, seen
        assert pair.cache.get_seq_length() == pair.count

    @rule(index=st.integers(0, 2), steps=st.integers(2, 20), way=st.sampled_from(["blocks", "gather"]))
    def decode(self, index: int, steps: int, way: str) -> None:
        """One token at a time, as generation does."""
        for _ in range(steps):
            self.append_tokens(self.pick(index), 1, 1, way, "spec", "none")

    def new_seen(self, pair: Plain, rows: int, count: int, padding: str) -> torch.Tensor:
        new = torch.ones(rows, count, dtype=torch.bool)
        if padding == "left" and not pair.count:
            for row in range(rows):
                new[row, : int(torch.randint(0, count, (1,), generator=self.random))] = False
        elif padding == "holes":
            new = torch.rand(rows, count, generator=self.random) > 0.2
        return torch.cat([pair.seen, new], 1) if pair.count else new

    def attend(
        self, pair: Plain, key: torch.Tensor, value: torch.Tensor, whole: Pair, seen: torch.Tensor, new: int, mask: str
    ) -> None:
        """Attention as a model calls it, against the formula in float64."""
        rows, total = seen.shape
        query = self.draw(rows, HEADS, new, self.dims[0])
        visible = seen[:, None, None, :] & torch.ones(new, total, dtype=torch.bool).tril(total - new)
        given: Any = MaskSpec(
            batch=rows,
            q_length=new,
            kv_length=total,
            q_offset=total - new,
            kv_offset=0,
            mask_function=causal_mask_function,
            padding=None if bool(seen.all()) else seen,
            use_vmap=False,
            dtype=self.dtype,
            device=torch.device("cpu"),
            is_causal=True,
        )
        if mask == "bool":
            given = visible
        elif mask == "additive":
            given = torch.zeros(visible.shape, dtype=self.dtype).masked_fill(~visible, torch.finfo(self.dtype).min)
        elif mask == "none" and (new == 1 or new == total) and bool(seen.all()):
            given = None
        out, _ = seam.attention(DummyAttention(), query, key, value, given, kwargs={})
        k, v = (t.double().repeat_interleave(HEADS // KV_HEADS, 1) for t in whole)
        scores = (query.double() @ k.transpose(2, 3)) * self.dims[0] ** -0.5
        wanted = scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v  # [rows, heads, new, v_dim]
        sees = visible.any(-1).expand(rows, HEADS, new)
        got = out.transpose(1, 2)[sees].double()
        limit = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[self.dtype]
        worst = (got - wanted[sees]).abs().max().item() if got.numel() else 0.0
        assert worst <= limit * max(1.0, v.abs().max().item()), f"attention differs by {worst}"

    def check_refusal(self, pair: Plain, refusal: BudgetError, rows: int, count: int) -> None:
        """A refusal is right only where the tokens really do not fit."""
        note(f"refused: {refusal}")
        assert refusal.tier in ("hot", "warm", "cold")
        if pair.cache.parts().store is None:
            return
        store = store_of(pair.cache)
        blocks = {b.id: b for holder in store.holders for row in holder.table for b in row}
        tails = sum(not block.sealed for block in blocks.values())
        more = rows * (-(-(pair.count + count) // BLOCK) - pair.count // BLOCK) + rows
        is_hot_full = tails + 2 * rows > store.hot.slots.total
        lower = [tier.slots.total for role, tier in store.tiers.items() if role != "hot"]
        is_endless = store.cold is not None and store.budget.cold_bytes is None
        is_full = not is_endless and len(blocks) + more > store.hot.slots.total + sum(lower)
        assert is_hot_full or is_full, f"refused without need: {refusal}"

    @rule(index=st.integers(0, 2), count=st.integers(1, 40), layers=st.integers(1, LAYERS - 1))
    def interrupted(self, index: int, count: int, layers: int) -> None:
        """A forward that stops between two layers leaves nothing behind."""
        pair = self.pick(index)
        pair.attend_by("gather")
        rows = pair.rows or 2
        for layer in range(layers):
            key, value = (self.draw(rows, KV_HEADS, count, dim) for dim in self.dims)
            try:
                pair.cache.update(key, value, layer, kwargs={})
            except BudgetError:
                return
        pair.broke_off = True
        assert pair.cache.get_seq_length() == pair.count

    # ---- whole-cache operations

    @rule(index=st.integers(0, 2), count=st.integers(0, 60))
    def crop(self, index: int, count: int) -> None:
        pair = self.pick(index)
        pair.cache.crop(-count)
        pair.keep(max(pair.count - count, 0))
        if not pair.count:
            pair.cache.reset()

    @rule(index=st.integers(0, 2), data=st.data())
    def reorder(self, index: int, data: st.DataObject) -> None:
        pair = self.pick(index)
        if not pair.count:
            return
        order = data.draw(st.lists(st.integers(0, pair.rows - 1), min_size=pair.rows, max_size=pair.rows))
        pair.cache.reorder_cache(torch.tensor(order))
        pair.take_rows(order)

    @rule(index=st.integers(0, 2), repeats=st.integers(1, 3))
    def repeat(self, index: int, repeats: int) -> None:
        pair = self.pick(index)
        if not pair.count or pair.rows * repeats > MOST_ROWS:
            return
        pair.cache.batch_repeat_interleave(repeats)
        pair.take_rows([row for row in range(pair.rows) for _ in range(repeats)])

    @rule(index=st.integers(0, 2), data=st.data(), as_mask=st.booleans())
    def select(self, index: int, data: st.DataObject, as_mask: bool) -> None:
        pair = self.pick(index)
        if not pair.count:
            return
        rows = data.draw(st.lists(st.integers(0, pair.rows - 1), min_size=1, max_size=3))
        if as_mask:
            kept = torch.zeros(pair.rows, dtype=torch.bool)
            kept[rows] = True
            pair.cache.batch_select_indices(kept)
            rows = kept.nonzero().flatten().tolist()
        else:
            pair.cache.batch_select_indices(torch.tensor(rows))
        pair.take_rows(rows)

    @rule(index=st.integers(0, 2))
    def reset(self, index: int) -> None:
        pair = self.pick(index)
        pair.cache.reset()
        pair.keep(0)

    # ---- moves

    @rule(index=st.integers(0, 2), tier=st.sampled_from(["warm", "cold"]))
    def demote(self, index: int, tier: str) -> None:
        pair = self.pick(index)
        store = pair.cache.parts().store
        if store is None or tier not in store.tiers:
            return
        try:
            pair.cache.demote(tier)
        except BudgetError as refusal:
            assert refusal.tier == tier
            return
        parts = pair.cache.parts()
        assert parts.holder is not None
        for block in parts.holder.table.blocks():
            where = block.cold is not None if tier == "cold" else block.is_stored_below
            assert not block.sealed or (block.hot is None and where), block

    @rule(index=st.integers(0, 2), wait=st.booleans())
    def promote(self, index: int, wait: bool) -> None:
        self.pick(index).cache.promote(wait=wait)

    # ---- copies

    @precondition(lambda self: len(self.pairs) < MOST_CACHES)
    @rule(index=st.integers(0, 2))
    def deepcopy(self, index: int) -> None:
        pair = self.pick(index)
        if pair.cache.parts().store is None:
            return  # the two would open a store each, on one device
        self.pairs.append(Plain(copy.deepcopy(pair.cache), list(pair.layers), pair.seen))

    @rule(index=st.integers(0, 2))
    def pickle(self, index: int) -> None:
        pair = self.pick(index)
        old, holder = pair.cache, pair.cache.parts().holder
        try:
            pair.cache = pickle.loads(pickle.dumps(old))
        except BudgetError:
            assert holder is not None
            blocks = list(holder.table.blocks())
            is_shared = len(blocks) < sum(len(row) for row in holder.table)  # takes more room by value
            assert is_shared or pair.rows < store_of(old).budget.rows  # sizes in tokens are for the rows there are
            return
        old.close()

    @precondition(lambda self: len(self.pairs) > 1)
    @rule(index=st.integers(0, 2), is_closed=st.booleans())
    def drop(self, index: int, is_closed: bool) -> None:
        pair = self.pairs.pop(index % len(self.pairs))
        if is_closed:
            pair.cache.close()

    # ---- checks

    @invariant()
    def accounted(self) -> None:
        """After every rule, with copies under way: every slot is free, live or in flight, and it is known why."""
        for store in {id(s): s for pair in getattr(self, "pairs", []) if (s := pair.cache.parts().store)}.values():
            account(store)

    @invariant()
    def watched(self) -> None:
        """In half of the runs after every rule; the others leave copies on their way and forwards open."""
        if getattr(self, "is_watched", False):
            self.check()

    @rule()
    def check(self) -> None:
        for pair in self.pairs:
            if pair.broke_off:
                pair.cache.crop(0)  # a public call ends the forward; until then its layers differ in length
                pair.broke_off = False
            assert pair.cache.get_seq_length() == pair.count
            for layer in range(LAYERS):
                found = pair.cache.gather_layer(layer)
                if not pair.count:
                    assert found is None
                    continue
                assert found is not None
                for name, got, wanted in zip("kv", found, pair.layers[layer], strict=True):
                    assert torch.equal(got, wanted), f"{name} of layer {layer}"
        audit(*(pair.cache for pair in self.pairs))

    def teardown(self) -> None:
        if not hasattr(self, "pairs"):
            return
        try:
            self.check()
        finally:
            for pair in self.pairs:
                pair.cache.close()
            left = list(Path(self.folder.name).iterdir())
            self.folder.cleanup()
        assert not left, "the cold tier left a folder behind"


class SimulatedMachine(CacheMachine):
    """The same on a device whose copies come late and in any legal order, and which raises for every missing wait."""

    def make_device(self, seed: int) -> Any:
        self.device = SimulatedAccelerator(seed=seed, max_delay_seconds=0.002, addresses_host=bool(seed % 2))
        return self.device

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "device"):
            assert self.device.clocks.races == 0


LIMITS = settings(
    max_examples=EXAMPLES,
    stateful_step_count=30,
    deadline=None,
    report_multiple_bugs=False,
    phases=[*([Phase.shrink] if SHRINKS else []), Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=list(HealthCheck),
)

TestCpu = CacheMachine.TestCase
TestCpu.settings = LIMITS
TestSimulated = SimulatedMachine.TestCase
TestSimulated.settings = LIMITS
