"""Who may begin, what waits for a prefix, and how the pace of prompts is learnt beside a steady load."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from support import tiny

import tieredkv
from tieredkv.errors import StepError
from tieredkv.hf.step import Member, StepCache
from tieredkv.serving import RequestHandle
from tieredkv.serving.order import PromptPace, next_to_prefill
from tieredkv.serving.request import Request

from .prompts import prompt

pytestmark = pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")

BLOCK = 16
_numbers = itertools.count()


def request(ids: list[int], salt: str = "", priority: int = 0) -> Request:
    sampler: Any = None
    handle = RequestHandle(next(_numbers), len(ids))
    return Request(handle, torch.tensor(ids), len(ids), sampler, priority, salt, 0)


def test_who_begins_like_another_waits_for_it() -> None:
    common = list(range(40))
    first, second = request([*common, 50]), request([*common, 60])
    other_salt, short, stranger = request([*common, 70], salt="x"), request(common[:10]), request([9] * 40)
    waiting = [first, second, other_salt, short, stranger]
    assert list(next_to_prefill(waiting, [], 0, 100, BLOCK)) == [first, other_salt, short, stranger]
    assert second.handle.waits_for and not first.handle.waits_for
    first.cache, first.prefilled = object(), 32  # type: ignore[assignment]
    assert list(next_to_prefill([second], [first], 0, 100, BLOCK)) == [second], "what they share is computed"
    first.prefilled = 31
    assert list(next_to_prefill([second], [first], 0, 100, BLOCK)) == []


def test_only_those_who_are_asked_for_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    head = Request.head
    monkeypatch.setattr(Request, "head", lambda self, size: looked.append(1) or head(self, size))
    waiting = [request([n] * 40) for n in range(50)]
    assert next(next_to_prefill(waiting, [], 0, 100, BLOCK)) is waiting[0]
    assert len(looked) == 1


def test_a_pace_is_learnt_where_there_is_always_a_prompt() -> None:
    """A step takes 10 ms and 0.1 ms more for each token of a prompt: half as long again is 50 tokens."""
    pace = PromptPace(most_tokens=1000, slowdown=1.5)
    given = []
    for _ in range(100):
        tokens = pace.tokens(8)
        given.append(tokens)
        pace.took(0.010 + 0.0001 * tokens, tokens, 8)
    assert given[-1] in (0, 49, 50) and given.count(0) <= 5
    assert sum(given[50:]) / len(given[50:]) == pytest.approx(50, rel=0.1)
    assert pace.tokens(0) == 1000
    assert pace.tokens(20) == 0, "many more decode: what a step takes is to be seen anew"
    pace.took(0.020, 0, 20)
    assert pace.tokens(20) == pytest.approx(100, abs=2)


def test_a_cache_whose_first_step_was_abandoned_takes_the_next() -> None:
    model = tiny()
    with torch.no_grad(), tieredkv.KVStore(model, hot="96 tokens", warm=0, block_size=BLOCK, durable=False) as store:
        with store.cache(torch.tensor([prompt(9, 0)])) as known:
            for _ in range(2):
                model(torch.tensor([prompt(9, 0)]), past_key_values=known)
        new, large = (store.cache(torch.tensor([prompt(tokens, 1)])) for tokens in (20, 400))
        step = StepCache(model.config)
        with pytest.raises(StepError) as caught:
            step.begin([Member(new, torch.tensor(prompt(20, 1))), Member(large, torch.tensor(prompt(400, 1)))])
        assert caught.value.member == 1
        given = step.begin([Member(new, torch.tensor(prompt(20, 1)))])
        model(given.ids, position_ids=given.positions, past_key_values=step)
        step.end()
        assert new.get_seq_length() == 20
        new.close()
        large.close()
