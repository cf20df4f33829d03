"""The result of planning, as frozen records: rates, tiers, the table of contexts, the plan; and how sizes are printed.

Imports: errors only.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch

from tieredkv.errors import ConfigError

Verdict = Literal["hot", "warm", "cold", "too large"]
"""The lowest tier that a request needs."""


@dataclasses.dataclass(frozen=True)
class Rates:
    """How fast bytes move, in bytes per second.

    Args:
        pcie_bytes_per_second: host to device; PCIe 4 x16 gives 20 to 25 GB/s in practice.
        nvme_bytes_per_second: disk to host.
        device_bytes_per_second: the device's own memory; the default is that of a large consumer card.

    Raises:
        ConfigError: a rate that is not positive.
    """

    pcie_bytes_per_second: float = 25e9
    nvme_bytes_per_second: float = 5e9
    device_bytes_per_second: float = 1000e9

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if not value > 0:
                raise ConfigError(f"{name} is not a speed.", wanted="more than 0", got=value, change=f"correct {name}")


@dataclasses.dataclass(frozen=True)
class Encoding:
    """How blocks are stored.

    Args:
        dtype: dtype of K and V in hot.
        codec: what warm and cold store.
        block_size: tokens of a block.
    """

    dtype: torch.dtype
    codec: str
    block_size: int


@dataclasses.dataclass(frozen=True)
class Budgets:
    """What each tier may hold, in bytes; hot is negative where the model alone exceeds the device."""

    hot_bytes: int
    warm_bytes: int
    cold_bytes: int


@dataclasses.dataclass(frozen=True)
class DeviceUse:
    """What a device holds besides keys and values, in bytes.

    Args:
        device_bytes: all of it.
        parameters: weights of the model, tied ones once.
        counted: how they were counted.
        weights_bytes: the weights.
        activations_bytes: the largest transient of a forward.
        reserve_bytes: kept for the device's context, compiled kernels and fragmentation.
        prefill_chunk_tokens: tokens of each row in one forward, which the activations are counted for.
    """

    device_bytes: int
    parameters: int
    counted: str
    weights_bytes: int
    activations_bytes: int
    reserve_bytes: int
    prefill_chunk_tokens: int

    @property
    def left_bytes(self) -> int:
        """What is left for keys and values; negative where the model does not fit."""
        return self.device_bytes - self.weights_bytes - self.activations_bytes - self.reserve_bytes


@dataclasses.dataclass(frozen=True)
class TierShare:
    """What one tier holds of a request.

    Args:
        name: "hot", "warm" or "cold".
        codec: how its blocks are stored.
        budget_bytes: what the tier may hold.
        used_bytes: what it holds of this request, staging apart.
        used_blocks: blocks of this request that are here and in no faster tier.
        block_bytes: one block as stored here, over all layers that keep every token.
        capacity_tokens: tokens that would fill the budget, all rows together, beside the layers with a window.
    """

    name: str
    codec: str
    budget_bytes: int
    used_bytes: int
    used_blocks: int
    block_bytes: int
    capacity_tokens: int


@dataclasses.dataclass(frozen=True)
class Spread:
    """How the blocks of one request lie over the tiers.

    Args:
        tiers: hot, warm, cold.
        total_bytes: unencoded, whole blocks, sliding layers by their window.
        staging_bytes: the part of hot kept for blocks that are being read; 0 when all is hot.
        shortfall_bytes: what there is no room for, as the tier to enlarge would store it.
        shortfall_tier: the tier to enlarge, None when all fits.
        verdict: the lowest tier that is needed.
    """

    tiers: tuple[TierShare, TierShare, TierShare]
    total_bytes: int
    staging_bytes: int
    shortfall_bytes: int
    shortfall_tier: str | None
    verdict: Verdict


@dataclasses.dataclass(frozen=True)
class TableCell:
    """One context at one concurrency: its unencoded bytes, and the lowest tier it needs."""

    context_tokens: int
    batch: int
    kv_bytes: int
    verdict: Verdict


@dataclasses.dataclass(frozen=True)
class StepCost:
    """What a decode step costs; it yields one token for each row.

    Args:
        streamed_bytes: what crosses to the device.
        pcie_seconds: time of that on the bus.
        nvme_seconds: time of the cold part on the disk.
        transfer_seconds: bus and disk work side by side, so the slower of the two.
        compute_seconds: weights, keys and values read once from device memory.
        seconds: transfer runs beside compute, so the larger of the two.
    """

    streamed_bytes: int
    pcie_seconds: float
    nvme_seconds: float
    transfer_seconds: float
    compute_seconds: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """What `plan` found.

    Args:
        context_tokens, batch, dtype, codec, block_size: what was asked.
        layers: what the layers store, a line for each kind.
        kv_bytes_per_token: unencoded, all layers.
        kv_bytes_per_token_by_codec: the same below hot, for each codec, scales included.
        cross_kv_bytes_per_source_token: what cross-attention adds, apart from all totals; 0 for decoder-only models.
        device: what the device holds besides keys and values.
        spread: how the request lies over the tiers.
        rates: how fast bytes move.
        cost: what a decode step costs.
        table: contexts by concurrency, over the same tiers.
        suggestion: code that makes the cache.
        warnings: what the user should know before running it.
        how: how everything was counted, a line each.
    """

    context_tokens: int
    batch: int
    dtype: str
    codec: str
    block_size: int
    layers: tuple[str, ...]
    kv_bytes_per_token: int
    kv_bytes_per_token_by_codec: dict[str, int]
    cross_kv_bytes_per_source_token: int
    device: DeviceUse
    spread: Spread
    rates: Rates
    cost: StepCost
    table: tuple[TableCell, ...]
    suggestion: str
    warnings: tuple[str, ...]
    how: tuple[str, ...]

    @property
    def hot_budget_bytes(self) -> int:
        """What weights, activations and reserve leave on the device for keys and values."""
        return self.spread.tiers[0].budget_bytes

    @property
    def fits(self) -> bool:
        """Whether the three tiers together hold the request."""
        return self.spread.shortfall_tier is None


def format_bytes(count: int) -> str:
    """A size for people: "512 KiB", "10.1 GiB"."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if size == int(size) else f"{size:.1f} {unit}"


def format_seconds(seconds: float) -> str:
    """A time for people: "40.0 ms", "1.25 s"."""
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
