"""Questions about one long document, which is read once: every question goes on from the cached document.

python integrations/long_document/long_document.py                   # SmolLM2 and 4,000 tokens of prose
python integrations/long_document/long_document.py --keep FOLDER     # the second time, the document is loaded
python integrations/long_document/long_document.py --document FILE --model PATH-OR-ID
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import tieredkv
from tieredkv.cli.model import load, quiet
from tieredkv.cli.prompt import python_prose

QUESTIONS = ("What is a module?", "What happens when a module cannot be found?", "What does this text explain?")
CHUNK_TOKENS = 1024  # of one forward of the prefill: bounds its activations


class Document:
    """A document in a cache.

    Args:
        model: a transformers causal language model.
        tokenizer: its tokenizer, with a chat template.
        cache: a TieredCache: empty, or loaded from what was saved of this document.
        text: the document.
    """

    def __init__(self, model: Any, tokenizer: Any, cache: tieredkv.TieredCache, text: str) -> None:
        self.model, self.tokenizer, self.cache, self.text = model, tokenizer, cache, text
        # Two prompts are alike up to the question, wherever the template puts it.
        one, other = self.prompt("1"), self.prompt("2")
        length = min(one.shape[1], other.shape[1])
        self.tokens = int((one[0, :length] == other[0, :length]).long().cumprod(0).sum())
        if cache.get_seq_length() == self.tokens:
            return
        with torch.no_grad():
            for chunk in one[:, : self.tokens].split(CHUNK_TOKENS, dim=1):
                model(chunk, past_key_values=cache, logits_to_keep=1)

    def prompt(self, question: str) -> torch.Tensor:
        """The whole prompt, [1, tokens]."""
        chat = [{"role": "user", "content": f"{self.text}\n\nQuestion: {question}"}]
        text = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        ids: torch.Tensor = self.tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        return ids.to(self.model.device)

    def ask(self, question: str, **options: Any) -> str:
        """Answer from the document's own cache, then crop it back to the document."""
        try:
            return self._answer(self.cache, question, options)
        finally:
            self.cache.crop(self.tokens - self.cache.get_seq_length())

    def ask_apart(self, question: str, **options: Any) -> tuple[str, tieredkv.TieredCache]:
        """Answer from a deep copy, which shares the document's blocks; the copy stays, for questions that follow.

        Close the copy when the conversation is over.
        """
        twin = copy.deepcopy(self.cache)
        return self._answer(twin, question, options), twin

    def _answer(self, cache: tieredkv.TieredCache, question: str, options: dict[str, Any]) -> str:
        prompt = self.prompt(question)
        mask = torch.ones_like(prompt)
        out = self.model.generate(prompt, attention_mask=mask, past_key_values=cache, **options)
        return str(self.tokenizer.decode(out[0, prompt.shape[1] :], skip_special_tokens=True))


def open_cache(model: Any, file: Path | None, **options: Any) -> tieredkv.TieredCache:
    """A cache: with the document that was saved in `file`, or empty where there is none."""
    if file is not None and file.exists():
        return tieredkv.TieredCache.load(file, model, **options)
    return tieredkv.TieredCache(model, **options)


def cut(tokenizer: Any, text: str, tokens: int) -> str:
    """The first `tokens` tokens of a text."""
    return str(tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids[:tokens]))


def main(arguments: Sequence[str] | None = None) -> None:
    """Read a document, and ask about it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder, a .gguf file or a hub id")
    parser.add_argument("--document", type=Path, help="a text file; by default Python's own documentation")
    parser.add_argument("--tokens", type=int, default=4000, help="most tokens of the document")
    parser.add_argument("--new-tokens", type=int, default=32, help="most tokens of an answer")
    parser.add_argument("--keep", type=Path, help="a folder for what was read, for the next time")
    chosen = parser.parse_args(arguments)
    with quiet(), tempfile.TemporaryDirectory() as cold:
        loaded = load(chosen.model, torch.float32, None)
        model, tokenizer = loaded.model, loaded.tokenizer
        whole = python_prose() if chosen.document is None else chosen.document.read_text(encoding="utf-8")
        text = cut(tokenizer, whole, chosen.tokens)
        # A cache cannot tell which text it holds: the file's name does. Another model is refused when it is loaded.
        name = hashlib.sha256(text.encode()).hexdigest()[:16]
        file = None if chosen.keep is None else chosen.keep / f"{name}.kv"
        start = time.perf_counter()
        options = {"hot": "1024 tokens", "warm": "2048 tokens", "cold": cold, "block_size": 64}
        with open_cache(model, file, **options) as cache:
            done = "loaded" if cache.get_seq_length() else "read"
            document = Document(model, tokenizer, cache, text)
            print(f"{done} {document.tokens:,} tokens in {time.perf_counter() - start:.1f} s")
            if file is not None and done == "read":
                cache.save(file)
            for question in QUESTIONS:
                start = time.perf_counter()
                answer = document.ask(question, max_new_tokens=chosen.new_tokens, do_sample=False)
                print(f"> {question}\n{answer}\n({time.perf_counter() - start:.1f} s)")
            answer, twin = document.ask_apart(QUESTIONS[0], max_new_tokens=chosen.new_tokens, do_sample=False)
            shared = len({e.block_id for e in cache.block_table()} & {e.block_id for e in twin.block_table()})
            print(f"the same from a deep copy, which shares {shared} blocks\n{answer}")
            twin.close()


if __name__ == "__main__":
    main()
