"""Builds a prompt for the demo and the doctor: a long document and a question, as the model's chat template has them.

Imports: errors; torch.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch

from tieredkv.errors import ConfigError

DEFAULT_PROMPT_TOKENS = 6144
DEFAULT_QUESTION = "What happens when a requested module cannot be found?"
DOCUMENT_QUESTION = "Summarize the document in two sentences."
_FIRST_TOPICS = ("import", "execmodel", "objects", "exceptions", "class", "function", "naming")


@dataclasses.dataclass(frozen=True)
class Prompt:
    """What the model is given.

    Args:
        input_ids: [1, tokens], int64, on the CPU.
        document: name of the document, for people.
        question: the question at its end.
    """

    input_ids: torch.Tensor
    document: str
    question: str

    @property
    def tokens(self) -> int:
        """Tokens of the whole prompt."""
        return int(self.input_ids.shape[1])


def build(tokenizer: Any, document: Path | None, question: str | None, prompt_tokens: int | None) -> Prompt:
    """The prompt: the document, cut to size, then the question.

    Args:
        tokenizer: of the model; its chat template is used where it has one.
        document: a text file; None for prose from Python's own documentation.
        question: None for a question that suits the document.
        prompt_tokens: about how many tokens the whole prompt has; None for the whole file, or the default's length.

    Raises:
        ConfigError: the file cannot be read, or it is shorter than `prompt_tokens`.
    """
    name = "Python's documentation (pydoc_data.topics)" if document is None else str(document)
    text = python_prose() if document is None else _read(document)
    question = question or (DEFAULT_QUESTION if document is None else DOCUMENT_QUESTION)
    if document is None and prompt_tokens is None:
        prompt_tokens = DEFAULT_PROMPT_TOKENS
    if prompt_tokens is not None:
        text = _cut(tokenizer, text, prompt_tokens - len(_encode(tokenizer, "", question)), prompt_tokens)
    return Prompt(torch.tensor([_encode(tokenizer, text, question)]), name, question)


def python_prose() -> str:
    """The topics of Python's `help()`: those in prose first, then all others, in a fixed order."""
    first = [name for name in _FIRST_TOPICS if name in topics]
    return "\n\n".join(topics[name] for name in [*first, *sorted(set(topics) - set(first))])


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as failure:
        raise ConfigError(
            "The document cannot be read.", wanted="a text file in UTF-8", got=str(failure), change="check --document"
        ) from failure


def _cut(tokenizer: Any, text: str, document_tokens: int, prompt_tokens: int) -> str:
    ids = tokenizer(text, add_special_tokens=False).input_ids
    if not 0 < document_tokens <= len(ids):
        raise ConfigError(
            "The prompt cannot have so many tokens.",
            wanted=f"1 to {len(ids)} tokens of document beside the question",
            got=f"--prompt-tokens {prompt_tokens}, which leaves {document_tokens} for the document",
            change="another --prompt-tokens, or a longer --document",
        )
    return str(tokenizer.decode(ids[:document_tokens], skip_special_tokens=True))


def _encode(tokenizer: Any, document: str, question: str) -> list[int]:
    text = f"{document}\n\n{question}"
    if tokenizer.chat_template is None:
        return list(tokenizer(text).input_ids)
    messages = [{"role": "user", "content": text}]
    # The template writes the special tokens itself.
    chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(chat, add_special_tokens=False).input_ids)
