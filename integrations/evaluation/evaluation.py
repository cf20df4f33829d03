"""Scores a model on multiple choice through a TieredCache: what questions share is read once.

python integrations/evaluation/evaluation.py                       # SmolLM2 on a few questions about 1,500 tokens
python integrations/evaluation/evaluation.py --model PATH-OR-ID    # another model
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from typing import Any

import torch

import tieredkv
from tieredkv.cli.model import load, quiet
from tieredkv.cli.prompt import python_prose

QUESTIONS: tuple[tuple[str, tuple[str, ...], int], ...] = (
    ("Which statement finds and loads a module?", (" import", " break", " global", " return"), 0),
    ("Which name is bound by `import sys`?", (" module", " path", " sys", " loader"), 2),
    (
        "Which exception is raised when a module cannot be found?",
        (" KeyError", " ModuleNotFoundError", " TypeError"),
        1,
    ),
    ("In which module is `modules`, the cache of modules?", (" sys", " os", " re", " json"), 0),
)


class Scorer:
    """Log-likelihoods of continuations, through a cache that keeps what one context shares with the next.

    Args:
        model: a transformers causal language model.
        cache: an empty TieredCache, whose hot tier holds the last blocks of as many rows as there are choices.
    """

    def __init__(self, model: Any, cache: tieredkv.TieredCache) -> None:
        self.model, self.cache = model, cache
        self.held: list[int] = []  # the tokens that the cache holds
        self.tokens_read = 0

    @torch.no_grad()
    def score(self, context: Sequence[int], choices: Sequence[Sequence[int]]) -> list[tuple[float, bool]]:
        """For each choice, the sum of its tokens' log-probabilities after the context, and whether greedy decoding
        would write it.

        Args:
            context: at least one token.
            choices: at least one token each.
        """
        after = self._read(list(context))  # [1, 1, vocabulary]
        logits = after.expand(len(choices), -1, -1)
        longest = max(len(choice) for choice in choices)
        if longest > 1:
            # Padding on the right changes nothing on its left: attention is causal.
            ids = torch.tensor([[*choice[:-1], *[0] * (longest - len(choice))] for choice in choices])
            self.cache.batch_repeat_interleave(len(choices))
            try:
                self.tokens_read += ids.numel()
                more = self.model(ids.to(self.model.device), past_key_values=self.cache).logits
                logits = torch.cat([logits, more], 1)  # [choices, longest, vocabulary]
                self.cache.crop(1 - longest)
            finally:
                self.cache.batch_select_indices(torch.tensor([0]))
        logs = logits.float().log_softmax(-1)
        return [_score(row[: len(choice)], list(choice)) for row, choice in zip(logs, choices, strict=True)]

    def _read(self, context: list[int]) -> torch.Tensor:
        """The logits after a context, of which at least the last token is read."""
        keep = 0
        while keep < min(len(self.held), len(context) - 1) and self.held[keep] == context[keep]:
            keep += 1
        self.cache.crop(keep - self.cache.get_seq_length())
        self.held = context[:keep]
        ids = torch.tensor([context[keep:]], device=self.model.device)
        logits: torch.Tensor = self.model(ids, past_key_values=self.cache, logits_to_keep=1).logits
        self.held, self.tokens_read = context, self.tokens_read + ids.numel()
        return logits


def _score(logs: torch.Tensor, choice: list[int]) -> tuple[float, bool]:
    """Of log-probabilities [tokens, vocabulary] for a choice's tokens."""
    ids = torch.tensor(choice, device=logs.device)
    return float(logs.gather(1, ids[:, None]).sum()), bool((logs.argmax(-1) == ids).all())


def main(arguments: Sequence[str] | None = None) -> None:
    """Score the questions, and say how many tokens were read for them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder, a .gguf file or a hub id")
    parser.add_argument("--tokens", type=int, default=1500, help="tokens of the text that the questions share")
    chosen = parser.parse_args(arguments)
    right = without = 0
    with quiet(), tempfile.TemporaryDirectory() as cold:
        loaded = load(chosen.model, torch.float32, None)

        def encode(text: str) -> list[int]:
            return list(loaded.tokenizer(text, add_special_tokens=False).input_ids)

        document = encode(python_prose())[: chosen.tokens]
        with tieredkv.TieredCache(
            loaded.model, hot="1024 tokens", warm="2048 tokens", cold=cold, block_size=64
        ) as cache:
            scorer = Scorer(loaded.model, cache)
            for question, choices, best in QUESTIONS:
                context = document + encode(f"\n\nQuestion: {question}\nAnswer:")
                ids = [encode(choice) for choice in choices]
                scores = [log for log, _ in scorer.score(context, ids)]
                found = scores.index(max(scores))
                right += found == best
                without += sum(len(context) + len(choice) for choice in ids)
                print(f"{question}{choices[found]} ({'right' if found == best else 'wrong'})")
    print(f"{right} of {len(QUESTIONS)} right; {scorer.tokens_read:,} tokens read, instead of {without:,}")


if __name__ == "__main__":
    main()
