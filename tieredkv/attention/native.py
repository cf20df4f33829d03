"""The native decode kernel: all rows' new tokens over all stretches of their keys, in one call, on a CPU.

Compiled once for each dtype and pair of dims with the C++ compiler that `torch.compile` needs too, in about two
seconds, and kept in a folder of the user's. It reads K and V once at close to memory speed, where the flash op is
bound by arithmetic for so few queries, returns the LSE, and needs neither merging in Python nor equal rows. Without a
compiler the partials serve; `NativeKernels.reason` says why.

Imports: torch, errors, compiler and the attention package.
"""

from __future__ import annotations

import array
import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tieredkv.attention.lse import Partial
from tieredkv.attention.native_source import SOURCE
from tieredkv.compiler import Compiler
from tieredkv.errors import MismatchError

CHUNK_TOKENS = 128
"""CHUNK of the source."""
MOST_QUERIES = 64
"""Queries per KV head (heads of its group times new tokens) up to which the kernel is the better choice."""
SHORTEST_UNIT = 64
LONGEST_UNIT = 512
"""Keys per work item and KV head, at least and at most."""
ITEMS_PER_THREAD = 4
"""Work items to aim for, so that threads that are late for one do not leave the others waiting."""

_SCALARS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_ARGUMENTS: Any = [*[ctypes.c_void_p] * 6, *[ctypes.c_int64] * 3, ctypes.c_float, ctypes.c_int64]

Decode = Callable[..., None]
Stretch = tuple[int, int, int]
"""Number of the pool, first token in it (slot times block size, and on), and how many."""


class DecodePlan:
    """Where each row's keys lie in one or more pools: made once per forward, serves every layer with as many KV heads.

    Args:
        rows: for each row its stretches of visible keys, in the order of their positions; a row may have none.
        kv_heads: KV heads of the layers it will serve.
        threads: how many threads will share the work.
        fresh: how many of each row's last keys belong to the new tokens, which are causal among themselves; 0 when
            every new token sees every key.
    """

    def __init__(self, rows: Sequence[Sequence[Stretch]], *, kv_heads: int, threads: int, fresh: int) -> None:
        self.rows, self.kv_heads, self.threads, self.fresh = len(rows), kv_heads, threads, fresh
        totals = [sum(tokens for _, _, tokens in stretches) for stretches in rows]
        wanted = -(-ITEMS_PER_THREAD * threads // kv_heads)
        unit_tokens = min(max(-(-sum(totals) // wanted), SHORTEST_UNIT), LONGEST_UNIT)
        row_units, unit_stretches, unit_rows, flat = [0], [0], list[int](), list[int]()
        for row, stretches in enumerate(rows):
            room, before = 0, 0
            for pool, offset, tokens in stretches:
                while tokens:
                    if not room:
                        unit_rows.append(row)
                        unit_stretches.append(unit_stretches[-1])
                        room = unit_tokens
                    part = min(tokens, room)
                    flat += (pool, offset, part, before)
                    unit_stretches[-1] += 1
                    offset, tokens, room, before = offset + part, tokens - part, room - part, before + part
            row_units.append(len(unit_rows))
        self.units = len(unit_rows)
        self._numbers = array.array(
            "q", (self.rows, self.units, *row_units, *unit_stretches, *unit_rows, *totals, *flat)
        )
        self.address = self._numbers.buffer_info()[0]
        self._scratch: dict[int, torch.Tensor] = {}

    def scratch(self, queries: int, k_dim: int, v_dim: int) -> torch.Tensor:
        """Working memory of one call, used again by the next layer's."""
        items = self.rows * self.kv_heads + self.units * self.kv_heads * queries * (2 + v_dim)
        floats = items + self.threads * queries * (k_dim + CHUNK_TOKENS)
        if floats not in self._scratch:
            self._scratch[floats] = torch.empty(floats, dtype=torch.float32)
        return self._scratch[floats]


class NativeKernels:
    """The compiled kernels of a process or cache.

    Args:
        compiler: compiles them; by default the machine's.
    """

    def __init__(self, compiler: Compiler | None = None) -> None:
        self._compiler = compiler or Compiler()
        self._kernels: dict[tuple[torch.dtype, int, int], Decode | None] = {}
        self.reason: str | None = None

    def serves(self, q: torch.Tensor, kv_heads: int, k_dim: int, v_dim: int) -> bool:
        """Whether the kernel takes these queries `[rows, heads, q, k_dim]`; compiles it when asked for the first time.

        The answer depends on the machine and the shapes alone. When it is no for want of a compiler, `reason` says so.
        """
        if q.device.type != "cpu" or q.dtype not in _SCALARS or k_dim % 16 or v_dim % 16 or max(k_dim, v_dim) > 512:
            return False
        if q.shape[1] // kv_heads * q.shape[2] > MOST_QUERIES:
            return False
        return self._kernel(q.dtype, k_dim, v_dim) is not None

    def attend(
        self, q: torch.Tensor, pools: Sequence[tuple[torch.Tensor, torch.Tensor]], plan: DecodePlan, *, scale: float
    ) -> Partial:
        """Attention of every row's new tokens over the keys of the plan; `serves` must have said yes.

        Args:
            q: `[rows, heads, q, k_dim]`.
            pools: K `[kv_heads, ..., k_dim]` and V `[kv_heads, ..., v_dim]` of each pool that the plan names, in q's
                dtype; a head's tokens are contiguous, heads have any stride.
            plan: of this forward, for these KV heads.
            scale: factor on q·k.

        Raises:
            MismatchError: the plan is for other rows, heads or new tokens.
        """
        rows, heads, new, k_dim = q.shape
        kv_heads, v_dim = pools[0][0].shape[0], pools[0][1].shape[-1]
        if (rows, kv_heads) != (plan.rows, plan.kv_heads) or plan.fresh not in (0, new):
            raise MismatchError(
                "The queries do not fit the plan of the keys.",
                wanted=f"{plan.rows} rows over {plan.kv_heads} KV heads, {plan.fresh or 'any'} new tokens",
                got=f"{rows} rows over {kv_heads} KV heads, {new} new tokens",
                change="make a plan for the rows of this forward",
            )
        kernel = self._kernel(q.dtype, k_dim, v_dim)
        if kernel is None:
            raise MismatchError(
                "No native kernel for this call.", wanted="serves() to be true", got=self.reason, change="ask it first"
            )
        queries = heads // kv_heads * new
        q = q.contiguous()
        out, lse = torch.empty((rows, heads, new, v_dim)), torch.empty((rows, heads, new))
        places = array.array("q", [n for k, v in pools for n in (k.data_ptr(), v.data_ptr(), k.stride(0), v.stride(0))])
        kernel(
            *(q.data_ptr(), places.buffer_info()[0], out.data_ptr(), lse.data_ptr()),
            *(plan.scratch(queries, k_dim, v_dim).data_ptr(), plan.address),
            *(kv_heads, queries, plan.fresh, scale, plan.threads),
        )
        return Partial(out, lse)

    def _kernel(self, dtype: torch.dtype, k_dim: int, v_dim: int) -> Decode | None:
        key = (dtype, k_dim, v_dim)
        if key not in self._kernels:
            try:
                macros = {"SCALAR": _SCALARS[dtype], "K_DIM": k_dim, "V_DIM": v_dim}
                library = self._compiler.load("decode", SOURCE, macros)
            except OSError as error:
                self.reason = f"the C++ kernel does not compile: {error}"
                self._kernels[key] = None
            else:
                function = library.tieredkv_decode
                function.argtypes, function.restype = _ARGUMENTS, None
                self._kernels[key] = function
        return self._kernels[key]
