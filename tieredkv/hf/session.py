"""A cache's sequence as a file, and as a `DynamicCache`: all K and V, the layers that are not tiered, positions.

What a model keeps outside of the cache goes along where it is known to (the rope offset of Qwen2-VL and its kind);
state of a kind that is not known is refused.

Imports: errors, block, fingerprint, this package; transformers' cache classes.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from tieredkv.block import LayerGeometry
from tieredkv.errors import MismatchError, UnsupportedModelError
from tieredkv.fingerprint import Fingerprint, config_digest
from tieredkv.hf import seam, session_file
from tieredkv.hf.positions import Positions
from tieredkv.hf.session_file import SessionFile, Slot

Pair = tuple[torch.Tensor, torch.Tensor]

_KEPT_BY_MODELS = ("rope_deltas",)
"""Attributes in which models keep what the next forward of a sequence needs."""


@dataclasses.dataclass
class Contents:
    """What makes up a sequence.

    Args:
        config: the config of the model's decoder.
        model: the model, or None where only its config is known.
        tiered: the model's index of each tiered layer.
        layer: K and V of such a layer, [rows, kv_heads, tokens, dim] each, or None while there are none. They are read
            from the tiers into tensors of their own.
        held: rows, tokens of each row and geometry of such a layer, or None while it has none; nothing is read.
        others: the layers that are not tiered.
        positions: what is known of the last positions.
    """

    config: Any
    model: Any
    tiered: Sequence[int]
    layer: Callable[[int], Pair | None]
    held: Callable[[int], tuple[int, int, LayerGeometry] | None]
    others: dict[int, Any]
    positions: Positions


def save(path: Path, contents: Contents) -> None:
    """Write a sequence; see `TieredCache.save`."""
    model = contents.model
    if model is None and _positions_outside(contents.config):
        raise UnsupportedModelError(
            "The model keeps part of the sequence's positions, and the cache does not know the model.",
            wanted="cache.save(path, model)",
            got="a cache made from a config",
            change="pass the model",
        )
    small: dict[str, torch.Tensor] = {}
    content: dict[str, Any] = {
        "config": config_digest(contents.config),
        "fingerprint": "" if model is None else Fingerprint(model).current(),
        "tiered": list(contents.tiered),
        "others": {
            str(i): {"class": type(each).__name__, "fields": _encode(vars(each), f"other.{i}", small)}
            for i, each in contents.others.items()
        },
        "positions": _encode(vars(contents.positions), "positions", small),
        "model": _encode({} if model is None else dict(_kept_by(model)), "model", small),
    }
    slots = list[Slot]()
    content["filled"] = list[int]()
    for index in contents.tiered:
        if (held := contents.held(index)) is not None:
            rows, tokens, layer = held
            content["filled"].append(index)
            for kind, dim in (("k", layer.k_dim), ("v", layer.v_dim)):
                slots.append(Slot(f"{kind}.{index}", layer.dtype, (rows, layer.kv_heads, tokens, dim)))
    slots += [Slot(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in small.items()]
    slots.sort(key=lambda slot: -slot.dtype.itemsize)
    session_file.write(path, content, slots, _in_order(slots, contents, small))


def _in_order(slots: Sequence[Slot], contents: Contents, small: dict[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    """The tensors as they are to be written; of tiered layers one at a time is in memory."""
    at, pair = -1, None
    for slot in slots:
        if slot.name in small:
            yield small[slot.name]
            continue
        kind, index = slot.name[0], int(slot.name[2:])
        if at != index:
            pair = None  # before the next one is read
            at, pair = index, contents.layer(index)
        if pair is not None:
            yield pair["kv".index(kind)]


class Loaded:
    """A session file that belongs to a model.

    Args:
        path: the file.
        model: the model that is to go on with it.

    Raises:
        SessionError: the file cannot be read, or is damaged.
        MismatchError: it is a session of another model.
    """

    def __init__(self, path: Path, model: Any) -> None:
        self._model, self._file = model, SessionFile(path)
        content = self._file.content
        wanted = content["fingerprint"]
        got = Fingerprint(model).current() if wanted else ""
        config = config_digest(model.config.get_text_config(decoder=True))
        if wanted != got or content["config"] != config:
            raise MismatchError(
                "The session was saved with another model.",
                wanted=f"weights {wanted[:12] or 'unknown'}, config {content['config'][:12]}",
                got=f"weights {got[:12] or 'unknown'}, config {config[:12]}",
                change="load it with the same weights, dtype, settings and adapters",
            )

    def check_layers(self, tiered: Sequence[int], others: dict[int, Any]) -> None:
        """Refuse a cache whose layers are of other kinds.

        Raises:
            MismatchError: they are.
        """
        content = self._file.content
        kinds = {str(i): type(layer).__name__ for i, layer in others.items()}
        saved = {i: each["class"] for i, each in content["others"].items()}
        if list(tiered) != content["tiered"] or kinds != saved:
            raise MismatchError(
                "The session's layers are of other kinds.",
                wanted=f"tiered layers {content['tiered']}, others {saved}",
                got=f"{list(tiered)}, {kinds}",
                change="load it with the version of transformers that it was saved with",
            )

    def pairs(self) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """(layer, K, V) of each tiered layer, on the model's device."""
        for index in self._file.content["filled"]:
            k, v = (self._file.tensor(f"{kind}.{index}").to(self._model.device) for kind in "kv")
            yield index, k, v

    def restore_others(self, others: dict[int, Any]) -> None:
        """Put what was saved of layers that are not tiered into new ones."""
        for index, each in self._file.content["others"].items():
            vars(others[int(index)]).update(self._decode(each["fields"]))

    def restore_model(self) -> None:
        """Give the model back what it keeps outside of the cache."""
        for name, value in self._decode(self._file.content["model"]).items():
            path, _, field = name.rpartition(".")
            setattr(self._model.get_submodule(path), field, value)

    def positions(self) -> Positions:
        """What was known of the last positions."""
        positions = Positions()
        fields = self._decode(self._file.content["positions"])
        vars(positions).update({name: value for name, value in fields.items() if hasattr(positions, name)})
        return positions

    def _decode(self, tree: Any) -> Any:
        kind, value = next(iter(tree.items()))
        if kind == "tensor":
            return self._file.tensor(value).to(self._model.device, copy=True)
        if kind == "dict":
            return {key: self._decode(each) for key, each in value}
        if kind in ("list", "tuple"):
            decoded = [self._decode(each) for each in value]
            return decoded if kind == "list" else tuple(decoded)
        if kind == "dtype":
            return getattr(torch, value)
        return self._model.device if kind == "device" else value


def _encode(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """A JSON tree of plain values; tensors go into `tensors` under names of their own."""
    if isinstance(value, torch.Tensor):
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, dict):
        return {"dict": [[key, _encode(each, f"{name}.{key}", tensors)] for key, each in value.items()]}
    if isinstance(value, list | tuple):
        parts = [_encode(each, f"{name}.{i}", tensors) for i, each in enumerate(value)]
        return {"list" if isinstance(value, list) else "tuple": parts}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": True}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    raise UnsupportedModelError(
        f"{name} is state of a kind that cannot be saved.",
        wanted="tensors, numbers, and dicts or lists of them",
        got=type(value).__name__,
        change="keep the conversation in memory",
    )


def _kept_by(model: Any) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        for field in _KEPT_BY_MODELS:
            if field in module.__dict__:
                yield f"{name}.{field}", module.__dict__[field]


def _positions_outside(config: Any) -> bool:
    """Whether positions have several axes, so that the model works out an offset and keeps it."""
    return any("mrope_section" in (getattr(config, field, None) or {}) for field in ("rope_parameters", "rope_scaling"))


# ---- DynamicCache


def to_dynamic(contents: Contents) -> DynamicCache:
    """The same sequence as a `DynamicCache` of its own."""
    dynamic = DynamicCache(config=contents.config)
    for index in contents.tiered:
        pair = contents.layer(index)
        if pair is not None:
            layer: Any = dynamic.layers[index]
            layer.lazy_initialization(*pair)
            layer.keys, layer.values = pair
    for index, other in contents.others.items():
        if index in contents.tiered:
            _copy_state(other, dynamic.layers[index], but=("keys", "values", "is_initialized"))
        else:
            dynamic.layers[index] = copy.deepcopy(other)
    return dynamic


def from_dynamic(
    dynamic: DynamicCache, tiered: Sequence[int], others: dict[int, Any]
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """(layer, K, V) of the layers that will be tiered; the others are filled.

    Raises:
        MismatchError: the cache has other layers.
    """
    for index in range(max(len(dynamic.layers), *tiered, *others) + 1):
        theirs = dynamic.layers[index] if index < len(dynamic.layers) else None
        layer = others.get(index)
        if index in tiered:
            if not isinstance(theirs, DynamicLayer) or type(theirs).update is not DynamicLayer.update:
                raise _other_layers(f"layer {index}: DynamicLayer", type(theirs).__name__)
            if layer is not None:
                _copy_state(theirs, layer, but=("keys", "values", "is_initialized"))
        elif layer is not None:
            _fill_other(index, theirs, layer)
        elif theirs is not None:
            raise _other_layers("no layer", f"layer {index}: {type(theirs).__name__}")
    for index in tiered:
        filled: Any = dynamic.layers[index]
        if filled.get_seq_length():
            yield index, *_whole(filled)


def _fill_other(index: int, theirs: Any, layer: Any) -> None:
    """What a layer that is not tiered takes over from a layer of a `DynamicCache`."""
    if seam.is_placeholder(layer):
        if theirs is not None and not seam.is_placeholder(theirs) and theirs.get_seq_length():
            raise _other_layers(f"layer {index}: no K and V", type(theirs).__name__)
    elif type(theirs) is DynamicLayer and isinstance(layer, DynamicSlidingWindowLayer):
        if theirs.get_seq_length():
            layer.update(*_whole(theirs))
    else:
        _copy_state(theirs, layer)


def _copy_state(theirs: Any, layer: Any, but: Sequence[str] = ()) -> None:
    if type(theirs) is not type(layer):
        raise _other_layers(type(layer).__name__, type(theirs).__name__)
    vars(layer).update(copy.deepcopy({name: value for name, value in vars(theirs).items() if name not in but}))


def _whole(layer: Any) -> Pair:
    # Tensors that are being stored carry a handle for a while: views of their own do.
    return layer.keys.detach(), layer.values.detach()


def _other_layers(wanted: object, got: object) -> MismatchError:
    return MismatchError(
        "The DynamicCache does not have the layers of this model.",
        wanted=wanted,
        got=got,
        change="DynamicCache(config=model.config), filled by this model",
    )
