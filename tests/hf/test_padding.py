"""Blocks of nothing but padding are not streamed, and whatever mask comes next sees what it shows."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import assert_close, audit, small, store_of, tiny, tokens

from tieredkv import CacheSettings, TieredCache
from tieredkv.device import SimulatedAccelerator
from tieredkv.store import Holder

pytestmark = pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")

PROMPT, PADDING, STEPS = 140, 100, 6
NEXT = PROMPT + 2
STREAM = CacheSettings(read_in_place=False)


class Run:
    """Two rows, of which the first is mostly padding, in a cache that streams most of them."""

    def __init__(self, cache: TieredCache, model: Any) -> None:
        self.cache, self.model = cache, model
        self.ids = tokens(PROMPT + STEPS, rows=2)
        self.mask = torch.ones_like(self.ids)
        self.mask[0, :PADDING] = 0
        self.positions = (self.mask.cumsum(-1) - 1).clamp(min=0)
        self.begun = [self.feed(0, PROMPT), self.feed(PROMPT, PROMPT + 1), self.feed(PROMPT + 1, NEXT)]

    @property
    def holder(self) -> Holder:
        holder = self.cache.parts().holder
        assert holder is not None
        return holder

    @torch.no_grad()
    def feed(self, first: int, last: int, *, mask: Any = "", cache: TieredCache | None = None) -> torch.Tensor:
        """Logits of some tokens, with the mask or with another one."""
        given = self.mask[:, :last] if isinstance(mask, str) else mask
        logits: torch.Tensor = self.model(
            self.ids[:, first:last],
            attention_mask=given,
            position_ids=self.positions[:, first:last],
            past_key_values=cache or self.cache,
        ).logits
        return logits

    @torch.no_grad()
    def wanted(self) -> torch.Tensor:
        """Without a cache."""
        logits: torch.Tensor = tiny()(
            self.ids, attention_mask=self.mask, position_ids=self.positions, use_cache=False
        ).logits
        return logits


@contextlib.contextmanager
def run(on: str, folder: Path) -> Iterator[Run]:
    model, sizes = tiny(), {"warm": "64 tokens", "settings": STREAM}
    if on == "cpu":
        with small(model, folder, **sizes) as cache:
            yield Run(cache, model)
            audit(cache)
        return
    with SimulatedAccelerator(seed=3, max_delay_seconds=0.002) as device:
        with small(model, folder, device=device, **sizes) as cache:
            yield Run(cache, model)
            audit(cache)
        assert device.clocks.races == 0


@pytest.mark.parametrize("on", ["cpu", "simulated"])
def test_padding_is_not_streamed(on: str, cold_dir: Path) -> None:
    with run(on, cold_dir) as it:
        wanted, seen = it.wanted(), it.mask[:, :NEXT].bool()
        assert_close(torch.cat(it.begun, 1)[seen], wanted[:, :NEXT][seen])
        assert it.holder.padding == (PADDING, 0)
        store, before = store_of(it.cache), it.cache.stats().decode.streamed_bytes
        for at in range(NEXT, PROMPT + STEPS):
            assert_close(it.feed(at, at + 1)[:, 0], wanted[:, at])
        store.device.synchronize()
        outside = {
            (entry.block_id, entry.layer_id)
            for entry in it.cache.block_table()
            if entry.location != "hot" and (entry.row or entry.token_range[1] > PADDING)
        }
        each = sum(store.mover.row_bytes[layer] for _, layer in outside)
        # What the ring holds of the next step counts as well, where anything is read ahead.
        assert each and it.cache.stats().decode.streamed_bytes - before <= (STEPS - 2 + (on != "cpu")) * each


def shown(it: Run) -> list[torch.Tensor]:
    mask = it.mask[:, : NEXT + 1].clone()
    mask[0, PADDING - 40 :] = 1
    return [it.feed(NEXT, NEXT + 1, mask=mask), it.feed(NEXT + 1, NEXT + 2)]


def no_mask(it: Run) -> list[torch.Tensor]:
    return [it.feed(NEXT, NEXT + 1, mask=None), it.feed(NEXT + 1, NEXT + 2)]


def of_another_kind(it: Run) -> list[torch.Tensor]:
    mask = it.mask[:, None, None, : NEXT + 1].bool()
    return [it.feed(NEXT, NEXT + 1, mask=mask), it.feed(NEXT + 1, NEXT + 2)]


def in_the_middle(it: Run) -> list[torch.Tensor]:
    mask = it.mask[:, : NEXT + 1].clone()
    mask[1, 60:70] = 0
    return [it.feed(NEXT, NEXT + 1, mask=mask), it.feed(NEXT + 1, NEXT + 2)]


def turned(it: Run) -> list[torch.Tensor]:
    places = torch.tensor([1, 0])
    it.cache.reorder_cache(places)
    it.ids, it.mask, it.positions = it.ids[places], it.mask[places], it.positions[places]
    return [it.feed(NEXT, NEXT + 1), it.feed(NEXT + 1, NEXT + 2)]


def fewer(it: Run) -> list[torch.Tensor]:
    it.cache.batch_select_indices(torch.tensor([0]))
    it.ids, it.mask, it.positions = it.ids[:1], it.mask[:1], it.positions[:1]
    return [it.feed(NEXT, NEXT + 1), it.feed(NEXT + 1, NEXT + 2, mask=None)]


def gathered(it: Run) -> list[torch.Tensor]:
    keys = it.cache.layers[0].keys
    assert keys is not None and keys.isfinite().all()
    it.model.set_attn_implementation("sdpa")
    got = it.feed(NEXT, NEXT + 1)
    it.model.set_attn_implementation("tieredkv")
    return [got, it.feed(NEXT + 1, NEXT + 2)]


def another_prompt(it: Run) -> list[torch.Tensor]:
    return [it.feed(NEXT, NEXT + 3), it.feed(NEXT + 3, NEXT + 4)]


def copied(it: Run) -> list[torch.Tensor]:
    with copy.deepcopy(it.cache) as twin:
        got = [it.feed(NEXT, NEXT + 1, cache=twin), it.feed(NEXT, NEXT + 1)]
        return [*got, it.feed(NEXT + 1, NEXT + 2, cache=twin, mask=None)]


@pytest.mark.parametrize("on", ["cpu", "simulated"])
@pytest.mark.parametrize(
    "what", [shown, no_mask, of_another_kind, in_the_middle, turned, fewer, gathered, another_prompt, copied]
)
def test_what_comes_next_sees_what_it_would_if_all_was_streamed(
    on: str, cold_dir: Path, what: Callable[[Run], list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with run(on, cold_dir) as it:
        assert it.holder.padding == (PADDING, 0)
        got = what(it)
    # A holder that never remembers what was padding.
    monkeypatch.setattr(Holder, "padding", property(lambda self: None, lambda self, value: None))
    with run(on, cold_dir) as it:
        wanted = what(it)
    for mine, theirs in zip(got, wanted, strict=True):
        assert mine.isfinite().all()
        assert_close(mine, theirs)
