"""What requests of the engine's tests ask: prompts at random, and answers of a set length."""

from __future__ import annotations

import torch
from transformers import GenerationConfig


def prompt(tokens: int, seed: int) -> list[int]:
    """Tokens that the tiny models know and that end nothing, the same for the same seed."""
    return torch.randint(3, 97, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def greedy(tokens: int, **more: object) -> GenerationConfig:
    """So many tokens, the likeliest each, whatever they are."""
    return GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0, **more)
