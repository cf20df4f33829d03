"""A chat of many turns over one cache: each turn reads only what is new, and its answer is streamed as it is written.

python integrations/chat/chat.py                       # three turns in English, with SmolLM2-135M-Instruct
python integrations/chat/chat.py --language zh         # three turns in Chinese
python integrations/chat/chat.py --model PATH-OR-ID    # another model
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from transformers import TextStreamer

import tieredkv
from tieredkv.cli.model import load, quiet

TURNS = {
    "en": ("Name three fruits.", "Which of them grows in Norway?", "Write one sentence about it."),
    "zh": ("请说出三种水果。", "请告诉我哪一种长在中国南方。", "用一句话介绍它。"),
}


def common_prefix(a: torch.Tensor, b: torch.Tensor) -> int:
    """How many tokens two texts, [1, tokens] each, begin with alike."""
    length = min(a.shape[1], b.shape[1])
    return int((a[0, :length] == b[0, :length]).long().cumprod(0).sum())


class Chat:
    """A conversation whose keys and values stay in a cache.

    The whole conversation goes through the chat template at every turn, as the template wants it. What the cache
    already holds of it is kept; from the first token that differs on, the cache is cropped. So it is right for every
    template, those that rewrite earlier answers too.

    Args:
        model: a transformers causal language model.
        tokenizer: its tokenizer, with a chat template.
        cache: a TieredCache; it may have been used for another conversation.
    """

    def __init__(self, model: Any, tokenizer: Any, cache: tieredkv.TieredCache) -> None:
        self.model, self.tokenizer, self.cache = model, tokenizer, cache
        self.messages: list[dict[str, str]] = []
        self.held = torch.empty(1, 0, dtype=torch.long, device=model.device)  # ids that the cache surely holds
        self.new_tokens_read: list[int] = []  # for each turn

    def say(self, text: str, **options: Any) -> str:
        """One turn: the answer, which is written to the terminal as it comes. `options` are those of generate."""
        self.messages.append({"role": "user", "content": text})
        template = self.tokenizer.apply_chat_template(self.messages, tokenize=False, add_generation_prompt=True)
        prompt = self.tokenizer(template, add_special_tokens=False, return_tensors="pt").input_ids.to(self.held.device)
        # One token at least has to be read, so that there are logits for the first new one.
        keep = common_prefix(self.held, prompt[:, :-1])
        self.cache.crop(keep - self.cache.get_seq_length())
        self.held = prompt[:, :keep]
        self.new_tokens_read.append(prompt.shape[1] - keep)
        out = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            past_key_values=self.cache,
            streamer=TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True),
            **options,
        )
        self.held = out[:, : self.cache.get_seq_length()]
        answer = str(self.tokenizer.decode(out[0, prompt.shape[1] :], skip_special_tokens=True))
        self.messages.append({"role": "assistant", "content": answer})
        return answer


def main(arguments: Sequence[str] | None = None) -> None:
    """Hold a short conversation, and say how much each turn had to read."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder, a .gguf file or a hub id")
    parser.add_argument("--language", choices=sorted(TURNS), default="en")
    parser.add_argument("--new-tokens", type=int, default=48, help="most tokens of an answer")
    chosen = parser.parse_args(arguments)
    with quiet(), tempfile.TemporaryDirectory() as cold:
        loaded = load(chosen.model, torch.float32, None)
        with tieredkv.TieredCache(
            loaded.model, hot="256 tokens", warm="2048 tokens", cold=cold, block_size=16
        ) as cache:
            chat = Chat(loaded.model, loaded.tokenizer, cache)
            for text in TURNS[chosen.language]:
                print(f"> {text}")
                chat.say(text, max_new_tokens=chosen.new_tokens, do_sample=False)
            print(f"tokens read at each turn: {chat.new_tokens_read}; in the cache: {cache.get_seq_length()}")


if __name__ == "__main__":
    main()
