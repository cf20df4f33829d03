"""Assisted decoding over a TieredCache: a second model, or the prompt itself, guesses tokens; the model checks them.

python integrations/assisted/assisted.py                                # SmolLM2, guesses from the prompt
python integrations/assisted/assisted.py --assistant shallow            # ... from the model's own first layers
python integrations/assisted/assisted.py --model A --assistant B        # ... from another model
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import tieredkv
from tieredkv.cli.model import load, quiet
from tieredkv.cli.prompt import build


def answer(
    model: Any, ids: torch.Tensor, cache: tieredkv.TieredCache, assistant: Any = None, **options: Any
) -> torch.Tensor:
    """Prompt and answer, [1, tokens]: the model's own greedy tokens, whoever guesses them.

    Args:
        model: a transformers causal language model.
        ids: the prompt, [1, tokens]; transformers assists one row only.
        cache: the model's cache; the assistant keeps one of its own.
        assistant: a model with the same tokenizer; None to look the guesses up in the prompt.
        options: those of generate.
    """
    guess = {"prompt_lookup_num_tokens": 8} if assistant is None else {"assistant_model": assistant}
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, past_key_values=cache, do_sample=False, **guess, **options)
    return torch.as_tensor(out)


def shallow(model: Any, layers: int) -> Any:
    """The first layers of a model, with its embeddings and its head, as an assistant; weights are shared."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = config.layer_types[:layers]
    with torch.device("meta"):
        assistant = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    own = dict(model.state_dict())
    assistant.load_state_dict({name: own[name] for name in assistant.state_dict()}, assign=True)
    for name, buffer in model.named_buffers():
        owner, _, leaf = name.rpartition(".")
        if name in dict(assistant.named_buffers()):
            assistant.get_submodule(owner).register_buffer(leaf, buffer, persistent=name in own)
    return assistant.eval()


def main(arguments: Sequence[str] | None = None) -> None:
    """Answer, and say how many forwards that took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder, a .gguf file or a hub id")
    parser.add_argument("--assistant", help='"shallow", or a folder, a .gguf file or a hub id')
    parser.add_argument("--tokens", type=int, default=2000, help="tokens of the prompt")
    parser.add_argument("--new-tokens", type=int, default=32, help="most tokens of the answer")
    chosen = parser.parse_args(arguments)
    with quiet(), tempfile.TemporaryDirectory() as cold:
        loaded = load(chosen.model, torch.float32, None)
        model, assistant = loaded.model, None
        if chosen.assistant == "shallow":
            assistant = shallow(model, max(model.config.num_hidden_layers // 3, 1))
        elif chosen.assistant is not None:
            assistant = load(chosen.assistant, torch.float32, None).model
        ids = build(loaded.tokenizer, None, None, chosen.tokens).input_ids.to(model.device)
        with tieredkv.TieredCache(model, hot="640 tokens", warm="1024 tokens", cold=cold, block_size=64) as cache:
            out = answer(model, ids, cache, assistant, max_new_tokens=chosen.new_tokens)[:, ids.shape[1] :]
            stats = cache.stats()
    print(loaded.tokenizer.decode(out[0], skip_special_tokens=True))
    print(f"{out.shape[1]} tokens in {stats.prefill.forwards + stats.decode.forwards} forwards of the model")


if __name__ == "__main__":
    main()
