"""Turns settings into bytes and slots, and opens the tiers and staging buffers of a store.

Imports: errors, config, block, codecs, device, tiers, placement, transfer, prefetcher.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
from collections.abc import Sequence
from typing import Literal

import torch

from tieredkv.block import LayerGeometry
from tieredkv.codecs import Codec, get_codec
from tieredkv.config import STAGING_ASIDE, STAGING_ON_CPU, STAGING_ON_GPU, CacheSettings, Size, StagingRule
from tieredkv.device import LEDGER, Device
from tieredkv.errors import BudgetError
from tieredkv.placement import fitting_window, window_blocks
from tieredkv.prefetcher import Staging, staging_bytes
from tieredkv.tiers import ColdTier, HotTier, WarmTier, cold_bytes
from tieredkv.transfer import Mover

HOT_SHARE = 0.5
WARM_SHARE = 0.25
PACKED_WINDOW_SHARE = 4
"""With `hot_codec` and no window, exact blocks take one part in so many of the room for blocks on the device."""
SPARE_BLOCKS = 2
"""With `hot_codec`, slots of each row beside its window: the block being filled, and one that waits to be encoded."""


@dataclasses.dataclass(frozen=True)
class Budget:
    """Sizes of one store, in bytes and slots.

    Args:
        hot_bytes: most device bytes, staging included.
        hot_slots: blocks that fit beside the staging buffers.
        staging_bytes: bytes of all staging buffers together.
        chunk_blocks: blocks of one staging buffer; 0 when there is no lower tier.
        warm_bytes: most host bytes.
        warm_slots: blocks, as encoded, that fit.
        cold_bytes: most disk bytes, or None.
        window_tokens: most recent tokens of each row that stay hot.
        rows: batch rows the sizes were made for.
        packed_bytes: of `hot_bytes`, what blocks that are encoded on the device may take.
        packed_slots: blocks, as encoded, that fit in that.
    """

    hot_bytes: int
    hot_slots: int
    staging_bytes: int
    chunk_blocks: int
    warm_bytes: int
    warm_slots: int
    cold_bytes: int | None
    window_tokens: int
    rows: int
    packed_bytes: int = 0
    packed_slots: int = 0

    @classmethod
    def resolve(
        cls, settings: CacheSettings, layers: Sequence[LayerGeometry], codec: Codec, device: Device, rows: int
    ) -> Budget:
        """Bytes and slots for the first forward's rows.

        Raises:
            BudgetError: hot cannot hold one block for each row beside the staging buffers, or the window that was
                asked for does not fit.
        """
        size = settings.block_size
        token_bytes = sum(layer.token_bytes for layer in layers)
        row_bytes = [codec.block_bytes(layer, size) for layer in layers]
        hot_free_bytes = min(device.free_bytes(), device.total_bytes() - LEDGER.promised_bytes(_memory(device)))
        warm_free_bytes = min(device.host_free_bytes(), device.host_total_bytes() - LEDGER.promised_bytes("cpu"))
        hot_bytes = _size(settings.hot, token_bytes, rows, int(HOT_SHARE * hot_free_bytes))
        warm_bytes = _size(settings.warm, token_bytes, rows, int(WARM_SHARE * warm_free_bytes))
        warm_slots = warm_bytes // sum(row_bytes)
        has_lower = warm_slots > 0 or settings.cold_settings is not None or settings.hot_codec is not None
        rule = staging_rule(device)
        each = staging_bytes(layers, row_bytes, 1, size, codec.lossless) * rule.buffers
        chunk_blocks = 0
        if has_lower:
            largest_bytes = max(layer.token_bytes for layer in layers)
            most = rule.chunk_tokens(settings, largest_bytes) // size
            chunk_blocks = max(min(hot_bytes // rule.one_in // each, most), 1)
        slots = max(hot_bytes - each * chunk_blocks, 0) // (token_bytes * size)
        if slots < max(rows, 1):
            raise BudgetError(
                "The hot tier cannot hold one block for each batch row beside its staging buffers.",
                wanted=f"at least {max(rows, 1) * token_bytes * size + each * chunk_blocks} bytes for {rows} rows",
                got=f"hot={hot_bytes} bytes",
                change="enlarge hot=, or take a smaller block_size=",
                tier="hot",
            )
        cold = settings.cold_settings
        cap = cold.cap_size if cold is not None else None
        cold_cap_bytes = None if cap is None else _cap_bytes(cap, settings, layers, codec, rows)
        slots, packed_slots = _packed_split(settings, slots, rows, token_bytes * size, sum(row_bytes))
        return cls(
            hot_bytes=hot_bytes,
            hot_slots=slots,
            staging_bytes=each * chunk_blocks,
            chunk_blocks=chunk_blocks,
            warm_bytes=warm_bytes,
            warm_slots=warm_slots,
            cold_bytes=cold_cap_bytes,
            window_tokens=_window(settings, slots, rows),
            rows=rows,
            packed_bytes=packed_slots * sum(row_bytes),
            packed_slots=packed_slots,
        )

    def promise_to(self, store: object, device: Device) -> None:
        """Enter the budget in the process's ledger.

        Raises:
            BudgetError: all open caches together would take more than the device or the host has.
        """
        try:
            LEDGER.promise(store, _memory(device), self.hot_bytes, device.total_bytes(), "hot")
            LEDGER.promise(store, "cpu", self.warm_bytes, device.host_total_bytes(), "warm")
        except BudgetError:
            LEDGER.release(store)
            raise


def staging_rule(device: Device) -> StagingRule:
    """How staging buffers are made for a device."""
    if device.kind == "cuda":
        return STAGING_ON_GPU
    return STAGING_ASIDE if device.copies_aside else STAGING_ON_CPU


def _memory(device: Device) -> str:
    """The device's memory in the ledger; each simulated accelerator has its own."""
    return f"simulated {id(device)}" if device.kind == "simulated" else str(device.torch_device)


def _size(size: Size | int | str | None, token_bytes: int, rows: int, default: int) -> int:
    return default if size is None else Size.parse(size).resolve(token_bytes, rows)


def _cap_bytes(cap: Size, settings: CacheSettings, layers: Sequence[LayerGeometry], codec: Codec, rows: int) -> int:
    """The cap in bytes; one given in tokens makes room for the files' headers too."""
    if cap.bytes_ is not None:
        return cap.bytes_
    size = settings.block_size
    blocks = -(-(cap.tokens_per_row or 0) // size) * max(rows, 1)
    planes = [codec.planes(layer, size) for layer in layers]
    return cold_bytes(planes, blocks, block_size=size, codec=codec.name, fingerprint="0" * 32)


def _packed_split(
    settings: CacheSettings, slots: int, rows: int, block_bytes: int, encoded_bytes: int
) -> tuple[int, int]:
    """(hot slots, packed slots) in the room of so many hot ones: hot is for the window, and for blocks on their way.

    Without a window it is a quarter of the room.

    Raises:
        BudgetError: no encoded block fits beside those.
    """
    if settings.hot_codec is None:
        return slots, 0
    if settings.window is None:
        each = -(-slots // PACKED_WINDOW_SHARE // max(rows, 1))
    else:
        each = window_blocks(settings.window, settings.block_size)
    hot = max(rows, 1) * (settings.sink_blocks + each + SPARE_BLOCKS)
    packed = (slots - hot) * block_bytes // encoded_bytes
    if packed < 1:
        raise BudgetError(
            "The hot tier has no room for encoded blocks beside those of the window.",
            wanted=f"more than {hot} hot slots for window={settings.window}, sinks={settings.sinks}, {rows} rows, of"
            f" {block_bytes} bytes each",
            got=f"{slots} slots beside the staging buffers",
            change="enlarge hot=, a smaller window= or sinks=, fewer rows, or no hot_codec=",
            tier="hot",
        )
    return hot, packed


def _window(settings: CacheSettings, slots: int, rows: int) -> int:
    """Most recent tokens that stay hot; 0 where the watermark alone decides."""
    sinks = settings.sink_blocks
    if settings.window is None:
        needed, window = sinks + 1, 0
        if settings.placement != "watermark":
            window = fitting_window(slots, rows, settings.block_size, sinks)
    else:
        needed, window = sinks + window_blocks(settings.window, settings.block_size), settings.window
        needed += settings.beyond == "drop"  # see Visibility.droppable
    if needed * max(rows, 1) > slots:
        raise BudgetError(
            "The window and sinks that were asked for are larger than the hot tier.",
            wanted=f"{needed * max(rows, 1)} hot slots for window={settings.window}, sinks={settings.sinks},"
            f" {rows} rows",
            got=f"{slots} slots beside the staging buffers",
            change="enlarge hot=, a smaller window= or sinks=, or fewer rows",
            tier="hot",
        )
    return window


def open_tiers(
    budget: Budget,
    settings: CacheSettings,
    layers: Sequence[LayerGeometry],
    codec: Codec,
    device: Device,
    fingerprint: str,
) -> tuple[HotTier, HotTier | None, WarmTier | None, ColdTier | None]:
    """The tiers: hot, packed, warm, cold; those that were not asked for are None.

    Raises:
        ColdTierError: the cold folder cannot be used.
    """
    size = settings.block_size
    raw = get_codec("raw")
    hot_planes = [raw.planes(layer, size) for layer in layers]
    planes = [codec.planes(layer, size) for layer in layers]

    def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        # Zeros, since a kernel may multiply what lies behind a block's last token by 0, and 0 times NaN is NaN.
        return _zeros(shape, dtype, device.torch_device)

    cold_settings = settings.cold_settings
    cold = None
    if cold_settings is not None:
        cold = ColdTier(
            cold_settings.path,
            planes,
            block_size=size,
            codec=codec.name,
            fingerprint=fingerprint,
            cap_bytes=budget.cold_bytes,
            free_floor_bytes=cold_settings.free_floor_bytes,
            bounce=device.bounce,
        )
    warm = None
    if budget.warm_slots:
        pieces: Literal["one", "growing"] = "growing" if device.kind == "cuda" else "one"
        warm = WarmTier(planes, budget.warm_slots, device.host_empty, pieces=pieces, bounce=device.bounce)
    packed = HotTier(planes, budget.packed_slots, empty, role="packed") if budget.packed_slots else None
    return HotTier(hot_planes, budget.hot_slots, empty), packed, warm, cold


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that take memory as they are touched: torch.zeros writes all of it, tens of seconds for half a machine."""
    nbytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not nbytes or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def staging_ring(
    budget: Budget,
    settings: CacheSettings,
    layers: Sequence[LayerGeometry],
    mover: Mover,
    codec: Codec,
    device: Device,
) -> list[Staging]:
    """The staging buffers; none when there is no lower tier."""
    if not budget.chunk_blocks:
        return []
    return [
        Staging(layers, mover, budget.chunk_blocks, settings.block_size, codec.lossless, device.empty)
        for _ in range(staging_rule(device).buffers)
    ]
