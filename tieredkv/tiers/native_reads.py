"""Reads many stretches of files at once, by C++ with the threads that compute, and sums them while they are in a cache.

A second thread of Python was tried for it: OpenMP's threads, which stay awake after each parallel region, take half of
its core, and with the interpreter's lock between many short reads nothing was won.

Imports: checksum, checksum_native, compiler, files.
"""

from __future__ import annotations

import array
import ctypes
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tieredkv.checksum import SHIFT, Checksummer
from tieredkv.checksum_native import WEIGHTED_SUM
from tieredkv.compiler import Compiler
from tieredkv.files import MOST_PIECES

SOURCE = (
    WEIGHTED_SUM
    + r"""
#include <cerrno>
#include <sys/uio.h>

// Fill pieces from a file. A piece that is filled in part is made smaller for the next call, and itself again later.
static int64_t fill(int file, int64_t offset, iovec* piece, int64_t left) {
  iovec whole = *piece;
  while (left) {
    ssize_t count = preadv(file, piece, (int)(left < MOST_PIECES ? left : MOST_PIECES), (off_t)offset);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return count < 0 ? errno : END;
    offset += count;
    while (left && count >= (ssize_t)piece->iov_len) {
      count -= (ssize_t)piece->iov_len;
      *piece++ = whole;
      if (--left) whole = *piece;
    }
    if (left) {
      piece->iov_base = (char*)piece->iov_base + count;
      piece->iov_len -= (size_t)count;
    }
  }
  return 0;
}

// stretches [n][4]: file, offset, first piece, pieces. pieces: address and bytes of each, of whole blocks of
// `block_pieces` each. outcomes [n]: 0, or what the system said, or END where the file ends too early. sums: of each
// block, in the order of the pieces; none where weights is null.
extern "C" void tieredkv_read(const int64_t* stretches, int64_t n, iovec* pieces, int64_t block_pieces,
                              int64_t* outcomes, const uint64_t* weights, uint64_t* sums, int64_t threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (int64_t i = 0; i < n; i++) {
    const int64_t *stretch = stretches + 4 * i, first = stretch[2], end = first + stretch[3];
    outcomes[i] = fill((int)stretch[0], stretch[1], pieces + first, stretch[3]);
    for (int64_t p = first; weights && !outcomes[i] && p < end; p += block_pieces) {
      const uint64_t* w = weights;
      uint64_t total = 0;
      for (int64_t k = p; k < p + block_pieces; k++) {
        const int64_t words = (int64_t)pieces[k].iov_len / 8;
        total += weighted_sum((const uint64_t*)pieces[k].iov_base, w, words);
        w += words;
      }
      sums[p / block_pieces] += total;
    }
  }
}
"""
)

END = -1

_ARGUMENTS: Any = [
    *(ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64),
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64),
]


class Stretch(NamedTuple):
    """What is read from one place of a file.

    Args:
        descriptor: of the open file.
        offset: where in it.
        pieces: address and bytes of each piece of memory to fill, one after the other: whole blocks, with as many
            pieces each.
    """

    descriptor: int
    offset: int
    pieces: array.array[int]


class NativeReads:
    """The compiled loop. Calls hold no interpreter lock.

    Args:
        compiler: compiles it; by default the machine's.

    Raises:
        OSError: there is no C++ compiler, or it fails.
    """

    def __init__(self, compiler: Compiler | None = None) -> None:
        macros = {"MOST_PIECES": MOST_PIECES, "END": END, "SHIFT": SHIFT}
        self._read = (compiler or Compiler()).load("read", SOURCE, macros).tieredkv_read
        self._read.argtypes, self._read.restype = _ARGUMENTS, None

    def read(
        self, stretches: Sequence[Stretch], block_pieces: int = 1, summing: tuple[Checksummer, int] | None = None
    ) -> tuple[list[int], list[int] | None]:
        """Fill all pieces.

        Args:
            stretches: what to read; the memory must be writable, and live as long as the call.
            block_pieces: pieces of one block.
            summing: the store's checksums and the bytes of a block, whose pieces are whole and aligned words, to have
                the checksums of what was read.

        Returns:
            For each stretch 0, an error number of the system, or `END`: the file was too short. And the checksum of
            each block in the order of the pieces, valid where its stretch was read; None where none were wanted.
        """
        table, pieces = array.array("q"), array.array("Q")
        for stretch in stretches:
            table.extend((stretch.descriptor, stretch.offset, len(pieces) // 2, len(stretch.pieces) // 2))
            pieces += stretch.pieces
        outcomes, weights, sums = array.array("q", bytes(8 * len(stretches))), None, array.array("q")
        if summing is not None:
            weights, start = summing[0].parts(summing[1])
            sums = array.array("q", [start]) * (len(pieces) // 2 // block_pieces)
        self._read(
            *(table.buffer_info()[0], len(stretches), pieces.buffer_info()[0], block_pieces),
            *(outcomes.buffer_info()[0], None if weights is None else weights.data_ptr(), sums.buffer_info()[0]),
            torch.get_num_threads(),
        )
        return outcomes.tolist(), None if summing is None else sums.tolist()


def reason(outcome: int) -> OSError:
    """What a stretch's outcome that is not 0 means."""
    if outcome == END:
        return OSError("the file ends before the block does")
    return OSError(outcome, os.strerror(outcome))
