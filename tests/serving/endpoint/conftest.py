"""What the tests of the endpoint share: a tiny chat model whose tokens are letters, served in this process."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import audit_store, tiny
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

import tieredkv
from tieredkv.serving import Engine, EngineSettings

LETTERS = [chr(code) for code in range(32, 127)]
SPECIAL = ["<|end|>", "<|start|>"]
TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ('system', 'user', 'assistant') %}{{ raise_exception('who?') }}"
    "{% endif %}<|start|>{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant: {% endif %}"
)
PACKAGES = ("fastapi", "openai", "prometheus_client", "uvicorn")
needs_packages = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in PACKAGES), reason="pip install 'tieredkv[serve]'"
)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """One token for each printable character, and a chat template."""
    bpe = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(SPECIAL + LETTERS)}, merges=[]))
    bpe.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=SPECIAL[1], eos_token=SPECIAL[0], pad_token=SPECIAL[0]
    )
    fast.chat_template = TEMPLATE
    return fast


def chat_model() -> Any:
    """A random model for that tokenizer."""
    model = tiny()
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = 0
    return model


@pytest.fixture(scope="session")
def model_folder(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both in a folder."""
    folder = tmp_path_factory.mktemp("served")
    chat_model().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@torch.no_grad()
def continuation(model: Any, ids: list[int], new: int) -> list[int]:
    """Greedy tokens of a model without any cache, whatever they are."""
    whole = torch.tensor([ids])
    for _ in range(new):
        whole = torch.cat([whole, model(whole, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return whole[0, len(ids) :].tolist()


@dataclasses.dataclass
class Served:
    """An endpoint in this process.

    Args:
        client: an HTTP client, which needs no port.
        app: the ASGI app.
        engine, store, model, tokenizer, metrics: what is behind it.
    """

    client: Any
    app: Any
    engine: Engine
    store: tieredkv.KVStore
    model: Any
    tokenizer: Any
    metrics: Any

    def chat(self, text: str, **fields: Any) -> Any:
        """The response to one message of a user."""
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0, **fields}
        return self.client.post("/v1/chat/completions", json=body)

    def complete(self, prompt: str, **fields: Any) -> Any:
        """The response to a prompt."""
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **fields}
        return self.client.post("/v1/completions", json=body)

    def alone(self, prompt: str, new: int) -> str:
        """What a model without a cache goes on with."""
        ids = self.tokenizer(prompt)["input_ids"]
        return str(self.tokenizer.decode(continuation(self.model, ids, new), skip_special_tokens=True))

    def assert_at_rest(self) -> None:
        """No request is left, and every block is one that was published."""
        assert self.engine._runner.everyone() == []
        blocks = self.engine._runner.blocks
        audit_store(blocks)
        assert len(blocks.holders) == 1


@pytest.fixture
def serve(tokenizer: Any, cold_dir: Path) -> Iterator[Callable[..., Served]]:
    """Makes endpoints: `serve(settings of the engine, start=False, hot=..., api_keys=...)`."""
    from fastapi.testclient import TestClient

    from tieredkv.serving.endpoint import EndpointSettings, build
    from tieredkv.serving.metrics import EngineMetrics

    with contextlib.ExitStack() as stack:

        def make(
            settings: EngineSettings | None = None, *, start: bool = True, hot: str = "2048 tokens", **choices: Any
        ) -> Served:
            model, metrics = chat_model(), EngineMetrics()
            store = stack.enter_context(
                tieredkv.KVStore(model, hot=hot, warm="512 tokens", cold=cold_dir, block_size=16)
            )
            settings = settings or EngineSettings(max_model_len=512)
            engine = Engine(model, store, settings, tokenizer=tokenizer, timings=metrics)
            stack.callback(engine.close)
            metrics.watch(engine)
            app = build(engine, model, tokenizer, EndpointSettings(name="tiny", **choices), metrics)
            client = stack.enter_context(TestClient(app))
            if start:
                engine.start()
            return Served(client, app, engine, store, model, tokenizer, metrics)

        yield make


@pytest.fixture
def served(serve: Callable[..., Served]) -> Served:
    """An endpoint with the usual settings."""
    return serve()


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch, tokenizer: Any) -> Callable[[str], None]:
    """Makes every answer the text that it is called with."""
    from tieredkv.serving.sampling import Sampler

    def say(text: str) -> None:
        tokens = tokenizer(text)["input_ids"]

        def choose(self: Sampler, ids: torch.Tensor, logits: torch.Tensor) -> int:
            return int(tokens[(len(ids) - self._prompt_tokens) % len(tokens)])

        monkeypatch.setattr(Sampler, "is_greedy", property(lambda self: False))
        monkeypatch.setattr(Sampler, "choose", choose)

    return say
