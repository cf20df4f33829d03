"""Steps of several caches of unlike lengths: each row's logits are those of its own cache-free forward."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from support import assert_close, tiny

import tieredkv
from tieredkv.attention import flash
from tieredkv.errors import MismatchError, StepError, UnsupportedModelError
from tieredkv.hf.step import Member, StepCache

pytestmark = pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")


def prompt(tokens: int, seed: int) -> torch.Tensor:
    return torch.randint(3, 97, (1, tokens), generator=torch.Generator().manual_seed(seed))


def run(model: Any, step: StepCache, members: list[Member]) -> torch.Tensor:
    """Logits after each member's last token."""
    given = step.begin(members)
    out = model(given.ids, position_ids=given.positions, past_key_values=step).logits[0, given.last]
    step.end()
    return out


def decode(model: Any, step: StepCache, caches: list[Any], ids: torch.Tensor) -> torch.Tensor:
    return run(model, step, [Member(cache, row) for cache, row in zip(caches, ids, strict=True)])


def wanted(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, use_cache=False).logits[:, -1]


@pytest.mark.parametrize("kernel", ["auto", "flash", "flex"])
@pytest.mark.parametrize("hot", ["192 tokens", "2048 tokens"])
def test_rows_of_any_length_join_and_leave(cold_dir: Path, hot: str, kernel: Any) -> None:
    model = tiny()
    settings = tieredkv.CacheSettings(kernel=kernel)
    lengths = [5, 131, 16, 64, 17]
    texts = [prompt(n, i) for i, n in enumerate(lengths)]
    texts[3] = torch.cat([texts[1][:, :48], texts[3][:, :16]], 1)  # shares three blocks with another
    with (
        torch.no_grad(),
        tieredkv.KVStore(
            model, hot=hot, warm="128 tokens", cold=cold_dir, block_size=16, window=16, settings=settings, durable=False
        ) as store,
    ):
        caches = []
        for text in texts:
            cache = store.cache(text)
            model(text[:, cache.get_seq_length() :], past_key_values=cache)
            store.publish(cache)
            caches.append(cache)
        assert store.stats().attached_tokens == 48
        step = StepCache(model.config)
        for turn in range(40):
            if turn == 20:  # one leaves, another order
                for i in (2, 0):
                    caches.pop(i).close()
                    texts.pop(i)
                caches.reverse()
                texts.reverse()
            ids = torch.cat([prompt(1, 100 * turn + i) for i in range(len(caches))])
            texts = [torch.cat([text, ids[i : i + 1]], 1) for i, text in enumerate(texts)]
            got = decode(model, step, caches, ids)
            if turn % 5 == 0 or turn in (15, 16, 17, 21):
                for row, text in enumerate(texts):
                    assert_close(got[row : row + 1], wanted(model, text))
        for cache, text in zip(caches, texts, strict=True):
            assert cache.get_seq_length() == text.shape[1]
            new = prompt(3, 7)  # each goes on by itself
            assert_close(model(new, past_key_values=cache).logits[:, -1], wanted(model, torch.cat([text, new], 1)))
            assert store.publish(cache) > 0  # what the steps were given is known
            cache.close()
        again = store.cache(torch.cat([texts[0], new], 1))
        assert again.get_seq_length() >= texts[0].shape[1] // 16 * 16
        again.close()


@pytest.mark.parametrize("matrices", [False, True])
def test_prompts_in_pieces_ride_along_with_decoding(
    monkeypatch: pytest.MonkeyPatch, cold_dir: Path, matrices: bool
) -> None:
    """Prefills of several requests, whole and in pieces, in the forwards in which others decode."""
    monkeypatch.setattr(flash, "beats_native", lambda q, k_dim, v_dim, new: matrices and new >= 16)
    model = tiny()
    with (
        torch.no_grad(),
        tieredkv.KVStore(model, hot="320 tokens", warm="64 tokens", cold=cold_dir, block_size=16, window=16) as store,
    ):
        first = store.cache(prompt(40, 0))
        model(prompt(40, 0), past_key_values=first)
        store.publish(first)
        caches, texts, step = [first], [prompt(40, 0)], StepCache(model.config)
        pieces = [(1, [90]), (2, [1, 33, 47]), (3, [16, 16, 1]), (4, [7])]
        waiting = [(store.cache(prompt(sum(n), seed)), list(prompt(sum(n), seed)[0].split(n))) for seed, n in pieces]
        texts += [prompt(0, 0) for _ in waiting]
        caches += [cache for cache, _ in waiting]
        for turn in range(8):
            members, took = [], []
            for i, cache in enumerate(caches):
                queue = waiting[i - 1][1] if i else []
                if i and turn < i - 1:
                    continue  # they come one after the other
                ids = queue.pop(0) if queue else prompt(1, 50 * turn + i)[0]
                texts[i] = torch.cat([texts[i], ids[None]], 1)
                members.append(Member(cache, ids))
                took.append(i)
            order = sorted(range(len(members)), key=lambda m: len(members[m].ids) == 1)
            got = run(model, step, [members[m] for m in order])
            for row, m in enumerate(order):
                assert_close(got[row : row + 1], wanted(model, texts[took[m]]))
        assert first.stats().decode.streamed_bytes + first.stats().prefill.streamed_bytes > 0
        for cache in caches:
            cache.close()


def test_a_token_that_does_not_fit_changes_no_cache(cold_dir: Path) -> None:
    model = tiny()
    with torch.no_grad(), tieredkv.KVStore(model, hot="96 tokens", warm=0, block_size=16, window=16) as store:
        caches = []
        for i, n in enumerate((31, 32)):
            caches.append(store.cache(prompt(n, i)))
            model(prompt(n, i), past_key_values=caches[-1])
        while True:  # fill what is left
            try:
                filler = store.cache(prompt(15, 9))
                model(prompt(15, 9), past_key_values=filler)
                caches.append(filler)
            except tieredkv.BudgetError:
                filler.close()
                break
        step = StepCache(model.config)
        with pytest.raises(StepError) as caught:
            step.begin([Member(cache, prompt(1, 3)[0]) for cache in caches])
        assert caught.value.member == 1 and isinstance(caught.value.cause, tieredkv.BudgetError)
        assert [c.get_seq_length() for c in caches[:2]] == [31, 32]
        caches.pop().close()
        ids = prompt(2, 5).T
        got = decode(model, step, caches[:2], ids)
        for row, n in enumerate((31, 32)):
            assert_close(got[row : row + 1], wanted(model, torch.cat([prompt(n, row), ids[row : row + 1]], 1)))
        for cache in caches:
            cache.close()


def test_a_forward_that_fails_changes_no_cache() -> None:
    model = tiny()
    with torch.no_grad(), tieredkv.KVStore(model, hot="512 tokens", warm=0, block_size=16) as store:
        caches = [store.cache(prompt(n, n)) for n in (20, 33)]
        for cache, n in zip(caches, (20, 33), strict=True):
            model(prompt(n, n), past_key_values=cache)
        step = StepCache(model.config)
        ids = prompt(2, 5).T
        given = step.begin([Member(cache, row) for cache, row in zip(caches, ids, strict=True)])
        hook = model.model.layers[1].register_forward_pre_hook(lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            model(given.ids, position_ids=given.positions, past_key_values=step)
        hook.remove()
        step.abandon()
        assert [c.get_seq_length() for c in caches] == [20, 33]
        got = decode(model, step, caches, ids)
        for row, n in enumerate((20, 33)):
            assert_close(got[row : row + 1], wanted(model, torch.cat([prompt(n, n), ids[row : row + 1]], 1)))


def test_what_cannot_take_part_is_refused() -> None:
    model = tiny()
    step = StepCache(model.config)
    with torch.no_grad(), tieredkv.KVStore(model, hot="512 tokens", warm=0, block_size=16) as store:
        good = store.cache(prompt(9, 1))
        model(prompt(9, 1), past_key_values=good)
        pair = store.cache(prompt(9, 1).repeat(2, 1))
        model(prompt(9, 1).repeat(2, 1), past_key_values=pair)
        with tieredkv.TieredCache(model, hot="512 tokens", warm=0) as alone:
            model(prompt(9, 1), past_key_values=alone)
            for other in (pair, alone):
                with pytest.raises(StepError) as caught:
                    step.begin([Member(good, prompt(1, 3)[0]), Member(other, prompt(1, 4)[0])])
                assert isinstance(caught.value.cause, MismatchError | UnsupportedModelError)
                assert good.get_seq_length() == 9
    gemma = tiny("gemma3")
    with torch.no_grad(), tieredkv.KVStore(gemma, hot="512 tokens", warm=0) as store:
        cache = store.cache(prompt(9, 1))
        gemma(prompt(9, 1), past_key_values=cache)
        with pytest.raises(StepError, match="cannot take steps together"):
            StepCache(gemma.config).begin([Member(cache, prompt(1, 3)[0])])


def test_nothing_keeps_a_step_alive() -> None:
    model = tiny()
    step = StepCache(model.config)
    gone = weakref.ref(step)
    with torch.no_grad(), tieredkv.KVStore(model, hot="512 tokens", warm=0) as store:
        cache = store.cache(prompt(9, 1))
        model(prompt(9, 1), past_key_values=cache)
        decode(model, step, [cache], prompt(1, 2))
        del step
        gc.collect()
        assert gone() is None
        cache.close()
