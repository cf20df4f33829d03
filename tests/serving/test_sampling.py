"""What a request's sampler says of tokens, without an engine."""

from __future__ import annotations

import pytest
import torch
from support import tiny
from transformers import GenerationConfig

from tieredkv.serving.sampling import Sampler, largest

PROMPT = 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_largest_is_what_argmax_says(dtype: torch.dtype) -> None:
    logits = torch.randn(5, 1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[0, [7, 900]] = 30.0  # equals: the first of them
    logits[1] = -torch.inf
    logits[2, 3] = torch.inf
    assert largest(logits) == logits.argmax(-1).tolist()
    assert largest(logits)[:3] == [7, 0, 3]


def test_a_request_ends_by_token_or_by_length() -> None:
    config = GenerationConfig(max_new_tokens=2, do_sample=False, eos_token_id=[8, 9], pad_token_id=0)
    sampler = Sampler(tiny("llama"), config, PROMPT, None, None)
    ids = torch.tensor([1, 2, 3, 4, 5, 9])
    assert sampler.ended_by(ids[:5], 5) is None
    assert sampler.ended_by(torch.cat([ids[:4], ids[5:]]), 9) == "stop"
    assert sampler.ended_by(ids[:6].clone(), 6) == "length"
    assert sampler.ended_by(ids, 9) == "stop"  # both at once: what the model said comes first
