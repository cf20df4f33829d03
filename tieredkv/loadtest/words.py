"""Prompts of random words, and how many tokens a word is for a server, learned from what it says of two short ones.

Imports nothing of the package.
"""

from __future__ import annotations

import dataclasses
import random

_TEXT = (
    "the of and to in is that for it was on with as be by this are from at or have not but had were they one you all "
    "we can her has there been if more when will would who so no she other its may these what them than some him time "
    "into only do such my new about out also two any up first could our then most see me should after said your very "
    "between made many over those way down even because before through back much where must well long own good work "
    "world year still under last state water just three home hand side house small large part place right again night "
    "point life number great fact school still line group often early white light paper table green river music"
)
WORDS = tuple(_TEXT.split())
"""Frequent English words, which most vocabularies have as one token each."""


@dataclasses.dataclass(frozen=True)
class WordSize:
    """How prompts become tokens on a server.

    Args:
        tokens_per_word: of `WORDS`, on average.
        template_tokens: what is around the words: the chat template and special tokens.
    """

    tokens_per_word: float = 1.0
    template_tokens: float = 0.0

    @classmethod
    def from_two(cls, words: tuple[int, int], tokens: tuple[int, int]) -> WordSize:
        """From the tokens of two prompts with as many words."""
        per_word = max((tokens[1] - tokens[0]) / (words[1] - words[0]), 0.1)
        return cls(per_word, max(tokens[0] - words[0] * per_word, 0.0))

    def words(self, tokens: int) -> int:
        """Words of a prompt with about as many tokens, at least one."""
        return max(round((tokens - self.template_tokens) / self.tokens_per_word), 1)


def text(seed: int, number: int, words: int) -> str:
    """A prompt's text: the same for the same seed and number, and another beginning for another number."""
    return " ".join(random.Random(f"{seed} {number}").choices(WORDS, k=words))
