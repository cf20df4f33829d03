"""`Tenancy`: one cache's place in a block store, from the first update on: its holder, and the engine that attends.

`SharedStore` is a block store that several caches have their places in.

Imports: everything to its left.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Sequence

import torch

from tieredkv.attention.engine import Engine
from tieredkv.attention.flex import FlexKernels
from tieredkv.block import Block, LayerGeometry
from tieredkv.config import CacheSettings
from tieredkv.device import Device, device_for
from tieredkv.errors import ClosedError
from tieredkv.hf.attachment import Attachment, predicted_geometry
from tieredkv.store import BlockStore, Holder
from tieredkv.store.kept import KeptBlocks


class SharedStore:
    """A block store that is made for the first of its caches, and the blocks it keeps for later ones.

    Args:
        policy_name: which kept blocks go first, see tieredkv.eviction.
    """

    def __init__(self, policy_name: str) -> None:
        self._policy_name = policy_name
        self._lock = threading.Lock()
        self.kernels = FlexKernels()
        self.store: BlockStore | None = None
        self.kept: KeptBlocks | None = None
        self._closed = False

    def open(self, make: Callable[[], BlockStore]) -> tuple[BlockStore, KeptBlocks]:
        """The store, made if there is none.

        Raises:
            ClosedError: it was closed; as `check_open`.
        """
        with self._lock:
            self.check_open()
            if self.store is None or self.kept is None:
                self.store = make()
                self.kept = KeptBlocks(self.store, self._policy_name)
                self._finalizer = weakref.finalize(self, self.store.leave_when_free, self.kept.holder)
            return self.store, self.kept

    def check_open(self) -> None:
        """Refuse a cache that has no place in the store yet, whatever becomes of those that have one.

        Raises:
            ClosedError: `close` was called.
        """
        if self._closed:
            raise ClosedError(
                "The cache's KVStore was closed before the cache was used for the first time.",
                wanted="a first forward, or a prompt that begins with a known prefix, before the store is closed",
                got="a closed store",
                change="take caches from an open KVStore, or use a TieredCache, which needs none",
            )

    def close(self) -> None:
        """Let go of the blocks that are kept; the store closes with the last cache. May be called again."""
        with self._lock:
            self._closed = True
        if self.store is not None and self.kept is not None and self._finalizer.alive:
            self.kept.close()
            self._finalizer.detach()  # afterwards: what Ctrl-C broke off is done by the next call, or at the end


class Tenancy:
    """Empty until the first update, when shapes and devices are known.

    Args:
        attachment: the tie to the model or config.
        settings: sizes and choices of a store that is made here.
        device: the computing device, or None for the one of the first keys.
        tiered: layers of the model that the store serves.
    """

    def __init__(
        self, attachment: Attachment, settings: CacheSettings, device: Device | None, tiered: list[int]
    ) -> None:
        self._attachment, self._settings, self._tiered = attachment, settings, tiered
        self.device = device
        self.store: BlockStore | None = None
        self.holder: Holder | None = None
        self._engine: Engine | None = None
        self._kernels: FlexKernels | None = None
        self._priority = 0
        self.shared: SharedStore | None = None

    def open(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> BlockStore:
        """The store; made for the first K and V of a layer, [rows, kv_heads, new, dim], if there is none."""
        self._leave_for(key.shape[0])
        if self.store is None:
            layers = predicted_geometry(self._attachment.config, self._tiered, layer, key, value)
            if self.shared is None:
                store, kernels = self._make(layers, key.device, key.shape[0]), FlexKernels()
            else:
                store, _ = self.open_shared(self.shared, layers, key.device, key.shape[0])
                kernels = self.shared.kernels
            self.join(store, store.holder(), kernels)
        return self.need_store()

    def open_shared(
        self, shared: SharedStore, layers: list[LayerGeometry], where: torch.device, rows: int
    ) -> tuple[BlockStore, KeptBlocks]:
        """The store of several caches; made with this geometry, on this device, if there is none."""
        return shared.open(lambda: self._make(layers, where, rows))

    def _make(self, layers: list[LayerGeometry], where: torch.device, rows: int) -> BlockStore:
        device = self.device or device_for(where)
        name = self._attachment.fingerprint
        with torch.inference_mode(False):  # memory made in inference mode could be written nowhere else
            return BlockStore(self._settings, layers, device, rows, name)

    def begin_with(self, shared: SharedStore, store: BlockStore, rows: Sequence[Sequence[Block]], tokens: int) -> None:
        """Begin with blocks that are there already, in the store's lock.

        Args:
            shared: the store's owner.
            store: the store.
            rows: blocks of each row, whose references become the cache's.
            tokens: tokens of each row that count; the last block may hold more.

        Raises:
            ClosedError: the owner was closed.
        """
        shared.check_open()
        holder = store.holder()
        holder.table.rows = [list(row) for row in rows]
        holder.tokens = tokens
        self.join(store, holder, shared.kernels)

    def expand(self, rows: int) -> list[int] | None:
        """Copy the rows of a prefix that no forward has continued yet, as beams and returned sequences copy a prompt.

        Returns:
            for each of the `rows` rows the one it was copied from, or None when nothing was done.
        """
        store, holder = self.store, self.holder
        if store is None or holder is None or holder.last_access or not holder.table.rows:
            return None
        held = len(holder.table)
        if rows == held or rows % held:
            return None
        chosen = [row for row in range(held) for _ in range(rows // held)]
        with store.lock:
            holder.table.select(chosen)
        return chosen

    def _leave_for(self, rows: int) -> None:
        """An empty cache whose sizes are in tokens for each row is sized anew for another number of rows."""
        store, holder = self.store, self.holder
        if store is None or holder is None or holder.table.rows or self.device is not None or self.shared is not None:
            return
        if self._settings.depends_on_rows and rows != store.budget.rows and not store.is_shared:
            self.leave()

    def join(self, store: BlockStore, holder: Holder, kernels: FlexKernels) -> None:
        """Take a place that was made elsewhere."""
        self.store, self.holder, self._kernels = store, holder, kernels
        self._finalizer = weakref.finalize(self, store.leave_when_free, holder)
        holder.priority = self._priority
        self._engine = Engine(store, kernels)

    def fork(self, other: Tenancy) -> None:
        """Give `other` a place in the same store, holding the same blocks."""
        if self.store is not None and self.holder is not None and self._kernels is not None:
            other.shared = self.shared
            other.join(self.store, self.store.fork(self.holder), self._kernels)

    def leave(self) -> None:
        """Let go of the blocks, and of the store with the last of its caches. May be called again."""
        if self.store is not None and self.holder is not None:
            _leave(self.store, self.holder)
            self._finalizer.detach()  # afterwards, as in `SharedStore.close`
        self.store = self.holder = self._engine = None

    @property
    def priority(self) -> int:
        """Blocks of caches with a low priority leave hot first."""
        return self._priority

    @priority.setter
    def priority(self, priority: int) -> None:
        self._priority = priority
        if self.holder is not None:
            self.holder.priority = priority

    @property
    def graphs(self) -> int:
        """Compiled graphs of FlexAttention."""
        return 0 if self.store is None or self._kernels is None else self._kernels.graphs

    @property
    def native_attention(self) -> str | None:
        """Why attention is not served by C++ on this machine, or None."""
        return None if self._engine is None else self._engine.native_reason

    @property
    def kernels(self) -> FlexKernels:
        """The compiled kernels that its engine uses.

        Raises:
            ClosedError: nothing was stored yet.
        """
        if self._kernels is None:
            raise _nothing_stored()
        return self._kernels

    @property
    def engine(self) -> Engine:
        """What attends the layers.

        Raises:
            ClosedError: nothing was stored yet, as with the other two.
        """
        if self._engine is None:
            raise _nothing_stored()
        return self._engine

    def need_store(self) -> BlockStore:
        """The store, where there has to be one."""
        if self.store is None:
            raise _nothing_stored()
        return self.store

    def need_holder(self) -> Holder:
        """The holder, where there has to be one."""
        if self.holder is None:
            raise _nothing_stored()
        return self.holder


def _nothing_stored() -> ClosedError:
    return ClosedError("The cache is empty.", wanted="a forward", got="none", change="run the model first")


def _leave(store: BlockStore, holder: Holder) -> None:
    """Let go of a cache's blocks, and of the store with the last of its caches."""
    with contextlib.suppress(ClosedError):
        store.leave(holder)
