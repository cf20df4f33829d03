"""The native decode kernel: all rows' new tokens over all stretches of their keys, in one call, on a CPU.

Compiled once for each dtype and pair of dims with the C++ compiler that `torch.compile` needs too, in about two
seconds, and kept in a folder of the user's. It reads K and V once at close to memory speed, where the flash op is
bound by arithmetic for so few queries, returns the LSE, and needs neither merging in Python nor equal rows. Without a
compiler the partials serve; `NativeKernels.reason` says why.

Imports: torch, errors and the attention package.
"""

from __future__ import annotations

import array
import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tieredkv.attention.lse import Partial
from tieredkv.attention.native_source import SOURCE
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
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-ffp-contract=fast", "-fno-math-errno", "-shared", "-fPIC", "-fopenmp")
_ARGUMENTS: Any = [*[ctypes.c_void_p] * 7, *[ctypes.c_int64] * 5, ctypes.c_float, ctypes.c_int64]

Decode = Callable[..., None]
Stretch = tuple[int, int]
"""First token in the pool (slot times block size, and on), and how many."""


class DecodePlan:
    """Where each row's keys lie in a pool: made once per forward, serves every layer with as many KV heads.

    Args:
        rows: for each row its stretches of visible keys, in the order of their positions; a row may have none.
        kv_heads: KV heads of the layers it will serve.
        threads: how many threads will share the work.
        fresh: how many of each row's last keys belong to the new tokens, which are causal among themselves; 0 when
            every new token sees every key.
    """

    def __init__(self, rows: Sequence[Sequence[Stretch]], *, kv_heads: int, threads: int, fresh: int) -> None:
        self.rows, self.kv_heads, self.threads, self.fresh = len(rows), kv_heads, threads, fresh
        totals = [sum(tokens for _, tokens in stretches) for stretches in rows]
        wanted = -(-ITEMS_PER_THREAD * threads // kv_heads)
        unit_tokens = min(max(-(-sum(totals) // wanted), SHORTEST_UNIT), LONGEST_UNIT)
        row_units, unit_stretches, unit_rows, flat = [0], [0], list[int](), list[int]()
        for row, stretches in enumerate(rows):
            room, before = 0, 0
            for offset, tokens in stretches:
                while tokens:
                    if not room:
                        unit_rows.append(row)
                        unit_stretches.append(unit_stretches[-1])
                        room = unit_tokens
                    part = min(tokens, room)
                    flat += (offset, part, before)
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
        folder: where compiled kernels are kept; by default one under the user's cache folder.
        compiler: the C++ compiler; by default `CXX`, else the first of g++, clang++ and c++ that is found.
    """

    def __init__(self, folder: Path | None = None, compiler: str | None = None) -> None:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self._folder = folder if folder is not None else home / "tieredkv" / "kernels"
        self._compiler = compiler
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
        self, q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, plan: DecodePlan, *, scale: float
    ) -> Partial:
        """Attention of every row's new tokens over the keys of the plan; `serves` must have said yes.

        Args:
            q: `[rows, heads, q, k_dim]`.
            k_pool: `[kv_heads, ..., k_dim]` in q's dtype; a head's tokens are contiguous, heads have any stride.
            v_pool: `[kv_heads, ..., v_dim]`, likewise.
            plan: of this forward, for these KV heads.
            scale: factor on q·k.

        Raises:
            MismatchError: the plan is for other rows, heads or new tokens.
        """
        rows, heads, new, k_dim = q.shape
        kv_heads, v_dim = k_pool.shape[0], v_pool.shape[-1]
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
        kernel(
            *(q.data_ptr(), k_pool.data_ptr(), v_pool.data_ptr(), out.data_ptr(), lse.data_ptr()),
            *(plan.scratch(queries, k_dim, v_dim).data_ptr(), plan.address),
            *(k_pool.stride(0), v_pool.stride(0), kv_heads, queries, plan.fresh, scale, plan.threads),
        )
        return Partial(out, lse)

    def _kernel(self, dtype: torch.dtype, k_dim: int, v_dim: int) -> Decode | None:
        key = (dtype, k_dim, v_dim)
        if key not in self._kernels:
            try:
                library = ctypes.CDLL(str(self._build(_SCALARS[dtype], k_dim, v_dim)))
            except (OSError, subprocess.SubprocessError) as error:
                self.reason = f"the C++ kernel does not compile: {error}"
                self._kernels[key] = None
            else:
                function = library.tieredkv_decode
                function.argtypes, function.restype = _ARGUMENTS, None
                self._kernels[key] = function
        return self._kernels[key]

    def _build(self, scalar: int, k_dim: int, v_dim: int) -> Path:
        """The path of the shared library, compiled unless the folder has it."""
        candidates = (self._compiler, os.environ.get("CXX"), "g++", "clang++", "c++")
        compiler = next((found for name in candidates if name and (found := shutil.which(name))), None)
        if compiler is None:
            raise FileNotFoundError("no C++ compiler (CXX, g++, clang++ or c++)")
        version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
        options = [*_FLAGS, f"-DSCALAR={scalar}", f"-DK_DIM={k_dim}", f"-DV_DIM={v_dim}"]
        parts = [SOURCE.encode(), version, " ".join(options).encode(), _processor().encode()]
        name = hashlib.sha256(b"\0".join(parts)).hexdigest()[:32]
        path = self._private_folder() / f"decode-{name}.so"
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
                source, built = Path(scratch, "decode.cpp"), Path(scratch, "decode.so")
                source.write_text(SOURCE)
                command = [compiler, *options, str(source), "-o", str(built)]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    raise OSError(f"{compiler}: {done.stderr.strip()[:500]}")
                built.replace(path)  # whole or absent, whoever else compiles it now
        return path

    def _private_folder(self) -> Path:
        """The folder, if code in it can only be the user's own; else a fresh one for this process."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            state = self._folder.stat()
        except OSError:
            state = None
        own = state is not None and state.st_uid == os.getuid() and not state.st_mode & 0o022
        if not own or not os.access(self._folder, os.W_OK):
            self._folder = Path(tempfile.mkdtemp(prefix="tieredkv-kernels-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        return self._folder


def _processor() -> str:
    """What "native" means to the compiler here: a folder may be shared by machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
