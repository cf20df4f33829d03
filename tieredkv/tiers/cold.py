"""The cold tier of a running cache: blocks in safetensors files in a folder of its own, without fsync.

What lies here is private and goes with the cache; nothing of it is found again by another process.

Imports: errors, compiler, block, checksum, device, base, cold_files, cold_folder, cold_layout, native_reads, rows,
slots.
"""

from __future__ import annotations

import array
import os
import weakref
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial

import torch

from tieredkv.block import Plane, Planes
from tieredkv.checksum import Checksummer
from tieredkv.compiler import slower_without
from tieredkv.device import Bounce
from tieredkv.errors import BudgetError, ConfigError
from tieredkv.tiers.base import Tier, copy_blocks, slot_bytes
from tieredkv.tiers.cold_files import SpillFiles
from tieredkv.tiers.cold_folder import SpillFolder
from tieredkv.tiers.cold_layout import SpillLayout, spill_layout, spill_metadata
from tieredkv.tiers.native_reads import NativeReads
from tieredkv.tiers.rows import check_rows, pack_rows, row_addresses, row_pieces, unpack_rows
from tieredkv.tiers.slots import SlotPool

TARGET_FILE_BYTES = 8 << 20
MAX_FILE_BLOCKS = 64
MAX_OPEN_FILES = 64
AT_ONCE_BYTES = 1 << 20
"""From so many bytes on, C++ reads, with the threads of the caller."""


def blocks_per_file(block_bytes: int) -> int:
    """Blocks that share a file: about 8 MiB, at least one and at most 64."""
    return min(MAX_FILE_BLOCKS, max(1, round(TARGET_FILE_BYTES / block_bytes)))


class _Plan:
    """Which file holds which slots: all files take `per_file` blocks, the last below a cap may take fewer."""

    def __init__(self, layers: Sequence[tuple[Plane, ...]], metadata: Mapping[str, str], cap_bytes: int | None) -> None:
        self.per_file = blocks_per_file(slot_bytes(layers))
        self._layout = lru_cache(maxsize=2)(partial(spill_layout, tuple(layers), metadata=metadata))
        self.full = self.layout_of(self.per_file)
        self.capacity: int | None = None
        if cap_bytes is not None:
            files, rest = divmod(cap_bytes, self.full.file_bytes)
            # A smaller file has no longer header.
            self.capacity = files * self.per_file + max(0, rest - len(self.full.header)) // slot_bytes(layers)

    def layout_of(self, blocks: int) -> SpillLayout:
        return self._layout(blocks=blocks)

    def layout(self, number: int) -> SpillLayout:
        first = number * self.per_file
        if self.capacity is None or self.capacity - first >= self.per_file:
            return self.full
        return self.layout_of(self.capacity - first)


def cold_bytes(
    layers: Sequence[tuple[Plane, ...]], blocks: int, *, block_size: int, codec: str, fingerprint: str
) -> int:
    """The smallest `cap_bytes` that has room for `blocks` blocks: their bytes and the headers of their files."""
    plan = _Plan(layers, spill_metadata(layers, block_size=block_size, codec=codec, fingerprint=fingerprint), None)
    whole, rest = divmod(blocks, plan.per_file)
    rest_bytes = len(plan.full.header) + rest * slot_bytes(layers) if rest else 0
    return whole * plan.full.file_bytes + rest_bytes


class ColdTier(Tier):
    """Blocks on disk. Reads and writes of different slots may run in several threads at once.

    Args:
        path: a directory, made if missing; the tier works in a locked folder of its own in it, and first removes the
            folders of caches that are gone.
        layers: for each layer the planes of its blocks as stored.
        block_size: tokens of a block, for the files' headers.
        codec: name of the codec, for the files' headers.
        fingerprint: what identifies the model, for the files' headers.
        cap_bytes: the most all files together may take, headers included (see `cold_bytes`); None for no limit, then
            slots are added a file at a time.
        free_floor_bytes: bytes to leave free on the disk.
        bounce: what copies from host memory to another device go through, or None.

    Raises:
        ColdTierError: the directory cannot be used.
        ConfigError: the cap holds no block.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        layers: Sequence[tuple[Plane, ...]],
        *,
        block_size: int,
        codec: str,
        fingerprint: str,
        cap_bytes: int | None = None,
        free_floor_bytes: int = 0,
        bounce: Bounce | None = None,
    ) -> None:
        metadata = spill_metadata(layers, block_size=block_size, codec=codec, fingerprint=fingerprint)
        self._plan = plan = _Plan(layers, metadata, cap_bytes)
        if plan.capacity == 0:
            raise ConfigError(
                "The cold cap is too small for one block.",
                wanted=f"at least {cold_bytes(layers, 1, block_size=block_size, codec=codec, fingerprint=fingerprint)}",
                got=cap_bytes,
                change="raise the cap, use a smaller block_size, or leave cold out",
            )
        folder = SpillFolder(path)
        files = SpillFiles(folder.path, plan.layout, free_floor_bytes=free_floor_bytes, max_open=MAX_OPEN_FILES)
        # Refers to the tier nowhere, so that an abandoned tier is finalised at once and not by the cycle collector.
        growth = _Growth(files, plan) if plan.capacity is None else None
        super().__init__(
            "cold", layers, SlotPool(plan.capacity or 0, tier="cold", spread=False, growth=growth), cap_bytes
        )
        self._files = files
        self._up_through = None if bounce is None else partial(bounce.copy, to_device=True)
        self._native: NativeReads | None = None
        self.native_reason: str | None = None
        self.folder = folder.path
        self._finalizer = weakref.finalize(self, _shut, files, folder)

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the files on disk, headers included."""
        return self._files.disk_bytes

    def free_blocks(self) -> int:
        """Blocks that can be allocated and written now, within the cap and the disk's free-space floor.

        Raises:
            ColdTierError: the disk does not answer.
        """
        in_new_files = self._files.room_bytes() // self._plan.full.file_bytes * self._plan.per_file
        room = max(0, self._files.blocks - self.slots.used + in_new_files)
        return room if self._plan.capacity is None else min(self.slots.free, room)

    def write(self, layer: int, slots: Sequence[int], planes: Planes, *, non_blocking: bool = False) -> None:
        """See `Tier.write`; always blocking."""
        self._check(layer, len(slots), planes)
        rows = torch.empty((len(slots), self._plan.full.row_bytes[layer]), dtype=torch.uint8, device="cpu")
        pack_rows(self.layers[layer], planes, rows)
        self.write_rows(layer, slots, rows)

    def read(self, layer: int, slots: Sequence[int], out: Planes, *, non_blocking: bool = False) -> None:
        """See `Tier.read`; always blocking."""
        self._check(layer, len(slots), out)
        if not all(plane.is_cpu for plane in out):
            # Put in order on the host, so that one head of all blocks is one copy.
            host = tuple(torch.empty(plane.shape, dtype=plane.dtype, device="cpu") for plane in out)
            self.read(layer, slots, host)
            for plane, arrived in zip(out, host, strict=True):
                copy_blocks(plane, arrived, through=self._up_through)
            return
        if (native := self._native_for(layer, len(slots))) and (addresses := row_addresses(out)) is not None:
            self._read_at_once(native, layer, slots, addresses, None)
            return
        pieces = row_pieces(out) if slots else None
        if pieces is None:
            unpack_rows(self.layers[layer], self.read_rows(layer, slots), out)
            return
        for index, start, length in self.runs(slots):
            number, offset = self._place(layer, start)
            self._files.read(number, offset, [piece for row in pieces[index : index + length] for piece in row])

    def read_summed(self, layer: int, slots: Sequence[int], out: Planes, checksummer: Checksummer) -> list[int] | None:
        """See `Tier.read_summed`."""
        native = self._native_for(layer, len(slots))
        if native is None or not checksummer.is_native:
            return None
        self._check(layer, len(slots), out)
        if (addresses := row_addresses(out)) is None:
            return None
        return self._read_at_once(native, layer, slots, addresses, checksummer)

    def _native_for(self, layer: int, count: int) -> NativeReads | None:
        """What reads so many blocks, if it is worth it; it is compiled when that is first so."""
        self._check_layer(layer)
        if count * self._plan.full.row_bytes[layer] < AT_ONCE_BYTES:
            return None
        if self._native is None and self.native_reason is None:
            try:
                self._native = NativeReads()
            except OSError as error:
                self.native_reason = slower_without("reads of files", error)
        return self._native

    def _read_at_once(
        self,
        native: NativeReads,
        layer: int,
        slots: Sequence[int],
        addresses: Sequence[array.array[int]],
        checksummer: Checksummer | None,
    ) -> list[int]:
        """Fill the pieces of each slot's row; their checksums, where they are wanted."""
        wanted, sums = [], list[int]()
        for index, start, length in self.runs(slots):
            pieces = array.array("Q")
            for each in addresses[index : index + length]:
                pieces += each
            wanted.append((*self._place(layer, start), pieces))
        block_pieces = len(addresses[0]) // 2
        summing = None if checksummer is None else (checksummer, self._plan.full.row_bytes[layer])
        for first in range(0, len(wanted), MAX_OPEN_FILES):  # all files of a call are open in it
            sums += self._files.read_at_once(native, wanted[first : first + MAX_OPEN_FILES], block_pieces, summing)
        return sums

    def write_rows(self, layer: int, slots: Sequence[int], rows: torch.Tensor) -> None:
        """Write n blocks as they lie on disk.

        Args:
            layer: layer index.
            slots: n distinct slots.
            rows: uint8 `[n, row_bytes]` on the CPU, contiguous (see tiers.rows).

        Raises:
            MismatchError, ColdTierError, ClosedError: as for `write`.
        """
        row_bytes = self._check_rows(layer, len(slots), rows)
        data = rows.numpy().reshape(-1).data
        for index, start, length in self.runs(slots):
            number, offset = self._place(layer, start)
            self._files.write(number, offset, data[index * row_bytes : (index + length) * row_bytes])

    def read_rows(self, layer: int, slots: Sequence[int], out: torch.Tensor | None = None) -> torch.Tensor:
        """Read n blocks as they lie on disk.

        Args:
            layer: layer index.
            slots: n slots.
            out: where to put them, uint8 `[n, row_bytes]` on the CPU, contiguous; a new tensor if None.

        Returns:
            The rows, uint8 `[n, row_bytes]`; `out` is undefined after an error.

        Raises:
            MismatchError, ColdTierError, ClosedError: as for `read`.
        """
        if out is None:
            self._check_layer(layer)
            out = torch.empty((len(slots), self._plan.full.row_bytes[layer]), dtype=torch.uint8, device="cpu")
        row_bytes = self._check_rows(layer, len(slots), out)
        data = out.numpy().reshape(-1).data
        for index, start, length in self.runs(slots):
            number, offset = self._place(layer, start)
            self._files.read(number, offset, [data[index * row_bytes : (index + length) * row_bytes]])
        return out

    def close(self) -> None:
        """Remove the tier's folder and release its lock."""
        super().close()
        self._finalizer()

    def _place(self, layer: int, slot: int) -> tuple[int, int]:
        """(file number, position in it) of a slot's row in a layer."""
        number, at = divmod(slot, self._plan.per_file)
        return number, self._plan.layout(number).offset(layer, at)

    def _border(self, slot: int) -> int:
        return (slot // self._plan.per_file + 1) * self._plan.per_file

    def _check_rows(self, layer: int, count: int, rows: torch.Tensor) -> int:
        self._check_layer(layer)
        row_bytes = self._plan.full.row_bytes[layer]
        check_rows(rows, (count, row_bytes), layer)
        return row_bytes


class _Growth:
    """Adds slots to an uncapped pool, a file at a time, while the disk has room for all that was added before."""

    def __init__(self, files: SpillFiles, plan: _Plan) -> None:
        self._files, self._plan, self._slots = files, plan, 0

    def __call__(self) -> int:
        unmade = (self._slots - self._files.blocks) // self._plan.per_file
        room_bytes = self._files.room_bytes() - unmade * self._plan.full.file_bytes
        if room_bytes < self._plan.full.file_bytes:
            raise BudgetError(
                "The cold tier's disk is full up to its free-space floor.",
                wanted=f"{self._plan.full.file_bytes} bytes for one more file",
                got=f"{max(0, room_bytes)} bytes",
                change="free space on that disk, lower the floor, or put the cold directory elsewhere",
                tier="cold",
            )
        self._slots += self._plan.per_file
        return self._plan.per_file


def _shut(files: SpillFiles, folder: SpillFolder) -> None:
    files.close()
    folder.remove()
