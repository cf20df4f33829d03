"""Which model types are in the matrix, and which of them CI runs.

Imports: transformers.
"""

from __future__ import annotations

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3_text",
    "phi",
    "phi3",
    "gpt_neox",
    "olmo2",
    "deepseek_v3",
    "gpt_oss",
    "granite",
)
"""The ten families that people use most, some with two generations."""

KINDS = (
    "bart",  # half of an encoder-decoder
    "bert",  # an encoder as a decoder
    "bloom",  # ALiBi, attention of its own
    "deepseek_v32",  # an indexer's keys beside K and V
    "diffllama",  # values rearranged after the update
    "falcon_h1",  # a state and full attention in one layer
    "gemma3n_text",  # layers that share K and V
    "gpt2",  # positions that are learned
    "jamba",  # recurrent and full layers
    "llama4_text",  # chunked layers
    "mimo_v2_flash",  # V narrower than K, sinks, other heads in sliding layers
    "qwen3_next",  # linear and full layers
)
"""One of each kind of cache that models make."""


def every_model_type() -> list[str]:
    """Every model type with a causal LM class in the installed transformers; the most used families first."""
    rest = [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in FAMILIES]
    return [*FAMILIES, *rest]
