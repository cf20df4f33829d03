"""The checksum's weighted sum in C++, for data that a CPU can address: one pass, at memory speed, also while copying.

Imports: compiler.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from tieredkv.compiler import Compiler

WEIGHTED_SUM = r"""
#include <cstdint>

// Of n words, mod 2^64: see `checksum`.
static inline uint64_t weighted_sum(const uint64_t* x, const uint64_t* w, int64_t n) {
  uint64_t total = 0;
  for (int64_t i = 0; i < n; i++) {
    const uint64_t t = x[i] * w[i];
    total += (t ^ (t >> SHIFT)) * w[i];
  }
  return total;
}
"""
"""C++ for whatever sums what it has just brought into a cache."""

SOURCE = (
    WEIGHTED_SUM
    + r"""
#include <cstring>

// words [heads][blocks][head_words] with strides in words, weights [heads][head_words]; adds to sums [blocks]. The
// words are copied from another place first, unless that is null, and summed where they arrived.
extern "C" void tieredkv_checksum(uint64_t* words, int64_t head_stride, int64_t block_stride, const uint64_t* from,
                                  int64_t from_head_stride, int64_t from_block_stride, const uint64_t* weights,
                                  uint64_t* sums, int64_t heads, int64_t blocks, int64_t head_words, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t b = 0; b < blocks; b++) {
    uint64_t total = 0;
    for (int64_t h = 0; h < heads; h++) {
      uint64_t* const x = words + h * head_stride + b * block_stride;
      if (from) memcpy(x, from + h * from_head_stride + b * from_block_stride, head_words * sizeof *x);
      total += weighted_sum(x, weights + h * head_words, head_words);
    }
    sums[b] += total;
  }
}
"""
)

_PLACE: Any = [ctypes.c_void_p, *[ctypes.c_int64] * 2]
_ARGUMENTS: Any = [*_PLACE, *_PLACE, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 4]

LEAST_WORDS = 2**15
"""Words that are worth another thread."""


class NativeSum:
    """The compiled sum. Calls hold no interpreter lock and use as many threads as torch does on the calling one.

    Args:
        shift: of the formula.
        compiler: compiles it; by default the machine's.

    Raises:
        OSError: there is no C++ compiler, or it fails.
    """

    def __init__(self, shift: int, compiler: Compiler | None = None) -> None:
        library = (compiler or Compiler()).load("checksum", SOURCE, {"SHIFT": shift})
        self._sum = library.tieredkv_checksum
        self._sum.argtypes, self._sum.restype = _ARGUMENTS, None

    def add(
        self,
        sums: torch.Tensor,
        words: torch.Tensor,
        weights: torch.Tensor,
        first: int,
        copied_from: torch.Tensor | None = None,
    ) -> None:
        """Add each block's weighted sum to `sums`, int64 `[n]`; everything on a CPU.

        Args:
            sums: written.
            words: int64 `[heads, n, head_words]`, of any strides but the last, which is contiguous.
            weights: int64, contiguous.
            first: which weight the first word has; those of the other words follow, head by head.
            copied_from: like `words`, which are written from it before they are summed; it lies elsewhere.
        """
        heads, blocks, head_words = words.shape
        threads = max(1, min(torch.get_num_threads(), words.numel() // LEAST_WORDS))
        self._sum(
            *_place(words),
            *((None, 0, 0) if copied_from is None else _place(copied_from)),
            *(weights.data_ptr() + 8 * first, sums.data_ptr()),
            *(heads, blocks, head_words, threads),
        )


def _place(words: torch.Tensor) -> tuple[int, int, int]:
    return words.data_ptr(), words.stride(0), words.stride(1)
