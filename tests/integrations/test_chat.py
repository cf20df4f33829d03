"""The chat example: every turn is right, reads only what is new, and streams what it wrote, in Chinese too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support import audit, small

Example = Callable[[str], ModuleType]
Holds = Callable[[Any, Any, torch.Tensor], None]


def test_each_turn_reads_only_what_is_new_and_is_right(
    example: Example, model: Any, byte_tokenizer: Any, assert_holds: Holds, cold_dir: Path
) -> None:
    with small(model, cold_dir) as cache:
        chat = example("chat").Chat(model, byte_tokenizer, cache)
        for turn in range(3):
            before = cache.get_seq_length()
            chat.say(f"question {turn} " * 8, max_new_tokens=12, do_sample=False)
            assert chat.held.shape[1] == cache.get_seq_length()
            assert_holds(model, cache, torch.cat([chat.held, torch.tensor([[5, 6, 7]])], 1))
            if turn:
                assert before - 12 <= cache.get_seq_length() - 11 - chat.new_tokens_read[turn] <= before
        assert cache.mode == "blocks"
        assert min(cache.stats().warm.peak_blocks, cache.stats().cold.peak_blocks) > 0
        audit(cache)


def test_an_answer_that_the_template_rewrites_is_read_again(
    example: Example, model: Any, byte_tokenizer: Any, assert_holds: Holds, cold_dir: Path
) -> None:
    with small(model, cold_dir) as cache:
        chat = example("chat").Chat(model, byte_tokenizer, cache)
        chat.say("first " * 20, max_new_tokens=12, do_sample=False)
        chat.messages[-1]["content"] = "another answer"
        chat.say("second", max_new_tokens=12, do_sample=False)
        assert "another answer" in byte_tokenizer.decode(chat.held[0])
        assert_holds(model, cache, torch.cat([chat.held, torch.tensor([[5, 6, 7]])], 1))


def test_a_turn_that_was_interrupted_can_be_said_again(
    example: Example, model: Any, byte_tokenizer: Any, assert_holds: Holds, cold_dir: Path
) -> None:
    def interrupt(ids: torch.Tensor, scores: torch.Tensor) -> bool:
        raise KeyboardInterrupt

    with small(model, cold_dir) as cache:
        chat = example("chat").Chat(model, byte_tokenizer, cache)
        chat.say("first " * 20, max_new_tokens=12, do_sample=False)
        with pytest.raises(KeyboardInterrupt):
            chat.say("second " * 20, max_new_tokens=12, stopping_criteria=[interrupt])
        chat.messages.pop()
        chat.say("third", max_new_tokens=12, do_sample=False)
        assert_holds(model, cache, torch.cat([chat.held, torch.tensor([[5, 6, 7]])], 1))


def test_chinese_is_streamed_whole(
    example: Example, model: Any, byte_tokenizer: Any, cold_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model is made to write a sentence, of whose characters each has three tokens."""
    sentence = "苹果是一种常见的水果。\n它很甜。长在北方。"
    script = byte_tokenizer(sentence, add_special_tokens=False).input_ids
    with small(model, cold_dir) as cache:
        chat = example("chat").Chat(model, byte_tokenizer, cache)
        left = iter(script)
        answer = chat.say(
            "请介绍苹果。", max_new_tokens=len(script), prefix_allowed_tokens_fn=lambda row, ids: [next(left)]
        )
        assert len(script) > 2 * len(sentence)
        assert answer == sentence
        assert capsys.readouterr().out == sentence + "\n"


@pytest.mark.parametrize("language", ["en", "zh"])
def test_it_says_how_much_each_turn_read(
    example: Example, tiny_folder: Path, language: str, capsys: pytest.CaptureFixture[str]
) -> None:
    example("chat").main(["--model", str(tiny_folder), "--language", language, "--new-tokens", "8"])
    out = capsys.readouterr().out
    assert out.count("> ") >= 3
    assert "tokens read at each turn: [" in out


@pytest.mark.slow
def test_it_answers_with_the_real_model(run_real: Callable[..., str]) -> None:
    assert "tokens read at each turn: [" in run_real("chat")
