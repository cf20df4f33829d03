"""The document example: each answer is the one without a cache, and the cache holds the document alone afterwards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support import SIZES, assert_close, audit, small

Example = Callable[[str], ModuleType]
Holds = Callable[[Any, Any, torch.Tensor], None]
TEXT = "One long document about modules and how they are imported. " * 5
OPTIONS = {"max_new_tokens": 12, "do_sample": False}


def answers(out: str) -> list[str]:
    """What was printed, without the lines that say how long it took."""
    return [line for line in out.splitlines() if not line.endswith(" s)") and " tokens in " not in line]


@torch.no_grad()
def answer_without_cache(document: Any, question: str) -> str:
    ids = document.prompt(question)
    start = ids.shape[1]
    for _ in range(12):
        ids = torch.cat([ids, document.model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return document.tokenizer.decode(ids[0, start:], skip_special_tokens=True)


def test_every_answer_is_that_without_a_cache(
    example: Example, model: Any, byte_tokenizer: Any, assert_holds: Holds, cold_dir: Path
) -> None:
    module = example("long_document")
    module.CHUNK_TOKENS = 100
    with small(model, cold_dir) as cache:
        document = module.Document(model, byte_tokenizer, cache, TEXT)
        assert len(TEXT) < document.tokens == cache.get_seq_length()
        for question in ("1", "what?", "and a longer question"):
            assert document.ask(question, **OPTIONS) == answer_without_cache(document, question)
            assert cache.get_seq_length() == document.tokens
            assert_holds(model, cache, document.prompt(question))
        stats = cache.stats()
        assert stats.mode == "blocks"
        assert min(stats.warm.peak_blocks, stats.cold.peak_blocks) > 0
        audit(cache)


def test_conversations_of_their_own_share_the_document(
    example: Example, model: Any, byte_tokenizer: Any, assert_holds: Holds, cold_dir: Path
) -> None:
    with small(model, cold_dir, hot="160 tokens") as cache:
        document = example("long_document").Document(model, byte_tokenizer, cache, TEXT)
        held = {entry.block_id for entry in cache.block_table()}
        twins = []
        for question in ("what?", "and a longer question"):
            answer, twin = document.ask_apart(question, **OPTIONS)
            assert answer == answer_without_cache(document, question)
            assert len(held - {entry.block_id for entry in twin.block_table()}) <= 1  # the tail, which was written
            twins.append(twin)
            assert_holds(model, cache, document.prompt("the document itself is as it was"))
        after = torch.tensor([[5, 6, 7]])
        with torch.no_grad():
            prompt = document.prompt("what?")
            out = model.generate(prompt, attention_mask=torch.ones_like(prompt), **OPTIONS)[:, :-1]
            got = model(after, past_key_values=twins[0]).logits
            assert_close(got, model(torch.cat([out, after], 1), use_cache=False).logits[:, -3:])
        audit(cache, *twins)
        for twin in twins:
            twin.close()


def test_a_document_that_was_saved_is_not_read_again(
    example: Example, model: Any, byte_tokenizer: Any, assert_holds: Holds, cold_dir: Path, tmp_path: Path
) -> None:
    module, file = example("long_document"), tmp_path / "document.kv"
    with module.open_cache(model, file, **SIZES, cold=cold_dir) as cache:
        module.Document(model, byte_tokenizer, cache, TEXT)
        cache.save(file)
    with module.open_cache(model, file, **SIZES, cold=cold_dir) as cache:
        assert cache.get_seq_length() > len(TEXT)
        document = module.Document(model, byte_tokenizer, cache, TEXT)
        assert cache.get_seq_length() == document.tokens
        assert document.ask("what?", **OPTIONS) == answer_without_cache(document, "what?")
        assert_holds(model, cache, document.prompt("what?"))
        audit(cache)


def test_a_question_that_was_interrupted_leaves_the_document(
    example: Example, model: Any, byte_tokenizer: Any, assert_holds: Holds, cold_dir: Path
) -> None:
    def interrupt(ids: torch.Tensor, scores: torch.Tensor) -> bool:
        raise KeyboardInterrupt

    with small(model, cold_dir) as cache:
        document = example("long_document").Document(model, byte_tokenizer, cache, TEXT)
        with pytest.raises(KeyboardInterrupt):
            document.ask("what?", stopping_criteria=[interrupt], **OPTIONS)
        assert cache.get_seq_length() == document.tokens
        assert_holds(model, cache, document.prompt("what?"))


def test_it_answers_about_a_file(
    example: Example, tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "text.txt"
    file.write_text(TEXT * 5, encoding="utf-8")
    arguments = ["--model", str(tiny_folder), "--document", str(file), "--tokens", "1500", "--new-tokens", "4"]
    arguments += ["--keep", str(tmp_path)]
    example("long_document").main(arguments)
    first = capsys.readouterr().out
    assert first.startswith("read 1,493 tokens")
    assert "deep copy, which shares 23 blocks" in first
    example("long_document").main(arguments)
    second = capsys.readouterr().out
    assert second.startswith("loaded 1,493 tokens")
    assert answers(second) == answers(first)


@pytest.mark.slow
def test_it_answers_with_the_real_model(run_real: Callable[..., str]) -> None:
    assert "read 4,0" in run_real("long_document")
