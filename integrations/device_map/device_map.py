"""A model whose weights accelerate spreads over devices, host memory and disk, with a TieredCache for its K and V.

python integrations/device_map/device_map.py                                   # half of SmolLM2's weights on disk
python integrations/device_map/device_map.py --max-memory 0=10GiB cpu=32GiB    # a GPU, host memory, the rest on disk
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import cpu_offload, dispatch_model, infer_auto_device_map

import tieredkv
from tieredkv.cli.model import load, quiet
from tieredkv.cli.prompt import build


def spread(model: Any, max_memory: dict[int | str, int | str], folder: str) -> dict[str, Any]:
    """Spread a model's weights in place; what fits nowhere goes to files in `folder`. Returns where each module is.

    `AutoModelForCausalLM.from_pretrained(name, device_map="auto", max_memory=...)` does the same while it loads.
    """
    no_split = list(model._no_split_modules or ())
    device_map: dict[str, Any] = infer_auto_device_map(model, max_memory, no_split_module_classes=no_split)
    dispatch_model(model, device_map, offload_dir=folder, skip_keys=model._skip_keys_device_placement)
    return device_map


def offload(model: Any, device: str) -> None:
    """Keep all weights in host memory, and bring each to `device` when its module runs."""
    cpu_offload(model, torch.device(device))


def answer(model: Any, ids: torch.Tensor, cache: tieredkv.TieredCache, **options: Any) -> torch.Tensor:
    """Prompt and greedy answer, [1, tokens]. Nothing here is about devices: accelerate moves what has to move."""
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, past_key_values=cache, do_sample=False, **options)
    return torch.as_tensor(out)


def parse_memory(items: Sequence[str]) -> dict[int | str, int | str]:
    """["0=10GiB", "cpu=32GiB"] as accelerate's max_memory."""
    pairs = (item.split("=", 1) for item in items)
    return {int(name) if name.isdigit() else name: size for name, size in pairs}


def main(arguments: Sequence[str] | None = None) -> None:
    """Spread the model, answer, and say where the weights are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder, a .gguf file or a hub id")
    parser.add_argument("--max-memory", nargs="+", metavar="DEVICE=SIZE", help="default: cpu=half of the weights")
    parser.add_argument("--tokens", type=int, default=1000, help="tokens of the prompt")
    parser.add_argument("--new-tokens", type=int, default=8, help="most tokens of the answer")
    chosen = parser.parse_args(arguments)
    with quiet(), tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as cold:
        loaded = load(chosen.model, torch.float32, "cpu")
        model = loaded.model
        half = sum(weight.nbytes for weight in model.parameters()) // 2
        devices = spread(model, parse_memory(chosen.max_memory) if chosen.max_memory else {"cpu": half}, folder)
        ids = build(loaded.tokenizer, None, None, chosen.tokens).input_ids
        with tieredkv.TieredCache(model, hot="512 tokens", warm="1024 tokens", cold=cold, block_size=64) as cache:
            out = answer(model, ids, cache, max_new_tokens=chosen.new_tokens)[:, ids.shape[1] :]
            hot_bytes = cache.stats().hot.used_bytes
    print(loaded.tokenizer.decode(out[0], skip_special_tokens=True))
    print(f"modules: {dict(Counter(str(device) for device in devices.values()))}; hot: {hot_bytes:,} bytes")


if __name__ == "__main__":
    main()
