"""A store's caches begin with what was computed before, and give the logits of a forward without any cache."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from support import assert_close, assert_generated, audit_store, feed, generate, oracle, store_of, tiny, tokens

import tieredkv
from tieredkv.device import SimulatedAccelerator
from tieredkv.errors import BudgetError, ClosedError, ConfigError, MismatchError
from tieredkv.store import BlockStore, requests

SIZES: dict[str, Any] = {"hot": "512 tokens", "warm": "512 tokens", "block_size": 16, "window": 16}


def make(model: Any, **changes: Any) -> tieredkv.KVStore:
    return tieredkv.KVStore(model, **{**SIZES, **changes})


def prefill(store: tieredkv.KVStore, model: Any, ids: torch.Tensor, **keywords: Any) -> int:
    """Logits of a prompt and one step are right; how many tokens of each row had to be computed."""
    with store.cache(ids, **keywords) as cache:
        known = cache.get_seq_length()
        out = generate(model, ids, cache, 3)
        assert_generated(out, ids.shape[1])
        assert cache.get_seq_length() == ids.shape[1] + 2
        audit_store(store_of(cache))
    return ids.shape[1] - known


def test_a_prompt_is_prefilled_once() -> None:
    model, ids = tiny(), tokens(100)
    with make(model) as store:
        assert prefill(store, model, ids) == 100
        assert prefill(store, model, ids) == 4, "six full blocks are there"
        stats = store.stats()
        assert (stats.caches, stats.asked_tokens, stats.attached_tokens, stats.kept_blocks) == (2, 200, 96, 6)
    assert model.config._attn_implementation == "sdpa"


def test_only_what_is_new_goes_through_the_model() -> None:
    model, ids = tiny(), tokens(100)
    fed: list[int] = []
    model.model.layers[0].register_forward_pre_hook(lambda _, args: fed.append(args[0].shape[1]))
    with make(model) as store:
        prefill(store, model, ids)
        assert fed == [100, 1, 1]
        fed.clear()
        prefill(store, model, torch.cat([ids[:, :70], tokens(30, seed=5)], 1))
        assert fed == [36, 1, 1], "four blocks are equal, the fifth is not"


@pytest.mark.parametrize("length", [16, 32, 96])
def test_a_prompt_that_is_covered_whole_is_cropped_by_one_token(length: int) -> None:
    model, ids = tiny(), tokens(100)
    with make(model) as store:
        prefill(store, model, ids)
        assert prefill(store, model, ids[:, :length]) == 1
        assert prefill(store, model, ids) == 4, "the cut block was copied, not changed"


def test_what_was_generated_is_known_too() -> None:
    """The next turn of a conversation begins after the last full block of the answer."""
    model, ids = tiny(), tokens(40)
    with make(model) as store:
        with store.cache(ids) as cache:
            out = generate(model, ids, cache, 50, suppress_tokens=[0]).sequences  # the end of nothing, and no padding
        following = torch.cat([out, tokens(20, seed=9)], 1)
        assert prefill(store, model, following) == 110 - 80


@settings(max_examples=8)
@given(
    prompts=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 60), st.integers(0, 2)), min_size=2, max_size=5),
    policy=st.sampled_from(["lru", "arc", "s3fifo"]),
)
def test_any_order_of_prompts(prompts: list[tuple[int, int, int]], policy: str) -> None:
    """Prompts that share more or less of a beginning, in tiers that hold only some of them; in float64."""
    model, base = tiny(dtype=torch.float64), tokens(90)
    with make(model, hot="192 tokens", warm="128 tokens", policy=policy) as store:
        for shared, own, seed in prompts:
            ids = torch.cat([base[:, :shared], tokens(own, seed=10 + seed)], 1)
            with store.cache(ids) as cache:
                known = cache.get_seq_length()
                got = feed(model, ids[:, known:], cache, [own // 2])
                assert_close(got, oracle(ids, dtype=torch.float64)[:, known:], tolerance=1e-12)
                audit_store(store_of(cache))


def test_publish_by_hand_and_mid_conversation() -> None:
    model, ids = tiny(), tokens(100)
    with make(model) as store:
        cache = store.cache(ids)
        logits = feed(model, ids[:, :60], cache, [40])
        assert store.publish(cache, ids[:, :60]) == 3
        assert store.publish(cache) == 0
        with pytest.raises(MismatchError, match="ids"):
            store.publish(cache, ids[:, :60] + 1)
        assert_close(torch.cat([logits, feed(model, ids[:, 60:], cache, [1])], 1), oracle(ids))
        assert store.publish(cache) == 3
        cache.close()
        assert prefill(store, model, ids) == 4


def test_an_exception_publishes_nothing() -> None:
    model, ids = tiny(), tokens(50)
    with make(model) as store:
        with pytest.raises(RuntimeError), store.cache(ids) as cache:
            feed(model, ids, cache)
            raise RuntimeError
        assert store.stats().kept_blocks == 0


def test_caches_at_the_same_time_share_blocks() -> None:
    """Sixteen requests with one prompt take the bytes of one, tails aside."""
    model, ids = tiny(), tokens(128)
    with make(model, hot="1024 tokens") as store:
        prefill(store, model, ids)
        caches, rows = [], []
        for request in range(16):
            own = torch.cat([ids, tokens(5, seed=20 + request)], 1)
            cache = store.cache(own)
            assert cache.get_seq_length() == 128
            rows.append((own, feed(model, own[:, 128:], cache)))
            caches.append(cache)
        blocks = store_of(caches[0])
        assert sum(tier.slots.used for tier in blocks.tiers.values()) == 8 + 16, "the prompt once, and 16 tails"
        audit_store(blocks)
        for own, logits in rows[::5]:
            assert_close(logits, oracle(own)[:, 128:])
        for cache in caches:
            cache.close()


# ---- what must not be shared


def test_salts_share_nothing() -> None:
    model, ids = tiny(), tokens(64)
    with make(model) as store:
        assert prefill(store, model, ids) == 64
        assert prefill(store, model, ids, salt="alice") == 64
        assert prefill(store, model, ids, salt="bob") == 64
        assert prefill(store, model, ids, salt="alice") == 1


@torch.no_grad()
def test_other_weights_find_nothing_and_get_nothing_published() -> None:
    model, ids = tiny(), tokens(64)
    with make(model) as store:
        prefill(store, model, ids)
        late = store.cache(tokens(64, seed=4))
        feed(model, tokens(64, seed=4), late)
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
        assert store.publish(late) == 0
        with store.cache(ids) as cache:
            assert cache.get_seq_length() == 0
            got = feed(model, ids, cache, [30])
        assert_close(got, model(ids, use_cache=False).logits)


def test_adapters_that_are_switched_find_nothing() -> None:
    model, ids = tiny(), tokens(64)
    module = model.model.layers[1].self_attn.q_proj
    with make(model) as store:
        module.active_adapters = ["one"]
        prefill(store, model, ids)
        module.active_adapters = ["two"]
        assert store.cache(ids).get_seq_length() == 0
        module.active_adapters = ["one"]
        assert store.cache(ids).get_seq_length() == 63


@torch.no_grad()
def test_inputs_that_are_no_tokens_are_not_published() -> None:
    model, ids = tiny(), tokens(64)
    with make(model) as store:
        with store.cache(ids) as cache:
            model(inputs_embeds=model.model.embed_tokens(ids) * 1.1, past_key_values=cache)
        assert store.stats().kept_blocks == 0
        with store.cache(ids) as cache:
            feed(model, ids[:, :32], cache)
            model(inputs_embeds=model.model.embed_tokens(ids[:, 32:]) * 1.1, past_key_values=cache)
            feed(model, tokens(32, seed=8), cache)
        assert store.stats().kept_blocks == 2, "up to where they came in"


@torch.no_grad()
@pytest.mark.parametrize("kind", ["other ids", "positions", "mask", "four-dimensional mask"])
def test_forwards_that_are_not_of_the_prompt(kind: str) -> None:
    model, ids = tiny(), tokens(48)
    keywords: dict[str, Any] = {}
    if kind == "positions":
        keywords["position_ids"] = torch.arange(5, 53)[None]
    elif kind == "mask":
        keywords["attention_mask"] = torch.ones(1, 48, dtype=torch.int64)
        keywords["attention_mask"][0, 7] = 0
    elif kind == "four-dimensional mask":
        keywords["attention_mask"] = torch.ones(48, 48, dtype=torch.bool).tril()[None, None]
    with make(model) as store:
        with store.cache(ids) as cache:
            model(ids.flip(1) if kind == "other ids" else ids, past_key_values=cache, **keywords)
        with store.cache(ids) as cache:
            assert cache.get_seq_length() == 0


def test_padded_prompts_are_right_and_share_nothing() -> None:
    model, ids = tiny(), tokens(64, rows=2)
    mask = torch.ones_like(ids)
    mask[0, :20] = 0
    ids = ids.masked_fill(mask == 0, 0)
    with make(model) as store:
        for _ in range(2):
            with store.cache(ids, mask) as cache:
                assert cache.get_seq_length() == 0
                assert_generated(generate(model, ids, cache, 3, attention_mask=mask), 64, mask=mask)
        with store.cache(ids) as cache:  # generate works the mask out from the padding token
            assert cache.get_seq_length() == 0
        assert store.stats().refused == 3
        model.generation_config.eos_token_id = [5, 0]  # then generate takes no token for padding
        with store.cache(ids):
            assert store.stats().refused == 3


def test_a_batch_begins_with_what_all_rows_know() -> None:
    model = tiny()
    first, second = tokens(80, seed=1), tokens(80, seed=2)
    with make(model) as store:
        prefill(store, model, first)
        assert prefill(store, model, torch.cat([first, second])) == 80
        assert prefill(store, model, torch.cat([second, first, second])) == 1


@pytest.mark.parametrize("name", ["gemma3", "qwen3next"])
def test_models_that_cannot_share_are_served_and_say_why(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model, ids = tiny(name), tokens(60)
    with make(model) as store:
        assert store.refusal is not None and store.refusal in caplog.text
        for _ in range(2):
            with store.cache(ids) as cache:
                assert cache.get_seq_length() == 0
                assert_close(feed(model, ids, cache, [40]), oracle(ids, name), tolerance=1e-4)


def test_dropped_tokens_leave_nothing_to_share() -> None:
    model, ids = tiny(), tokens(60)
    with make(model, settings=tieredkv.CacheSettings(beyond="drop", window=16, sinks=16)) as store:
        assert store.refusal is not None
        with store.cache(ids) as cache:
            feed(model, ids, cache)
        assert store.stats().kept_blocks == 0


# ---- lossy codecs


def test_blocks_computed_after_lossy_ones_are_not_shared() -> None:
    model, ids = tiny(), tokens(200)
    with make(model, codec="int8", hot="96 tokens", window=16) as store:
        with store.cache(ids) as cache:
            feed(model, ids[:, :100], cache)
            feed(model, ids[:, 100:], cache)  # reads the first blocks as the codec left them
        assert store.stats().kept_blocks == 6
        with store.cache(ids) as cache:
            assert cache.get_seq_length() == 96
            generate(model, ids, cache, 30)
        assert store.stats().kept_blocks == 6, "what follows them was computed from what the codec left"


def test_a_lossy_codec_that_was_not_needed_shares_everything() -> None:
    model, ids = tiny(), tokens(100)
    with make(model, codec="int8") as store:
        prefill(store, model, ids)
        assert prefill(store, model, ids) == 4


# ---- beams


def test_beams_over_a_known_prompt() -> None:
    """`generate` copies the prompt for its beams; so are the rows of the prefix."""
    model, ids = tiny(), tokens(100)
    wanted = tiny().generate(ids, max_new_tokens=12, num_beams=4, num_return_sequences=2, do_sample=False)
    with make(model) as store:
        for known in (0, 96):
            with store.cache(ids) as cache:
                assert cache.get_seq_length() == known
                out = model.generate(
                    ids,
                    past_key_values=cache,
                    max_new_tokens=12,
                    num_beams=4,
                    num_return_sequences=2,
                    do_sample=False,
                )
                assert torch.equal(out, wanted)
                used = sum(tier.slots.used for tier in store_of(cache).tiers.values())
                assert used <= 6 + 4 * 2
                audit_store(store_of(cache))
        assert store.stats().attached_tokens == 96


# ---- room


def test_what_no_cache_uses_makes_way() -> None:
    model = tiny()
    with make(model, hot="160 tokens", warm="64 tokens") as store:
        for seed in range(6):
            ids = tokens(110, seed=seed)
            with store.cache(ids) as cache:
                assert_close(feed(model, ids, cache, [50, 1]), oracle(ids), f"prompt {seed}")
                audit_store(store_of(cache))
        assert store.stats().evicted_blocks > 0
        assert prefill(store, model, tokens(110, seed=5)) < 110, "of the last prompt there is something left"


def test_what_a_cache_uses_stays() -> None:
    model, ids = tiny(), tokens(96)
    with make(model, hot="160 tokens", warm="64 tokens") as store:
        prefill(store, model, ids)
        with store.cache(torch.cat([ids, ids[:, :4]], 1)) as cache:
            assert cache.get_seq_length() == 96
            big = tokens(150, seed=3)
            other = store.cache(big)
            with pytest.raises(BudgetError):
                feed(model, big, other)
            other.close()
            assert_close(feed(model, ids[:, :4], cache), oracle(torch.cat([ids, ids[:, :4]], 1))[:, 96:])


def test_on_a_device_whose_copies_come_late() -> None:
    model, base = tiny(), tokens(90)
    device = SimulatedAccelerator(seed=3, max_delay_seconds=0.002)
    with make(model, hot="160 tokens", warm="160 tokens", device=device) as store:
        for seed in range(5):
            ids = torch.cat([base[:, : 30 + 15 * seed], tokens(40, seed=seed)], 1)
            prefill(store, model, ids)
    assert device.clocks.races == 0


def test_two_threads(tmp_path: Path) -> None:
    model, ids = tiny(), tokens(100)
    failures: list[BaseException] = []
    with make(model, cold=tieredkv.ColdSettings(tmp_path, free_floor=0)) as store:
        prefill(store, model, ids)

        def work(seed: int) -> None:
            try:
                for round_ in range(3):
                    own = torch.cat([ids, tokens(20, seed=seed + 10 * round_)], 1)
                    with store.cache(own) as cache:
                        known = cache.get_seq_length()
                        assert known == 96
                        assert_close(feed(model, own[:, known:], cache, [10, 1]), oracle(own)[:, known:])
            except BaseException as failure:
                failures.append(failure)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures[0]


# ---- life


def test_a_copy_of_a_cache_publishes_what_it_holds_itself() -> None:
    model, ids = tiny(), tokens(40)
    with make(model) as store:
        cache = store.cache(ids)
        feed(model, ids, cache)
        twin = copy.deepcopy(cache)
        ends = [torch.cat([ids, tokens(30, seed=s)], 1) for s in (5, 6)]
        for each, own in zip((cache, twin), ends, strict=True):
            feed(model, own[:, 40:], each, [1, 1])
        for each in (cache, twin):
            store.publish(each)
            each.close()
        for own in ends:
            assert prefill(store, model, own) == 70 - 64


def test_cropped_and_reset_caches_are_known_for_what_they_hold() -> None:
    model, ids, other = tiny(), tokens(64), tokens(64, seed=2)
    with make(model) as store:
        with store.cache(ids) as cache:
            feed(model, ids, cache)
            cache.crop(-40)
            feed(model, other[:, 24:], cache)
        mixed = torch.cat([ids[:, :24], other[:, 24:]], 1)
        assert prefill(store, model, mixed) == 1
        assert prefill(store, model, ids) == 64 - 16
        with store.cache(tokens(20, seed=7)) as cache:
            feed(model, tokens(20, seed=7), cache)
            cache.reset()
            feed(model, tokens(32, rows=2, seed=8), cache)
        assert prefill(store, model, tokens(32, rows=2, seed=8)) == 1


def test_a_cache_outlives_its_store_and_foreign_ones_are_refused() -> None:
    model, ids = tiny(), tokens(64)
    store = make(model)
    prefill(store, model, ids)
    cache = store.cache(torch.cat([ids, ids], 1))
    blocks: BlockStore = store_of(cache)
    with make(model) as other, pytest.raises(MismatchError, match="store"):
        other.publish(cache)
    store.close()
    store.close()
    for use in (lambda: store.cache(ids), lambda: store.publish(cache)):
        with pytest.raises(ClosedError):
            use()
    model.set_attn_implementation("tieredkv")
    assert_close(feed(model, ids, cache), oracle(torch.cat([ids, ids], 1))[:, 64:])
    assert not blocks.is_closed
    with cache:
        assert not blocks.is_closed
    assert blocks.is_closed, "and leaving a cache after its store is no error"


@pytest.mark.parametrize("ids", [torch.zeros(5, dtype=torch.int64), torch.zeros(1, 5), torch.zeros(1, 0, dtype=int)])
def test_what_is_no_prompt(ids: torch.Tensor) -> None:
    with make(tiny()) as store, pytest.raises(MismatchError, match="token ids"):
        store.cache(ids)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"durable": True}, "Not a place for published blocks"),
        ({"durable": True, "cold": "kv"}, "Not a place for published blocks"),
        ({"durable": 5}, "Not a place for published blocks"),
        ({"codec": "nope"}, "Unknown codec"),
        ({"policy": "nope"}, "Unknown eviction policy"),
    ],
)
def test_what_no_store_can_serve_is_refused_when_it_is_made(changes: dict[str, Any], words: str) -> None:
    model = tiny()
    with pytest.raises(ConfigError, match=words):
        make(model, **changes)
    assert model.config._attn_implementation == "sdpa", "the model is as it was"


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("kind", ["cpu", "simulated"])
def test_a_prefix_below_hot_comes_up_before_its_first_forward(in_place: bool, kind: str) -> None:
    """What each step would copy does; what is attended where it lies stays there."""
    model, ids = tiny(), tokens(200)
    device = SimulatedAccelerator(seed=3, max_delay_seconds=0.002) if kind == "simulated" else None
    settings = tieredkv.CacheSettings(read_in_place=in_place)
    with make(model, settings=settings, device=device) as store:
        prefill(store, model, ids)
        kept = store._shared.kept
        assert kept is not None and store._shared.store is not None
        assert requests.demote(store._shared.store, kept.holder, "warm") == 12
        with store.cache(ids) as cache:
            got = feed(model, ids[:, 192:], cache, [1] * 7)
            assert_close(got, oracle(ids)[:, 192:])
            stays = in_place and kind == "cpu"
            moves = cache.stats().moves
            assert ("warm_to_hot" in moves) == (not stays)
            assert cache.stats().decode.streamed_bytes == 0
            assert (sum(block.hot is not None for block in cache.parts().holder.table.rows[0]) == 13) == (not stays)
            audit_store(store_of(cache))
