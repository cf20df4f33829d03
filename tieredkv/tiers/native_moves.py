"""Copies whole blocks between two tiers in the memory of a CPU: all layers in one call, summed on both sides.

Layer by layer a block of 30 layers costs the host 0.2 ms beside its copies, under the interpreter's lock, which the
thread that computes wants at the same time (docs/decisions/0004-written-down-early.md).

Imports: checksum, checksum_native, compiler, tiers.base, tiers.pool.
"""

from __future__ import annotations

import array
import ctypes
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from tieredkv.checksum import SHIFT, Checksummer
from tieredkv.checksum_native import WEIGHTED_SUM
from tieredkv.compiler import Compiler, slower_without
from tieredkv.tiers.base import Tier
from tieredkv.tiers.pool import PoolTier

SOURCE = (
    WEIGHTED_SUM
    + r"""
#include <cstring>

// planes [n][4]: layer, heads, bytes of one head of a block, number of its first weight. source, target [n][3]:
// address, and bytes from a head and from a slot to the next. from, to [blocks]: slots. sums [2][layers][blocks], added
// to: of what was read, and of what lies there afterwards; none where weights is null.
extern "C" void tieredkv_move(const int64_t* planes, const int64_t* source, const int64_t* target, int64_t n,
                              const int64_t* from, const int64_t* to, int64_t blocks, int64_t layers,
                              const uint64_t* weights, uint64_t* sums) {
  for (int64_t p = 0; p < n; p++) {
    const int64_t *plane = planes + 4 * p, *in = source + 3 * p, *out = target + 3 * p;
    for (int64_t b = 0; b < blocks; b++) {
      uint64_t* const sum = sums + plane[0] * blocks + b;
      for (int64_t h = 0; h < plane[1]; h++) {
        const char* const x = (const char*)in[0] + h * in[1] + from[b] * in[2];
        char* const y = (char*)out[0] + h * out[1] + to[b] * out[2];
        const int64_t words = plane[2] / 8;
        const uint64_t* const w = weights + plane[3] + h * words;
        if (weights) sum[0] += weighted_sum((const uint64_t*)x, w, words);
        memcpy(y, x, plane[2]);
        if (weights) sum[layers * blocks] += weighted_sum((const uint64_t*)y, w, words);
      }
    }
  }
}
"""
)

_ARGUMENTS: Any = [
    *[ctypes.c_void_p] * 3,
    ctypes.c_int64,
    *[ctypes.c_void_p] * 2,
    *[ctypes.c_int64] * 2,
    *[ctypes.c_void_p] * 2,
]


class Sums(NamedTuple):
    """Checksums of blocks that were copied, layer after layer, and in each layer block after block.

    Args:
        read: of the bytes as they were read.
        lying: of the bytes as they lie in the target.
    """

    read: array.array[int]
    lying: array.array[int]


class NativeMoves:
    """The compiled copy, made when it is first wanted. Calls hold no interpreter lock.

    Args:
        checksummer: of the store; what it sums with is summed with here.
        compiler: compiles it; by default the machine's.

    Attributes:
        native_reason: why there is none on this machine, or None.
    """

    def __init__(self, checksummer: Checksummer, compiler: Compiler | None = None) -> None:
        self._checksummer, self._compiler = checksummer, compiler
        self._lock = threading.Lock()
        self._move: Any = None
        self.native_reason: str | None = None
        self._seeds: dict[int, int] = {}

    def move(
        self, source: Tier, source_slots: Sequence[int], target: Tier, slots: Sequence[int], *, summed: bool
    ) -> Sums | None:
        """Copy blocks, all layers.

        Args:
            source, target: two tiers, which hold blocks in the same form.
            source_slots, slots: for each block where it is, and where it goes.
            summed: whether to sum.

        Returns:
            The checksums, empty where none are wanted; None, and nothing was copied, where one of the two is not
            memory that a CPU addresses as a whole, or there is no compiler.

        Raises:
            MismatchError: a slot is outside its tier.
            ClosedError: a tier is closed.
        """
        if not (isinstance(source, PoolTier) and isinstance(target, PoolTier)):
            return None
        places, goals = source.addresses(), target.addresses()
        if places is None or goals is None or (move := self._compiled()) is None:
            return None
        for tier, its in ((source, source_slots), (target, slots)):
            if min(its) < 0 or max(its) >= tier.slots.total:
                tier.runs(its)  # refuses them
        row_bytes = target.row_bytes
        weights, sums = None, array.array("q")
        if summed:
            weights = self._checksummer.parts(max(row_bytes))[0].data_ptr()
            sums = array.array("q", [seed for row in row_bytes for seed in [self._seed(row)] * len(slots)]) * 2
        origins, ends = array.array("q", source_slots), array.array("q", slots)
        move(
            *(_at(target.shapes), _at(places), _at(goals), len(places) // 3),
            *(_at(origins), _at(ends), len(slots), len(row_bytes), weights, _at(sums)),
        )
        half = len(sums) // 2
        return Sums(sums[:half], sums[half:])

    def _seed(self, row_bytes: int) -> int:
        if row_bytes not in self._seeds:
            self._seeds[row_bytes] = self._checksummer.parts(row_bytes)[1]
        return self._seeds[row_bytes]

    def _compiled(self) -> Any:
        if self._move is None and self.native_reason is None:
            with self._lock:
                try:
                    self._move = self._move or (self._compiler or Compiler()).load("move", SOURCE, {"SHIFT": SHIFT})
                except OSError as error:
                    self.native_reason = slower_without("copies down in memory", error)
                    return None
                self._move.tieredkv_move.argtypes, self._move.tieredkv_move.restype = _ARGUMENTS, None
        return None if self._move is None else self._move.tieredkv_move


def _at(numbers: array.array[int]) -> int:
    return numbers.buffer_info()[0]
