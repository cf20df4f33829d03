"""Models, prompts and what is watched, for the files of the serving question."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from tieredkv import Engine, KVStore
from tieredkv.cli.model import load
from tieredkv.cli.prompt import python_prose
from tieredkv.serving import EngineSettings, RequestHandle
from tieredkv.store import BlockStore

PROSE_TOKENS = 60_000
ANY_PACE = 100.0
"""How much longer a step may take while a prompt is read in, where nobody waits for single tokens."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model and text for its prompts.

    Args:
        model: in fp32 on the CPU, without an end-of-sequence token: every request gets as many tokens as it asks for.
        text: token ids `[tokens]` from which prompts are cut.
        name: for people.
    """

    model: Any
    text: torch.Tensor
    name: str

    def prompts(self, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
        """Pieces of the text that begin at places of their own, so that no two share a block."""
        generator = torch.Generator().manual_seed(seed)
        ids = []
        for tokens in lengths:
            start = int(torch.randint(len(self.text) - tokens, (1,), generator=generator))
            ids.append(self.text[start : start + tokens].tolist())
        return ids


def smollm2() -> Subject:
    """SmolLM2-135M-Instruct, and prose."""
    loaded = load(None, torch.float32, "cpu")
    loaded.model.generation_config.eos_token_id = None
    text = python_prose()[: 5 * PROSE_TOKENS]
    ids = loaded.tokenizer(text, return_tensors="pt").input_ids[0, :PROSE_TOKENS]
    return Subject(loaded.model, ids, loaded.name)


def small() -> Subject:
    """A model of two layers with random weights, where what is measured does not depend on the model."""
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        vocab_size=512,
        max_position_embeddings=65536,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    text = torch.randint(3, config.vocab_size, (PROSE_TOKENS,), generator=torch.Generator().manual_seed(0))
    return Subject(LlamaForCausalLM(config).eval(), text, "two layers with random weights")


def greedy(tokens: int, **more: Any) -> GenerationConfig:
    """As many tokens as asked, each the likeliest."""
    return GenerationConfig(max_new_tokens=tokens, do_sample=False, pad_token_id=0, **more)


@dataclasses.dataclass(frozen=True)
class Serving:
    """An engine whose steps the caller makes, its store, and where the store's blocks lie."""

    engine: Engine
    store: KVStore
    blocks: BlockStore

    def run(self) -> None:
        """Step until every request has ended."""
        while self.engine.step():
            pass

    @property
    def slot_bytes(self) -> int:
        """Bytes of one block."""
        return self.blocks.hot.slot_bytes

    @property
    def requests_bytes(self) -> int:
        """Bytes of the blocks that requests hold, shared ones once; what is kept for later ones is not counted."""
        holders = [holder for holder in self.blocks.holders if not holder.keeps]
        return len({block.id for holder in holders for row in holder.table for block in row}) * self.slot_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of all blocks in all tiers; those of ended requests that are kept for their prefix count too."""
        return sum(tier.used_bytes for tier in self.blocks.tiers.values())


@contextlib.contextmanager
def serving(
    subject: Subject, hot_tokens: int, settings: EngineSettings | None = None, **options: Any
) -> Iterator[Serving]:
    """An engine on a new store, with nothing known; the model has its own attention again afterwards."""
    tiers = {"warm": 0, "durable": False, **options}
    with torch.no_grad(), KVStore(subject.model, hot=f"{hot_tokens} tokens", **tiers) as store:
        ids = torch.zeros((1, 1), dtype=torch.int64)
        with store.cache(ids) as cache:
            subject.model(ids, cache=cache)
            blocks = cache.parts().store
        if blocks is None:
            raise LookupError(f"no store after a forward: {cache.fallback_reason}")
        engine = Engine(subject.model, store, settings)
        try:
            yield Serving(engine, store, blocks)
        finally:
            engine.close()


class Watch:
    """When each request's tokens came, and from which logits they were chosen.

    A step's logits have a row for each request that gets a token, and handles hear of their tokens in that order.

    Args:
        model: whose logits are kept, or None to keep times only.
    """

    def __init__(self, model: Any = None) -> None:
        self.seconds: dict[int, list[float]] = defaultdict(list)
        self.logits: dict[int, list[torch.Tensor]] = defaultdict(list)
        self.ended: dict[int, float] = {}
        self._rows: torch.Tensor | None = None
        self._row = 0
        self._hook = None if model is None else model.register_forward_hook(self._forward)

    def follow(self, handle: RequestHandle) -> RequestHandle:
        """Watch a request, from before its first step on."""
        handle.listen(lambda token: self._heard(handle.number, token))
        return handle

    def _forward(self, module: Any, arguments: Any, out: Any) -> None:
        self._rows, self._row = out.logits[0], 0

    def _heard(self, number: int, token: int | None) -> None:
        now = time.perf_counter()
        if token is None:
            self.ended[number] = now
            return
        self.seconds[number].append(now)
        if self._rows is not None:
            self.logits[number].append(self._rows[self._row].clone())
            self._row += 1

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._hook is not None:
            self._hook.remove()


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which a share of them lies."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]
