"""The pipeline example: answers are those without a cache, one alone and several in a padded batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support import assert_close, audit, small
from transformers import pipeline

Example = Callable[[str], ModuleType]
QUESTIONS = ("short", "a longer question than the first " * 3, "and one more")


@pytest.fixture
def pipe(model: Any, byte_tokenizer: Any) -> Any:
    return pipeline("text-generation", model=model, tokenizer=byte_tokenizer)


@pytest.mark.parametrize("count", [1, 3])
def test_answers_are_those_of_the_stock_cache(
    example: Example, pipe: Any, model: Any, cold_dir: Path, count: int
) -> None:
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS[:count]]
    stock = pipe(chats, batch_size=count, max_new_tokens=40, do_sample=False)
    wanted = [answer[0]["generated_text"][-1]["content"] for answer in stock]
    with small(model, cold_dir) as cache:
        for _ in range(2):  # the cache is used again
            assert example("pipeline").ask(pipe, cache, QUESTIONS[:count], max_new_tokens=40, do_sample=False) == wanted
            assert cache.stats().rows == count
        assert cache.mode == "blocks"
        assert cache.stats().warm.peak_blocks > 0
        audit(cache)


def test_the_logits_behind_an_answer_are_those_without_a_cache(
    example: Example, pipe: Any, model: Any, byte_tokenizer: Any, cold_dir: Path
) -> None:
    with small(model, cold_dir) as cache:
        answer = example("pipeline").ask(pipe, cache, QUESTIONS[1:2], max_new_tokens=40, do_sample=False)[0]
        tokens = cache.get_seq_length()
        after = torch.tensor([[5, 6, 7]])
        chat = [{"role": "user", "content": QUESTIONS[1]}]
        prompt = byte_tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt").input_ids
        assert tokens == prompt.shape[1] + 39
        with torch.no_grad():
            mask = torch.ones_like(prompt)  # the padding token is also the one that ends a message
            out = model.generate(prompt, attention_mask=mask, max_new_tokens=40, do_sample=False)
            got = model(after, past_key_values=cache).logits
            wanted = model(torch.cat([out[:, :tokens], after], 1), use_cache=False).logits[:, -3:]
        assert byte_tokenizer.decode(out[0, prompt.shape[1] :], skip_special_tokens=True) == answer
        assert_close(got, wanted)


def test_a_shorter_text_on_top_of_the_first_fails(pipe: Any, model: Any, cold_dir: Path) -> None:
    """As the example's README says of calls without a reset; transformers fails before it asks the cache."""
    with small(model, cold_dir) as cache:
        pipe(QUESTIONS[1], past_key_values=cache, max_new_tokens=4, do_sample=False)
        with pytest.raises(RuntimeError, match="cannot reshape tensor of 0 elements"):
            pipe(QUESTIONS[0], past_key_values=cache, max_new_tokens=4, do_sample=False)


def test_it_prints_the_answers(example: Example, tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example("pipeline").main(["--model", str(tiny_folder)])
    out = capsys.readouterr().out
    assert "1 rows of" in out
    assert "3 rows of" in out


@pytest.mark.slow
def test_it_answers_with_the_real_model(run_real: Callable[..., str]) -> None:
    assert "3 rows of" in run_real("pipeline")
