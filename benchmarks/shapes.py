"""Models by their shape, with random weights, caches filled without a prefill, and a decode step of both.

Imports: tieredkv, torch, transformers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from tieredkv import TieredCache
from tieredkv.cli.stock import cache_keyword

CPU = torch.device("cpu")
BLOCK = 128


class Attention(torch.nn.Module):
    """What the attention functions ask of a module."""

    def __init__(self, group: int, config: Any = None) -> None:
        super().__init__()
        self.num_key_value_groups, self.is_causal, self.config = group, True, config


def smollm2_config(layers: int = 30) -> LlamaConfig:
    """The shape of SmolLM2-135M."""
    return LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        vocab_size=49152,
        max_position_embeddings=65536,
        tie_word_embeddings=True,
    )


def llama3_8b_config(layers: int) -> LlamaConfig:
    """The attention shape of Llama-3-8B, with as many layers as asked."""
    return LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=1000,
        max_position_embeddings=131072,
    )


def qwen25_15b_config() -> LlamaConfig:
    """The attention and layer shape of Qwen2.5-1.5B."""
    return LlamaConfig(
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        head_dim=128,
        vocab_size=1000,
        max_position_embeddings=131072,
    )


def model_of(config: LlamaConfig, dtype: torch.dtype) -> LlamaForCausalLM:
    """A model with random weights."""
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval().to(dtype)


def two_models(config: LlamaConfig, dtype: torch.dtype, device: torch.device = CPU) -> tuple[Any, Any]:
    """(SDPA, attention over blocks) over the same weights, in the same memory."""
    with device:
        stock: Any = model_of(config, dtype)
    ours = copy.deepcopy(stock, {id(weight): weight for weight in stock.parameters()})
    stock.set_attn_implementation("sdpa")
    ours.set_attn_implementation("tieredkv")
    return stock, ours


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def step_of(model: Any, cache: DynamicCache, device: torch.device = CPU) -> Callable[[], Any]:
    """One decode step, done when it returns."""
    token = torch.zeros((1, 1), dtype=torch.int64, device=device)
    given = {cache_keyword(model): cache}

    def step() -> Any:
        out = model(token, **given)
        wait(device)
        return out

    return step


def fill(
    cache: DynamicCache,
    config: LlamaConfig,
    tokens: int,
    dtype: torch.dtype,
    rows: int = 1,
    device: torch.device | None = None,
) -> None:
    """Put random K and V of `tokens` tokens into every layer, made where they are needed."""
    torch.manual_seed(1)
    shape = (rows, config.num_key_value_heads, tokens, config.head_dim)
    for layer in range(config.num_hidden_layers):
        k, v = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
        cache.update(k, v, layer)


def pair(model: LlamaForCausalLM, tokens: int, dtype: torch.dtype, **options: Any) -> tuple[DynamicCache, TieredCache]:
    """Stock and ours with the same random contents; the model's attention is left as it is."""
    stock = DynamicCache(config=model.config)
    fill(stock, model.config, tokens, dtype)
    ours = TieredCache(model.config, **options)
    fill(ours, model.config, tokens, dtype)
    return stock, ours
