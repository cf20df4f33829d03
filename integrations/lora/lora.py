"""A model with LoRA adapters (peft) over a TieredCache: the same question with an adapter, and without.

python integrations/lora/lora.py                      # SmolLM2 with a random adapter, for want of a trained one
python integrations/lora/lora.py --adapter PATH-OR-ID # a trained one
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model

import tieredkv
from tieredkv.cli.model import load, quiet
from tieredkv.cli.prompt import build


def with_random_adapter(model: Any, seed: int = 0, scale: float = 0.02) -> PeftModel:
    """A model with a LoRA adapter on its attention, whose weights are random and change every logit."""
    config = LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    adapted = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
    adapted.eval()
    return adapted


def answer(model: Any, ids: torch.Tensor, cache: tieredkv.TieredCache, **options: Any) -> torch.Tensor:
    """Prompt and greedy answer, [1, tokens], from an empty cache: keys of another adapter are of no use."""
    cache.reset()
    mask = torch.ones_like(ids)
    out = model.generate(input_ids=ids, attention_mask=mask, past_key_values=cache, do_sample=False, **options)
    return torch.as_tensor(out)


def main(arguments: Sequence[str] | None = None) -> None:
    """Answer with the adapter, and without it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder, a .gguf file or a hub id")
    parser.add_argument("--adapter", help="a folder or hub id of a LoRA adapter; by default a random one")
    chosen = parser.parse_args(arguments)
    with quiet(), tempfile.TemporaryDirectory() as cold:
        loaded = load(chosen.model, torch.float32, None)
        if chosen.adapter is None:
            model = with_random_adapter(loaded.model)
        else:
            model = PeftModel.from_pretrained(loaded.model, chosen.adapter).eval()
        ids = build(loaded.tokenizer, None, None, 1000).input_ids.to(loaded.model.device)
        with tieredkv.TieredCache(model, hot="512 tokens", warm="512 tokens", cold=cold, block_size=64) as cache:
            adapted = answer(model, ids, cache, max_new_tokens=16)
            with model.disable_adapter():
                plain = answer(model, ids, cache, max_new_tokens=16)
            mode = cache.mode
    for name, out in (("with the adapter", adapted), ("without", plain)):
        print(f"{name}: {loaded.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)}")
    print(f"attention over {mode}")


if __name__ == "__main__":
    main()
