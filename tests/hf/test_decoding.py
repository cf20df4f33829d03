"""Ways of decoding that transformers has, through a cache in three tiers: the logits are those without any cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import (
    VOCABULARY,
    WAYS,
    assert_close,
    assert_generated,
    audit,
    feed,
    generate,
    of,
    oracle,
    small,
    tiny,
    tokens,
)
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    StoppingCriteria,
    StoppingCriteriaList,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.generation.streamers import BaseStreamer

import tieredkv

PROMPT = 90
FAMILIES = ["llama", "gemma3", "gptoss", "mla"]


def sampled(model: Any, ids: torch.Tensor, cache: Any, **keywords: Any) -> Any:
    """Generation with logits and a fixed seed."""
    torch.manual_seed(5)
    return model.generate(
        ids,
        past_key_values=cache,
        max_new_tokens=8,
        return_dict_in_generate=True,
        output_logits=True,
        **keywords,
    )


class Streamer(BaseStreamer):  # type: ignore[misc]
    """Collects what is streamed, and raises after some pieces."""

    def __init__(self, most: int = 1000) -> None:
        self.pieces: list[torch.Tensor] = []
        self.most, self.ended = most, False

    def put(self, value: torch.Tensor) -> None:
        """One piece: the prompt first, then tokens."""
        if len(self.pieces) >= self.most:
            raise KeyboardInterrupt
        self.pieces.append(value.flatten())

    def end(self) -> None:
        """The stream is over."""
        self.ended = True


# ---- one sequence


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("way", WAYS)
def test_greedy(cold_dir: Path, name: str, way: str) -> None:
    model, ids = tiny(name), tokens(PROMPT)
    with small(of(model, way), cold_dir) as cache:
        assert_generated(generate(model, ids, cache), PROMPT, name)
        audit(cache)


@pytest.mark.parametrize("way", WAYS)
def test_sampling_with_a_seed_and_several_answers(cold_dir: Path, way: str) -> None:
    model, ids = tiny(), tokens(PROMPT)
    keywords: dict[str, Any] = {"do_sample": True, "num_return_sequences": 3, "temperature": 1.3}
    wanted = sampled(model, ids, DynamicCache(config=model.config), **keywords)
    with small(of(model, way), cold_dir) as cache:
        out = sampled(model, ids, cache, **keywords)
        assert torch.equal(out.sequences, wanted.sequences)
        assert_generated(out, PROMPT)


@pytest.mark.parametrize("way", WAYS)
def test_inputs_embeds(cold_dir: Path, way: str) -> None:
    model, ids = tiny(), tokens(PROMPT)
    embeds = model.get_input_embeddings()(ids).detach()
    wanted = sampled(model, None, DynamicCache(config=model.config), inputs_embeds=embeds, do_sample=False)
    with small(of(model, way), cold_dir) as cache:
        out = sampled(model, None, cache, inputs_embeds=embeds, do_sample=False)
        assert torch.equal(out.sequences, wanted.sequences)
        for ours, theirs in zip(out.logits, wanted.logits, strict=True):
            assert_close(ours, theirs)


@pytest.mark.parametrize("way", WAYS)
def test_a_stream(cold_dir: Path, way: str) -> None:
    model, ids, streamer = tiny(), tokens(PROMPT), Streamer()
    with small(of(model, way), cold_dir) as cache:
        out = generate(model, ids, cache, streamer=streamer)
        assert torch.equal(torch.cat(streamer.pieces), out.sequences[0])
        assert streamer.ended
        assert_generated(out, PROMPT)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_generate_that_was_interrupted_goes_on(cold_dir: Path, name: str, way: str) -> None:
    model, ids, streamer = tiny(name), tokens(PROMPT), Streamer(most=5)
    with small(of(model, way), cold_dir) as cache:
        cache.activate_past_recording()
        with pytest.raises(KeyboardInterrupt):
            generate(model, ids, cache, streamer=streamer)
        so_far = torch.cat(streamer.pieces)[None]
        assert cache.get_seq_length() == so_far.shape[1], "the last token was being given out"
        cache.crop(-1)
        out = generate(model, so_far, cache)
        assert_generated(out, so_far.shape[1], name)
        audit(cache)


class Enough(StoppingCriteria):  # type: ignore[misc]
    """Stops at a length."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.tokens)


@pytest.mark.parametrize("way", WAYS)
def test_a_stop_of_the_users_own_and_then_more(cold_dir: Path, way: str) -> None:
    model, ids = tiny(), tokens(PROMPT)
    with small(of(model, way), cold_dir) as cache:
        first = generate(model, ids, cache, stopping_criteria=StoppingCriteriaList([Enough(PROMPT + 3)]))
        assert first.sequences.shape[1] == PROMPT + 3
        assert_generated(generate(model, first.sequences, cache), PROMPT + 3)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["llama", "mla"])
def test_turns_that_share_a_beginning(cold_dir: Path, name: str, way: str) -> None:
    """Another question about one document: the cache is cropped to what both have in common."""
    model, document = tiny(name), tokens(PROMPT)
    with small(of(model, way), cold_dir) as cache:
        for turn in range(3):
            ids = torch.cat([document, tokens(11, seed=turn + 2)], 1)
            if cache.get_seq_length() > PROMPT:
                cache.crop(PROMPT - cache.get_seq_length())
            out = generate(model, ids, cache)
            assert_generated(out, ids.shape[1], name)
        audit(cache)


# ---- speculation


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("by", ["assistant", "itself", "first layer"])
def test_assisted(cold_dir: Path, name: str, way: str, by: str) -> None:
    model, ids = tiny(name), tokens(PROMPT)
    assistant = tiny(num_hidden_layers=1) if by == "assistant" else tiny(name)
    keywords: dict[str, Any] = {"assistant_model": assistant}
    if by == "first layer":
        keywords = {"assistant_early_exit": 1}
    with small(of(model, way), cold_dir) as cache:
        out = generate(model, ids, cache, new=12, **keywords)
        assert_generated(out, PROMPT, name)
        wanted = oracle(out.sequences, name)[:, PROMPT - 1 : -1].argmax(-1)
        assert torch.equal(out.sequences[:, PROMPT:], wanted)
        audit(cache)


@pytest.mark.parametrize("way", WAYS)
def test_prompt_lookup_over_sliding_layers(cold_dir: Path, way: str) -> None:
    model, ids = tiny("gemma3"), tokens(9).repeat(1, 10)
    with small(of(model, way), cold_dir) as cache:
        out = generate(model, ids, cache, new=14, prompt_lookup_num_tokens=4)
        assert_generated(out, PROMPT, "gemma3")


# ---- several rows


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("way", WAYS)
def test_beams(cold_dir: Path, name: str, way: str) -> None:
    model, ids = tiny(name), tokens(PROMPT, rows=2)
    keywords: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 2, "do_sample": False}
    wanted = sampled(model, ids, DynamicCache(config=model.config), output_scores=True, **keywords)
    with small(of(model, way), cold_dir) as cache:
        out = sampled(model, ids, cache, output_scores=True, **keywords)
        assert torch.equal(out.sequences, wanted.sequences)
        assert_close(out.sequences_scores, wanted.sequences_scores, tolerance=1e-4)
        audit(cache)


@pytest.mark.parametrize("way", WAYS)
def test_beams_over_a_prefilled_cache(cold_dir: Path, way: str) -> None:
    model, ids = tiny(), tokens(PROMPT)
    wanted = sampled(model, ids, DynamicCache(config=model.config), num_beams=3, do_sample=False)
    with small(of(model, way), cold_dir, hot="288 tokens") as cache:
        feed(model, ids[:, : PROMPT - 20], cache)
        cache.batch_repeat_interleave(3)
        out = sampled(model, ids, cache, num_beams=3, do_sample=False)
        assert torch.equal(out.sequences, wanted.sequences)


@pytest.mark.parametrize("way", WAYS)
def test_rows_that_are_left_padded_take_several_turns(cold_dir: Path, way: str) -> None:
    model, ids = tiny(), tokens(40, rows=3)
    mask = torch.ones_like(ids)
    mask[0, :17] = 0
    mask[2, :3] = 0
    with small(of(model, way), cold_dir) as cache:
        for turn in range(3):
            out = generate(model, ids, cache, attention_mask=mask)
            assert_generated(out, ids.shape[1], mask=mask)
            ids = torch.cat([out.sequences, tokens(5, rows=3, seed=turn + 9)], 1)
            mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)


@pytest.mark.parametrize("way", WAYS)
def test_rows_are_repeated_and_chosen(cold_dir: Path, way: str) -> None:
    model, ids = tiny(), tokens(PROMPT, rows=2)
    with small(of(model, way), cold_dir) as cache:
        feed(model, ids, cache)
        cache.batch_repeat_interleave(3)
        cache.batch_select_indices(torch.tensor([4, 1]))
        rest = tokens(9, rows=2, seed=3)
        both = torch.cat([ids[[1, 0]], rest], 1)
        assert_close(feed(model, rest, cache, [1, 1]), oracle(both)[:, PROMPT:])


# ---- encoder and decoder


@pytest.fixture(scope="module")
def translator() -> Iterator[T5ForConditionalGeneration]:
    """T5, whose attention has a bias of its own."""
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    tokens = {"pad_token_id": 0, "decoder_start_token_id": 1, "eos_token_id": None}
    model = T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, initializer_factor=8.0, **sizes, **tokens))
    model.generation_config.eos_token_id = None
    yield model.eval()


@pytest.mark.parametrize("beams", [1, 3])
def test_an_encoder_and_decoder(translator: T5ForConditionalGeneration, cold_dir: Path, beams: int) -> None:
    ids = tokens(30, rows=2)

    def run(own: Any) -> Any:
        cache = EncoderDecoderCache(own, DynamicCache(config=translator.config))
        return translator.generate(
            ids,
            past_key_values=cache,
            max_new_tokens=100,
            num_beams=beams,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )

    wanted = run(DynamicCache(config=translator.config))
    with small(translator.config, cold_dir) as own:
        out = run(own)
        assert torch.equal(out.sequences, wanted.sequences)
        for ours, theirs in zip(out.logits, wanted.logits, strict=True):
            assert_close(ours, theirs)
        assert own.stats().moves["hot_to_warm"].blocks > 0


# ---- around the model


def test_autocast_that_leaves_keys_and_values_in_two_dtypes_is_refused(cold_dir: Path) -> None:
    """Rotary embeddings give keys in full precision, and projections values in half."""
    model, ids = tiny(), tokens(PROMPT)
    with small(model, cold_dir) as cache:
        with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(tieredkv.MismatchError, match="bfloat16"):
            feed(model, ids, cache)
        assert_close(feed(model, ids, cache, [80, 1]), oracle(ids))


@pytest.mark.parametrize("way", WAYS)
def test_autocast_of_a_model_without_rotary_embeddings(cold_dir: Path, way: str) -> None:
    model, ids = tiny("bloom"), tokens(PROMPT)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted = feed(model, ids, DynamicCache(config=model.config), [80, 1])
        with small(of(model, way), cold_dir) as cache:
            assert_close(feed(model, ids, cache, [80, 1]), wanted, tolerance=0.02)
            pair = cache.gather_layer(0)
            assert pair is not None and pair[0].dtype == torch.bfloat16


@pytest.mark.parametrize("way", WAYS)
def test_gradient_checkpointing_is_harmless_in_eval_mode(cold_dir: Path, way: str) -> None:
    model, ids = tiny(), tokens(PROMPT)
    # The older name, where there is no other, is deprecated where there is.
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    with small(of(model, way), cold_dir) as cache:
        assert_close(feed(model, ids, cache, [80, 1]), oracle(ids))


@pytest.mark.parametrize("way", WAYS)
def test_a_model_that_the_user_compiled(cold_dir: Path, way: str) -> None:
    """The cache stays outside of the graphs; what is between them is traced."""
    model, ids = tiny(), tokens(PROMPT)
    with small(of(model, way), cold_dir) as cache:
        compiled = torch.compile(model, backend="eager")
        got = feed(compiled, ids, cache, [70, 1, 1, 1])
        assert_close(got, oracle(ids))
        assert cache.mode == way
    torch._dynamo.reset()
