"""Reads many stretches of files at once, by C++ with the threads that compute.

A second thread of Python was tried for it: OpenMP's threads, which stay awake after each parallel region, take half of
its core, and with the interpreter's lock between many short reads nothing was won.

Imports: compiler.
"""

from __future__ import annotations

import array
import ctypes
import os
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from tieredkv.compiler import Compiler

SOURCE = r"""
#include <cerrno>
#include <cstdint>
#include <sys/uio.h>

// stretches [n][4]: file, offset, first piece, pieces. pieces: address and bytes of each, overwritten. outcomes [n]: 0,
// or what the system said, or END where the file ends too early.
extern "C" void tieredkv_read(const int64_t* stretches, int64_t n, iovec* pieces, int64_t* outcomes, int64_t threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (int64_t i = 0; i < n; i++) {
    const int64_t file = stretches[4 * i];
    int64_t offset = stretches[4 * i + 1], left = stretches[4 * i + 3];
    iovec* piece = pieces + stretches[4 * i + 2];
    outcomes[i] = 0;
    while (left) {
      ssize_t count = preadv((int)file, piece, (int)(left < MOST_PIECES ? left : MOST_PIECES), (off_t)offset);
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) {
        outcomes[i] = count < 0 ? errno : END;
        break;
      }
      offset += count;
      for (; left && count >= (ssize_t)piece->iov_len; piece++, left--) count -= (ssize_t)piece->iov_len;
      if (left) {
        piece->iov_base = (char*)piece->iov_base + count;
        piece->iov_len -= (size_t)count;
      }
    }
  }
}
"""

END = -1
MOST_PIECES = 1024
"""Linux and macOS take so many in one call."""

_ARGUMENTS: Any = [ctypes.c_void_p, ctypes.c_int64, *[ctypes.c_void_p] * 2, ctypes.c_int64]


class Stretch(NamedTuple):
    """What is read from one place of a file.

    Args:
        descriptor: of the open file.
        offset: where in it.
        pieces: address and bytes of each piece of memory to fill, one after the other.
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
        macros = {"MOST_PIECES": MOST_PIECES, "END": END}
        self._read = (compiler or Compiler()).load("read", SOURCE, macros).tieredkv_read
        self._read.argtypes, self._read.restype = _ARGUMENTS, None

    def read(self, stretches: Iterable[Stretch]) -> list[int]:
        """Fill all pieces; for each stretch 0, an error number of the system, or `END`: the file was too short.

        The memory behind the pieces must be writable, and live as long as the call.
        """
        table, pieces = array.array("q"), array.array("Q")
        for stretch in stretches:
            table.extend((stretch.descriptor, stretch.offset, len(pieces) // 2, len(stretch.pieces) // 2))
            pieces += stretch.pieces
        outcomes = array.array("q", bytes(len(table) * 2))
        addresses = (each.buffer_info()[0] for each in (pieces, outcomes))
        self._read(table.buffer_info()[0], len(outcomes), *addresses, torch.get_num_threads())
        return outcomes.tolist()


def reason(outcome: int) -> OSError:
    """What a stretch's outcome that is not 0 means."""
    if outcome == END:
        return OSError("the file ends before the block does")
    return OSError(outcome, os.strerror(outcome))
