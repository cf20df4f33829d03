"""The `pipeline` API over a TieredCache: one chat, then several at once.

python integrations/pipeline/pipeline.py                       # SmolLM2-135M-Instruct
python integrations/pipeline/pipeline.py --model PATH-OR-ID    # another model
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from transformers import pipeline

import tieredkv
from tieredkv.cli.model import load, quiet

QUESTIONS = ("What is a cache?", "Name a colour.", "How many days has a week?")


def ask(pipe: Any, cache: tieredkv.TieredCache, questions: Sequence[str], **options: Any) -> list[str]:
    """The answers of a text-generation pipeline, all in one batch, which starts from an empty cache.

    Args:
        pipe: `pipeline("text-generation", ...)`; its tokenizer needs a padding token for several questions.
        cache: a TieredCache.
        questions: one chat of one message for each.
        options: those of `generate`.
    """
    cache.reset()
    chats = [[{"role": "user", "content": question}] for question in questions]
    # Chats that do not fit in one batch would come as several calls of generate, each on top of the last one's tokens.
    answers = pipe(chats, batch_size=len(chats), past_key_values=cache, **options)
    return [str(answer[0]["generated_text"][-1]["content"]) for answer in answers]


def main(arguments: Sequence[str] | None = None) -> None:
    """Ask one question, then three at once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder, a .gguf file or a hub id")
    chosen = parser.parse_args(arguments)
    with quiet(), tempfile.TemporaryDirectory() as cold:
        loaded = load(chosen.model, torch.float32, None)
        pipe = pipeline("text-generation", model=loaded.model, tokenizer=loaded.tokenizer)
        with tieredkv.TieredCache(loaded.model, hot="128 tokens", warm="512 tokens", cold=cold, block_size=16) as cache:
            for questions in (QUESTIONS[:1], QUESTIONS):
                answers = ask(pipe, cache, questions, max_new_tokens=24, do_sample=False)
                for question, answer in zip(questions, answers, strict=True):
                    print(f"> {question}\n{answer}")
                stats = cache.stats()
                print(f"{stats.rows} rows of {stats.tokens} tokens, hot {stats.hot.used_bytes:,} bytes")


if __name__ == "__main__":
    main()
