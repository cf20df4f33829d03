"""Which attention a model had before caches selected "tieredkv" on it, and which of them still need it.

Caches of one model come and go in any order, and some are dropped without being closed. The last that goes gives the
model back what it had, each part of it its own: a vision tower may have had another implementation than the decoder.

Imports: hf.seam; transformers' PreTrainedModel.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

from transformers import PreTrainedModel

from tieredkv.hf import seam

_ATTRIBUTE = "_tieredkv_selection"


class Selection:
    """The caches (and stores) that need "tieredkv" on one model. It lies on that model, so that all of them find it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: weakref.WeakSet[Any] = weakref.WeakSet()
        self._previous: list[tuple[Any, str | None]] = []
        self._due: list[tuple[Any, str | None]] = []  # what the model is to have again, from when the last one left

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the model has no caches, and whoever loads it need not have this package.
        return type(None), ()

    @classmethod
    def of(cls, model: Any) -> Selection:
        """The model's; behind wrappers (PEFT's, `torch.compile`'s) it is that of the model itself."""
        attributes = vars(_inner(model))
        if attributes.get(_ATTRIBUTE) is None:
            attributes.pop(_ATTRIBUTE, None)
        found: Selection = attributes.setdefault(_ATTRIBUTE, cls())
        return found

    def join(self, user: object, model: Any, config: Any) -> None:
        """Select "tieredkv" on the model, unless it has it; where the model's owner chose it, it will stay.

        Args:
            user: who needs it until it leaves, or is dropped.
            model: the model.
            config: the config of its decoder.
        """
        with self._lock:
            if self._due:  # Ctrl-C broke the last one's leaving off
                self._give_back()
            if seam.implementation_of(config) != seam.NAME:
                previous = [(part, seam.implementation_of(part)) for part in _configs(_inner(model))]
                model.set_attn_implementation(seam.NAME)
                self._previous = previous
            if self._previous:
                self._users.add(user)

    def stay(self, user: object, other: object) -> None:
        """`other` needs it as long as `user` does, and longer: a cache that was forked from another."""
        with self._lock:
            if user in self._users:
                self._users.add(other)

    def leave(self, user: object) -> None:
        """The last to leave gives the model back what it had, but for what somebody has changed since."""
        with self._lock:
            if user not in self._users:
                return
            if all(other is user for other in self._users):
                self._give_back()
            self._users.discard(user)  # afterwards: what Ctrl-C broke off is done by the next call

    def _give_back(self) -> None:
        if self._previous:
            now = [(config, seam.implementation_of(config), previous) for config, previous in self._previous]
            self._due = [(config, previous if name == seam.NAME else name) for config, name, previous in now]
            self._previous = []
        for config, implementation in self._due:  # from the outermost on, as setting one sets all inside it
            config._attn_implementation = implementation
        self._due = []


def _inner(model: Any) -> Any:
    return model.set_attn_implementation.__self__


def _configs(model: Any) -> list[Any]:
    """The model's config and those of its parts, each once, the outermost first."""
    found = [model.config]
    for config in found:
        parts = (getattr(config, name, None) for name in getattr(config, "sub_configs", ()))
        found += [part for part in parts if part is not None and not any(part is other for other in found)]
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and not any(module.config is other for other in found):
            found.append(module.config)
    return found
