"""`TieredCache`: what `model.generate(past_key_values=...)` is given. The transformers contract over a store.

Each method ends the forward before it, if that is still open: there is no hook after the last layer, so a forward ends
at the next one or at the next public call. A forward that did not reach every tiered layer is taken back.

Imports: everything to its left.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch

from tieredkv import advice, events, report
from tieredkv.block_table import TableEntry
from tieredkv.config import CacheSettings, ColdSettings, Size, Verify
from tieredkv.device import Device
from tieredkv.errors import ConfigError
from tieredkv.hf import refusals
from tieredkv.hf.attachment import Attachment
from tieredkv.hf.resumable import Resumable
from tieredkv.stats import CacheStats, Mode, MoveRecord
from tieredkv.store import links, planner, requests


class TieredCache(Resumable):
    """A transformers cache whose blocks live in device memory, host memory and on disk.

    Args:
        model: a transformers model: the cache selects attention over blocks on it, and puts the old implementation
            back on `close`. Or a model's config: then the cache follows what the user selects
            (`model.set_attn_implementation("tieredkv")`; any other implementation gathers).
        hot: device memory for blocks and staging: bytes, "512MiB", or "2048 tokens" for each batch row. Default: half
            of what is free.
        warm: host memory for blocks, the same forms. Default: a quarter of what is free.
        cold: a folder or `ColdSettings`. Default: none, nothing touches a disk.
        block_size: tokens of a block, a multiple of 16. Default: 128.
        window: most recent tokens of each row that stay hot. Default: 2,048, or what fits hot if that is less.
        codec: "raw" (exact, the default), or "fp8", "int8", "int4" below hot (lossy).
        hot_codec: the same name as `codec` to keep blocks outside the window encoded on the device too. Default: None.
        verify: "always" (default), "first" or "off".
        max_tokens: tokens of each row that must fit, checked at the first forward; more may follow.
        settings: everything else; the arguments above win over it.
        device: the computing device, for tests; by default the one of the first keys.

    Raises:
        ConfigError: a setting that cannot be served.
        UnsupportedModelError: layer types that the cache refuses, an encoder-decoder model, or not a model at all.
    """

    def __init__(
        self,
        model: Any,
        *,
        hot: Size | int | str | None = None,
        warm: Size | int | str | None = None,
        cold: ColdSettings | str | os.PathLike[str] | None = None,
        block_size: int | None = None,
        window: int | None = None,
        codec: str | None = None,
        hot_codec: str | None = None,
        verify: Verify | None = None,
        max_tokens: int | None = None,
        settings: CacheSettings | None = None,
        device: Device | None = None,
    ) -> None:
        chosen = CacheSettings.chosen(
            settings,
            hot=hot,
            warm=warm,
            cold=cold,
            block_size=block_size,
            window=window,
            codec=codec,
            hot_codec=hot_codec,
            verify=verify,
            max_tokens=max_tokens,
        )
        super().__init__(Attachment.to(model), chosen, device)
        self.leaving: Callable[[TieredCache], object] | None = None

    # ---- whole-cache operations

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens of each row; more than there are empties the cache.

        Raises:
            ConfigError: a positive number, which transformers once took for a length.
            RuntimeError: a window has moved on unrecorded; nothing is removed. Call `activate_past_recording` in time.
            MismatchError: a recurrent state cannot go back; nothing is removed.
        """
        if tokens_to_remove > 0:
            raise ConfigError(
                "crop takes the number of tokens to remove, as a negative number.",
                wanted="crop(-n)",
                got=f"crop({tokens_to_remove})",
                change=f"crop({tokens_to_remove} - cache.get_seq_length()) keeps {tokens_to_remove} tokens",
            )
        self._end_forward()
        self._others.crop(tokens_to_remove)
        if self._place.store is not None and self._place.holder is not None and tokens_to_remove:
            planner.crop(self._place.store, self._place.holder, self._place.holder.tokens + tokens_to_remove)
        self._positions.cropped(-tokens_to_remove)
        if self.watch is not None:
            self.watch.crop(self.get_seq_length())

    def reset(self) -> None:
        """Drop every token; memory goes back to the store, settings and the chosen way stay."""
        self._check_open()
        self._empty()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make row i what row `beam_idx[i]` was; blocks are shared, and copied only when one of them is written.

        Raises:
            MismatchError: a row that the cache does not hold, or none at all; nothing is changed.
        """
        self._select([int(i) for i in beam_idx])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times; the copies share their blocks.

        Raises:
            MismatchError: no row would be left; nothing is changed.
        """
        self._end_forward()
        self._select([row for row in range(self._rows) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows that `indices` names (a mask of bools, or row numbers), in that order.

        Raises:
            MismatchError: a row that the cache does not hold, or none at all; nothing is changed.
        """
        if indices.dtype == torch.bool:
            if self._rows and indices.shape != (self._rows,):
                raise refusals.no_such_row(self._rows, f"a mask of shape {list(indices.shape)}")
            indices = indices.nonzero().flatten()
        self._select([int(i) for i in indices])

    @property
    def _rows(self) -> int:
        """Batch rows; 0 while the cache is empty."""
        holder = self._place.holder
        return self._others.rows if holder is None or not holder.table.rows else len(holder.table)

    def _select(self, indices: Sequence[int]) -> None:
        self._end_forward()
        rows = self._rows
        if not rows:
            return
        wrong = [index for index in indices if not -rows <= index < rows]
        if wrong or not indices:
            raise refusals.no_such_row(rows, f"row {wrong[0]}" if wrong else "none")
        chosen = [index % rows for index in indices]
        self._others.select(chosen)
        if self._place.holder is not None and self._place.store is not None and self._place.holder.table.rows:
            with self._place.store.lock:
                self._place.holder.table.select(chosen)
            self._positions.select(chosen)
        if self.watch is not None:
            self.watch.select(chosen)

    def reserve(self, tokens: int) -> None:
        """Check that so many tokens of each row fit, now and at the first forward, if that is still to come.

        Nothing is allocated. An empty cache's rows are not known: what not even one row can have is refused at once
        where there is a store already, as that of a `KVStore`.

        Raises:
            BudgetError: they do not.
            ConfigError: fewer than none.
        """
        self._end_forward()
        place = self._place
        store = place.store or (None if place.shared is None else place.shared.store)
        is_empty = place.holder is None or not place.holder.table.rows
        is_sized_anew = is_empty and place.shared is None and self._settings.depends_on_rows
        if store is not None and not is_sized_anew:
            requests.reserve(store, place.holder, tokens)
        self._settings = dataclasses.replace(self._settings, max_tokens=tokens)

    def demote(self, tier: str = "warm") -> int:
        """Move every sealed block out of hot, to warm or to cold; returns how many moved. For a sequence that rests.

        Raises:
            BudgetError: they do not fit there.
        """
        self._end_forward()
        if self._place.store is None or self._place.holder is None:
            return 0
        return requests.demote(self._place.store, self._place.holder, tier)

    def promote(self, *, wait: bool = True) -> int:
        """Bring blocks back to hot, most recent first, as far as the watermark allows, and others from disk to memory.

        For a sequence that is about to be resumed: with `wait=False` the copies are made in the background, and the
        next forward waits for what is still missing.

        Returns:
            how many blocks come to hot.

        Raises:
            ChecksumError, ColdTierError: with `wait`, a block cannot be had.
        """
        self._end_forward()
        if self._place.store is None or self._place.holder is None:
            return 0
        return requests.promote(self._place.store, self._place.holder, wait=wait)

    def set_priority(self, priority: int) -> None:
        """Blocks of caches with a low priority leave hot first (default 0); matters where caches share a store."""
        self._place.priority = priority

    # ---- what a person asks

    @property
    def settings(self) -> CacheSettings:
        """The settings, with the arguments filled in."""
        return self._settings

    @property
    def mode(self) -> Mode:
        """ "blocks" when every tiered layer is attended over blocks, "gather" otherwise."""
        return "blocks" if self._ways.all_blocks and self._attachment.selected else "gather"

    @property
    def fallback_reason(self) -> str | None:
        """Why the first layer that gathers does, or None."""
        if self._tiered and (self._attachment.is_copy or (self._ways.all_blocks and not self._attachment.selected)):
            return self._attachment.why_not_selected
        return self._ways.reason

    def parts(self) -> report.Parts:
        """The cache's insides, for reports."""
        return report.Parts(
            store=self._place.store,
            holder=self._place.holder,
            settings=self._settings,
            tiered=tuple(self._tiered),
            mode=self.mode,
            fallback_reason=self.fallback_reason,
            tokens=self.get_seq_length(),
            gather_peak_bytes=self._gather_peak_bytes,
            other_layers_bytes=self._others.nbytes,
            graphs=self._place.graphs,
            native_attention=self._place.native_attention,
            position_exempt=self._positions.exempt,
        )

    def stats(self) -> CacheStats:
        """What the cache has done and holds now."""
        return report.stats(self.parts())

    def move_log(self) -> list[MoveRecord]:
        """Every move so far, with `settings=CacheSettings(log_moves=True)`; else empty."""
        store = self._place.store
        return [] if store is None else list(store.counters.log or ())

    def write_events(self, path: str | os.PathLike[str]) -> None:
        """Write every move so far as JSON lines, each a `MoveRecord`.

        Raises:
            ConfigError: moves are not logged.
            OSError: the file cannot be written.
        """
        events.write_events(self._logged(), path)

    def write_trace(self, path: str | os.PathLike[str]) -> None:
        """Write every move so far as a Chrome trace, one track for each direction (ui.perfetto.dev shows it).

        Raises:
            ConfigError: moves are not logged.
            OSError: the file cannot be written.
        """
        events.write_trace(self._logged(), path)

    def _logged(self) -> list[MoveRecord]:
        self._check_open()
        if not self._settings.log_moves:
            raise ConfigError(
                "Moves are not logged.",
                wanted="log_moves=True when the cache is made",
                got="log_moves=False",
                change="TieredCache(model, settings=CacheSettings(log_moves=True))",
            )
        return self.move_log()

    def measure_links(self) -> dict[str, float]:
        """Measure what device memory and its link give, in bytes per second, for `stats()` and `explain()`.

        Takes about a quarter of a second; empty before the first forward. See docs/guides/reading-stats.md.
        """
        self._end_forward()
        return {} if self._place.store is None else links.measure_links(self._place.store)

    def explain(self) -> list[advice.Finding]:
        """What limits this run, in plain words, each with the number that shows it and the setting to change."""
        return advice.explain(self.stats())

    def block_table(self) -> list[TableEntry]:
        """One entry for each block of each row in each layer."""
        return report.block_table(self.parts())

    def __repr__(self) -> str:
        rows = 0 if self._place.holder is None else len(self._place.holder.table)
        lossy = "" if self._settings.beyond == "demote" else ', lossy: beyond="drop"'
        tokens = self.get_seq_length()
        return f"TieredCache(layers={len(self.layers)}, rows={rows}, tokens={tokens}, mode={self.mode}{lossy})"

    @property
    def is_compileable(self) -> bool:
        """False: a forward plans on the host."""
        return False

    # ---- life and death

    def close(self) -> None:
        """Give memory and files back, and the model its attention implementation. May be called again."""
        if self._closed:
            return
        self._attachment.restore()
        self._place.leave()
        self._closed = True

    def __enter__(self) -> TieredCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None and self.leaving is not None and not self._closed:
                self.leaving(self)
        finally:
            self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> TieredCache:
        """A cache of its own over the same store: sealed blocks are shared, a tail is copied when it is written."""
        self._end_forward()
        twin = TieredCache(self._attachment.config, settings=self._settings, device=self._place.device)
        memo[id(self)] = twin
        self._attachment.fork(twin._attachment)
        twin._ways, twin._place.priority = self._ways.copy(), self._place.priority
        twin._positions = copy.deepcopy(self._positions)
        twin.watch, twin.leaving = None if self.watch is None else self.watch.fork(), self.leaving
        twin._replace_others({i: copy.deepcopy(layer, memo) for i, layer in self._others.layers.items()})
        self._place.fork(twin._place)
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        """By value: settings, the config, all K and V, and the layers that are not tiered."""
        self._end_forward()
        state = {
            "others": self._others.layers,
            "pairs": [(i, *pair) for i in self._tiered if (pair := self.gather_layer(i)) is not None],
            "positions": self._positions,
            "priority": self._place.priority,
        }
        return _rebuild, (self._attachment.config, self._settings), state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._replace_others(state["others"])
        self._place.priority = state["priority"]
        self._fill(state["pairs"])
        self._positions = state["positions"]


def _rebuild(config: Any, settings: CacheSettings) -> TieredCache:
    cache = TieredCache(config, settings=settings)
    cache._attachment.detach(presumed=settings.beyond == "drop")
    return cache
