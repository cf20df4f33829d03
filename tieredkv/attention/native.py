"""The native kernel: all rows' new tokens over all stretches of their keys, in one call, on a CPU.

Compiled once for each dtype and pair of dims with the C++ compiler that `torch.compile` needs too, in about two
seconds, and kept in a folder of the user's. It reads K and V once at close to memory speed, where the flash op is
bound by arithmetic for few queries and computes what a causal mask hides for many, returns the LSE, and needs neither
merging in Python nor equal rows. Without a compiler the partials serve; `NativeKernels.reason` says why.

Imports: errors, compiler, lse, native_source; torch.
"""

from __future__ import annotations

import array
import ctypes
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from tieredkv.attention.lse import Partial
from tieredkv.attention.native_source import SOURCE
from tieredkv.compiler import Compiler, slower_without
from tieredkv.errors import MismatchError

CHUNK_TOKENS = 128
"""CHUNK of the source."""
MOST_QUERIES = 64
"""Queries per KV head (heads of its group times new tokens) of one work item; more new tokens make more items."""
SHORTEST_UNIT, LONGEST_UNIT = 64, 512
"""Keys per work item and KV head, at least and, unless there are many, at most."""
ITEMS_PER_THREAD = 4
"""Work items to aim for, so that threads that are late for one do not leave the others waiting."""
APART_FLOATS = 32
"""Between what two threads write, at most; `apart` of the source."""
MOST_SPARE, SMALL_FLOATS = 4, 2**16
"""Working memory is kept for the next call unless it is so many times what that one needs, and more than this."""
MOST_UNITS = 64
"""Units from which on the work is balanced, and cutting keys would only cost merging."""

_CPU = torch.device("cpu")
_SCALARS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_ARGUMENTS: Any = [*[ctypes.c_void_p] * 6, *[ctypes.c_int64] * 3, ctypes.c_float, ctypes.c_int64]

Attend = Callable[..., None]
Stretch = tuple[int, int, int]
"""Number of the pool, first token in it (slot times block size, and on), and how many."""


class NewTokens(NamedTuple):
    """New tokens of one row, and what they see.

    Args:
        row: row of the queries.
        first: number of the first of them among the row's queries.
        tokens: how many.
        stretches: the keys that the last of them sees, its own tokens' last, in any order else; there may be none.
    """

    row: int
    first: int
    tokens: int
    stretches: Sequence[Stretch]


class NativePlan:
    """Where each row's keys lie in one or more pools: made once per forward, serves every layer with the same heads.

    Args:
        rows: every new token of every row, in one or several pieces.
        new: queries in each row of the call.
        kv_heads: KV heads of the layers it will serve.
        group: heads per KV head.
        threads: how many threads will share the work.
        causal: whether the last keys of a piece are its own tokens', so that each sees one key less than the next;
            else all of them see all keys.
    """

    def __init__(
        self, rows: Sequence[NewTokens], *, new: int, kv_heads: int, group: int, threads: int, causal: bool
    ) -> None:
        self.new, self.kv_heads, self.group, self.threads, self.causal = new, kv_heads, group, threads, causal
        self.rows = 1 + max((row for row, *_ in rows), default=-1)
        groups = list(_grouped(rows, max(MOST_QUERIES // group, 1), causal))
        keys = [sum(tokens for _, _, tokens in each.stretches) for each in groups]
        wanted = -(-ITEMS_PER_THREAD * threads // kv_heads)
        unit_keys = max(-(-sum(keys) // wanted), SHORTEST_UNIT)
        unit_keys = min(unit_keys, max(LONGEST_UNIT, -(-sum(keys) // MOST_UNITS)))
        group_units, unit_stretches, unit_groups, flat = [0], [0], list[int](), list[int]()
        for number, each in enumerate(groups):
            room, before = 0, 0
            for pool, offset, tokens in each.stretches:
                while tokens:
                    if not room:
                        unit_groups.append(number)
                        unit_stretches.append(unit_stretches[-1])
                        room = unit_keys
                    part = min(tokens, room)
                    flat += (pool, offset, part, before)
                    unit_stretches[-1] += 1
                    offset, tokens, room, before = offset + part, tokens - part, room - part, before + part
            group_units.append(len(unit_groups))
        slots, self.items = list[int](), 0
        for before, after in itertools.pairwise(group_units):
            slots.append(self.items)
            self.items += after - before if after - before > 1 else 0
        self.groups, self.units = len(groups), len(unit_groups)
        self.most_queries = group * max((each.tokens for each in groups), default=1)
        queries = (*(g.row for g in groups), *(g.first for g in groups), *(g.tokens for g in groups))
        sizes = (self.groups, self.units, self.items, self.most_queries, new)
        lists = (*group_units, *unit_stretches, *unit_groups, *keys, *queries, *slots)
        self._numbers = array.array("q", (*sizes, *lists, *flat))
        self.address = self._numbers.buffer_info()[0]

    def scratch_floats(self, k_dim: int, v_dim: int) -> int:
        """Working memory of one call, in fp32 numbers."""
        item = self.most_queries * (2 + v_dim)
        own = self.most_queries * (k_dim + CHUNK_TOKENS) + item
        shared = self.groups * self.kv_heads + self.items * self.kv_heads * item
        return shared + APART_FLOATS + self.threads * (own + APART_FLOATS)


def _grouped(rows: Sequence[NewTokens], most: int, causal: bool) -> Iterator[NewTokens]:
    """The same tokens, at most so many in one piece."""
    for piece in rows:
        row, first, tokens, stretches = piece
        if tokens <= most:
            yield piece
            continue
        for start in range(0, tokens, most):
            count = min(most, tokens - start)
            behind = tokens - start - count if causal else 0
            yield NewTokens(row, first + start, count, _without_last(stretches, behind))


def _without_last(stretches: Sequence[Stretch], keys: int) -> list[Stretch]:
    kept = list(stretches)
    while keys and kept:
        pool, offset, tokens = kept.pop()
        if tokens > keys:
            kept.append((pool, offset, tokens - keys))
        keys = max(keys - tokens, 0)
    return kept


def _floats(*shape: int) -> torch.Tensor:
    """What the kernel writes: never of torch's default dtype or device, which others may change at any time."""
    return torch.empty(shape, dtype=torch.float32, device=_CPU)


class NativeKernels:
    """The compiled kernels of a cache, and their working memory: used by one thread at a time.

    Args:
        compiler: compiles them; by default the machine's.
    """

    def __init__(self, compiler: Compiler | None = None) -> None:
        self._compiler = compiler or Compiler()
        self._kernels: dict[tuple[torch.dtype, int, int], Attend | None] = {}
        self._scratch = _floats(0)
        self.reason: str | None = None

    def serves(self, q: torch.Tensor, k_dim: int, v_dim: int) -> bool:
        """Whether the kernel takes these queries `[rows, heads, q, k_dim]`; compiles it when asked for the first time.

        The answer depends on the machine and the shapes alone. When it is no for want of a compiler, `reason` says so.
        """
        if not q.is_cpu or q.dtype not in _SCALARS or k_dim % 16 or v_dim % 16 or max(k_dim, v_dim) > 512:
            return False
        return self._kernel(q.dtype, k_dim, v_dim) is not None

    def attend(
        self, q: torch.Tensor, pools: Sequence[tuple[torch.Tensor, torch.Tensor]], plan: NativePlan, *, scale: float
    ) -> Partial:
        """Attention of every row's new tokens over the keys of the plan; `serves` must have said yes.

        Args:
            q: `[rows, heads, new, k_dim]`, with any strides but the last.
            pools: K `[kv_heads, ..., k_dim]` and V `[kv_heads, ..., v_dim]` of each pool that the plan names, in q's
                dtype; a head's tokens are contiguous, heads have any stride.
            plan: of this forward, for these heads.
            scale: factor on q·k.

        Returns:
            out is `[rows, heads, new, v_dim]` with the memory of `[rows, new, heads, v_dim]`, as the next layer wants
            it.

        Raises:
            MismatchError: the plan is for other rows, heads or new tokens.
        """
        rows, heads, new, k_dim = q.shape
        kv_heads, v_dim = pools[0][0].shape[0], pools[0][1].shape[-1]
        if (rows, kv_heads, heads, new) != (plan.rows, plan.kv_heads, kv_heads * plan.group, plan.new):
            raise MismatchError(
                "The queries do not fit the plan of the keys.",
                wanted=f"{plan.rows} rows of {plan.new} new tokens, {plan.group} heads for each of {plan.kv_heads}",
                got=f"{rows} rows of {new} new tokens, {heads} heads over {kv_heads}",
                change="make a plan for the rows of this forward",
            )
        kernel = self._kernel(q.dtype, k_dim, v_dim)
        if kernel is None:
            raise MismatchError(
                "No native kernel for this call.", wanted="serves() to be true", got=self.reason, change="ask it first"
            )
        if q.stride(3) != 1:
            q = q.contiguous()
        out, lse = _floats(rows, new, heads, v_dim), _floats(rows, heads, new)
        floats = plan.scratch_floats(k_dim, v_dim)
        if not floats <= self._scratch.numel() <= max(MOST_SPARE * floats, SMALL_FLOATS):
            self._scratch = _floats(floats)
        places = array.array("q", q.stride()[:3])
        places.extend([n for k, v in pools for n in (k.data_ptr(), v.data_ptr(), k.stride(0), v.stride(0))])
        kernel(
            *(q.data_ptr(), places.buffer_info()[0], out.data_ptr(), lse.data_ptr()),
            *(self._scratch.data_ptr(), plan.address),
            *(kv_heads, plan.group, plan.causal, scale, plan.threads),
        )
        return Partial(out.transpose(1, 2), lse)

    def _kernel(self, dtype: torch.dtype, k_dim: int, v_dim: int) -> Attend | None:
        key = (dtype, k_dim, v_dim)
        if key not in self._kernels:
            try:
                macros = {"SCALAR": _SCALARS[dtype], "K_DIM": k_dim, "V_DIM": v_dim}
                library = self._compiler.load("attend", SOURCE, macros)
            except OSError as error:
                self.reason = slower_without("attention", error)
                self._kernels[key] = None
            else:
                function = library.tieredkv_attend
                function.argtypes, function.restype = _ARGUMENTS, None
                self._kernels[key] = function
        return self._kernels[key]
