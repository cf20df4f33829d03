"""What a model computes with, as one digest: class, config, every weight, and which adapters are switched on.

Equal token ids do not make equal K and V: those of another model, dtype, RoPE setting or adapter are others. Whoever
looks up K and V by token ids puts this digest in front.

Imports: errors.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from typing import Any

import torch

from tieredkv.errors import UnsupportedModelError

_SAMPLES = 64
_NOT_OF_THE_MODEL = frozenset(
    {
        "_name_or_path",
        "architectures",
        "attn_implementation",
        "id2label",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "transformers_version",
        "use_cache",
    }
)
"""Fields of a config that say nothing of what is computed."""

_ADAPTER_STATE = frozenset({"active_adapter", "active_adapters", "disable_adapters", "merged_adapters", "scaling"})


def config_digest(config: Any) -> str:
    """Hex SHA-256 of what a config says of the computation: sizes, dtype, layer types, RoPE settings."""
    return hashlib.sha256(json.dumps(_plain(config.to_dict()), sort_keys=True, default=str).encode()).hexdigest()


def _plain(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {
        str(key): _plain(each)
        for key, each in value.items()
        if key not in _NOT_OF_THE_MODEL and "attn_implementation" not in str(key)
    }


class Fingerprint:
    """The digest of one model, computed anew when the model has changed.

    Every weight counts: of each tensor the 64-bit words are summed, and some are taken as they are. Whether anything
    changed since is seen by the tensors' version counters, by the samples and by the state of adapters: milliseconds.
    A write through `.data` that leaves all samples of a tensor as they were goes unnoticed until the next process.

    Args:
        model: a torch module with a transformers `config`.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._seen: tuple[object, ...] | None = None
        self._digest = ""
        self._held = self._looked = False

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Inside, the model does not change: it is looked at once, at the first `current`."""
        outer, self._held = self._held, True
        try:
            yield
        finally:
            self._held = outer
            self._looked = self._looked and outer

    @torch.no_grad()
    def current(self) -> str:
        """Hex SHA-256 of the model as it is now.

        Raises:
            UnsupportedModelError: weights that are not in memory.
        """
        if self._looked:
            return self._digest
        tensors, switched = _look(self._model)
        versions = tuple((name, tensor.data_ptr(), _version(tensor)) for name, tensor in tensors.items())
        seen = (versions, _samples(tensors), switched)
        if seen != self._seen:
            self._digest = self._compute(tensors, str(seen[1]), str(seen[2]))
            self._seen = seen
        self._looked = self._held
        return self._digest

    def _compute(self, tensors: dict[str, torch.Tensor], samples: str, switched: str) -> str:
        digest = hashlib.sha256()
        config: Any = self._model.config
        for part in (type(self._model).__name__, config_digest(config), samples, switched):
            digest.update(part.encode() + b"\0")
        sums = [_sum(tensor) for tensor in tensors.values()]
        for (name, tensor), words in zip(tensors.items(), sums, strict=True):
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {int(words)}\0".encode())
        return digest.hexdigest()


def _look(model: torch.nn.Module) -> tuple[dict[str, torch.Tensor], tuple[object, ...]]:
    """Weights and buffers by name, each tensor once, and which adapters are switched on in which module.

    One walk over the modules: three of torch's own take four times as long, at every step of a server.
    """
    weights: dict[str, torch.Tensor] = {}
    buffers: dict[str, torch.Tensor] = {}
    once: set[torch.Tensor] = set()
    states: list[object] = []
    of_classes: dict[type, tuple[str, ...]] = {}
    for path, module in model.named_modules():
        for found, tensors in ((weights, module._parameters), (buffers, module._buffers)):
            for name, tensor in tensors.items():
                if tensor is not None and tensor not in once:
                    once.add(tensor)
                    found[f"{path}.{name}" if path else name] = tensor
        kind = type(module)
        if kind not in of_classes:
            of_classes[kind] = tuple(field for field in _ADAPTER_STATE if hasattr(kind, field))
        if of_classes[kind] or not _ADAPTER_STATE.isdisjoint(vars(module)):
            states += _adapter_state(path, module)
    weights.update(buffers)
    for name, tensor in weights.items():
        if tensor.is_meta:
            raise UnsupportedModelError(
                "The model's weights are not in memory.",
                wanted="weights on a device",
                got=f"{name} on the meta device",
                change="load the model without offloading to disk",
            )
    return weights, tuple(states)


def _adapter_state(path: str, module: torch.nn.Module) -> Iterator[tuple[str, str, str]]:
    """Which adapters are switched on in a module, as far as it says so (PEFT's names)."""
    for field in sorted(_ADAPTER_STATE):
        value = getattr(module, field, None)
        # `scaling` is a float in attention modules and a dict of adapters in PEFT's.
        if value is None or callable(value) or (field == "scaling" and not isinstance(value, dict)):
            continue
        yield (path, field, str(value))


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _samples(tensors: dict[str, torch.Tensor]) -> str:
    """Hex SHA-256 of some evenly spaced values of each tensor."""
    digest = hashlib.sha256()
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors.values():
        if not tensor.numel():
            continue
        count = tensor.numel()
        step = max(count // _SAMPLES, 1)
        flat = tensor if tensor.is_contiguous() else tensor.flatten()
        by_kind.setdefault((tensor.device, tensor.dtype), []).append(flat.as_strided((-(-count // step),), (step,)))
    for parts in by_kind.values():
        digest.update(torch.cat(parts).cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor's words, modulo 2^64."""
    if not tensor.numel():
        return torch.zeros((), dtype=torch.int64)
    data = tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    words = data.view(torch.int64) if data.numel() % 8 == 0 and data.storage_offset() % 8 == 0 else data
    return words.sum(dtype=torch.int64)
