"""Compiled FlexAttention callables: one per combination of static shapes, kept apart, counted and capped.

Shapes are static to the compiler, so every device, dtype, head layout, row bucket and pool size is a graph of its
own, and more than eight graphs behind one function are an error in torch. Here each combination has its own
function, the number of graphs has a cap, and what lies beyond it is served by the plain partials. Compiled once, a
combination serves every cache of the process: a conversation that begins does not wait for a compiler again.

Imports: torch only.
"""

from __future__ import annotations

import dataclasses
import threading
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, cast

import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, FlexKernelOptions, flex_attention

GRAPH_CAP = 16
"""Graphs per registry, unless told otherwise: one takes 3 to 6 seconds to compile."""
KEPT_COMBINATIONS = 32
"""Of a process: the longest unused is dropped for a new one."""

TORCH_TILE = 64
"""Torch's own choice of keys in a tile, where a GPU has few queries."""

Result = tuple[torch.Tensor, torch.Tensor | None]
"""Out, and the LSE where it was asked for."""
Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, BlockMask, float], Result]
"""Called with q, k, v, block mask and scale."""


@dataclasses.dataclass(eq=False)
class _Compiled:
    """A callable, and how many graphs were compiled for it so far."""

    graphs: int = 0
    kernel: Kernel | None = None

    def count(self) -> None:
        """A graph is compiled."""
        self.graphs += 1


class CompiledFlex:
    """What was compiled in a process, and which devices give an LSE. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, _Compiled] = OrderedDict()  # the longest unused first
        self._lse: dict[str, bool] = {}
        self._made = 0

    def get(self, key: Hashable, options: FlexKernelOptions, lse: bool) -> _Compiled:
        """The callable of a combination; it is compiled when it is first called."""
        with self._lock:
            found = self._kept.pop(key, None)
            if found is None:
                found = _Compiled()
                found.kernel = _compile(self._made, options, lse, found.count)
                self._made += 1
                if len(self._kept) >= KEPT_COMBINATIONS:
                    self._kept.popitem(last=False)
            self._kept[key] = found
            return found

    def returns_lse(self, device: torch.device) -> bool:
        """Whether compiled FlexAttention returns the LSE on this device: tried once per kind of device."""
        with self._lock:
            if device.type not in self._lse:
                self._lse[device.type] = _probe_lse(device)
            return self._lse[device.type]


COMPILED = CompiledFlex()
"""The process's, as compiled code is."""


class FlexKernels:
    """The compiled callables that serve one cache or store.

    Args:
        cap: how many graphs may serve; further combinations get no kernel, with one warning.
        compiled: where they are kept; by default the process's.
    """

    def __init__(self, cap: int = GRAPH_CAP, compiled: CompiledFlex | None = None) -> None:
        self.cap = cap
        self._compiled = COMPILED if compiled is None else compiled
        self._kernels: dict[Hashable, _Compiled | None] = {}
        self._warned = False

    @property
    def graphs(self) -> int:
        """How many compiled graphs serve, the LSE probes aside."""
        return sum(compiled.graphs for compiled in tuple(self._kernels.values()) if compiled is not None)

    def get(
        self, key: Hashable, device: torch.device, dtype: torch.dtype, block_size: int, *, lse: bool
    ) -> Kernel | None:
        """The callable for one combination of static shapes, or None where the cap leaves it to the plain partials.

        Args:
            key: everything that makes a graph of its own.
            device: where the kernel will run.
            dtype: of q, k and v.
            block_size: tokens of a block, a multiple of 16.
            lse: whether the LSE is asked of it.
        """
        try:
            known = self._kernels[key]
        except KeyError:
            pass
        else:
            return None if known is None else known.kernel
        compiled = None
        if self.graphs < self.cap:
            compiled = self._compiled.get(key, options_for(device, dtype, block_size), lse)
        if compiled is None and not self._warned:
            self._warned = True
            warnings.warn(
                f"{self.cap} FlexAttention graphs are compiled; plain attention serves further shapes, more slowly. "
                "Keep the numbers of rows and of pool slots steady, or raise the cap of FlexKernels.",
                stacklevel=2,
            )
        self._kernels[key] = compiled
        return None if compiled is None else compiled.kernel

    def drop(self, key: Hashable, reason: Exception) -> None:
        """Leave a combination to the plain partials because it does not compile, with a warning."""
        compiled, self._kernels[key] = self._kernels.get(key), None
        if compiled is not None:
            compiled.kernel = None  # no other cache tries it again
        warnings.warn(f"FlexAttention does not compile here, plain attention serves instead: {reason}", stacklevel=2)

    def returns_lse(self, device: torch.device) -> bool:
        """Whether compiled FlexAttention returns the LSE on this device: tried once per kind of device."""
        return self._compiled.returns_lse(device)


def options_for(device: torch.device, dtype: torch.dtype, block_size: int) -> FlexKernelOptions:
    """What the templates are told of one device, dtype and block size (a multiple of 16).

    Lowered for GPUs of compute capability 8.0 to 9.0, torch's own choices refuse blocks of 48 or 80 tokens, since a
    tile is a power of two and has to divide the block; keep two KiB and more of fp32 work per thread in memory for want
    of registers; and take fp32 for TF32 where the process allows that to matrix products.
    """
    if device.type == "cpu":
        # A partition that no block divides keeps the CPU from its template for single queries, which walks the whole
        # pool when rows are ragged.
        return cast(FlexKernelOptions, {"PARTITION_SIZE": 1})
    tile = min(16 if dtype == torch.float32 else 64, block_size & -block_size)
    options: dict[str, object] = {"BLOCK_N": tile, "num_warps": 4, "FLOAT32_PRECISION": "'ieee'"}
    if block_size % min(TORCH_TILE, block_size):
        # The template for few queries looks at torch's own tile first; the other one has tiles for many.
        options |= {"FORCE_USE_FLEX_ATTENTION": True, "BLOCK_M": 32}
    return cast(FlexKernelOptions, options)


def _compile(number: int, options: FlexKernelOptions, lse: bool, count: Callable[[], None]) -> Kernel:
    """A callable with a code object of its own, since torch counts recompilations per code object."""

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: BlockMask, scale: float) -> Result:
        if not lse:
            return flex_attention(q, k, v, block_mask=mask, scale=scale, kernel_options=options), None
        aux = AuxRequest(lse=True)
        out, extra = flex_attention(q, k, v, block_mask=mask, scale=scale, kernel_options=options, return_aux=aux)
        return out, extra.lse

    inductor = torch._dynamo.lookup_backend("inductor")

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        count()
        compiled: Callable[..., Any] = inductor(graph, inputs)
        return compiled

    code = call.__code__.replace(co_name=f"flex_{number}")
    own = types.FunctionType(code, call.__globals__, code.co_name, None, call.__closure__)
    kernel: Kernel = torch.compile(own, fullgraph=True, dynamic=False, backend=backend)
    return kernel


def _probe_lse(device: torch.device) -> bool:
    def everything(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return kv >= 0

    one = torch.ones(1, 1, 1, dtype=torch.int32, device=device)
    index = torch.zeros(1, 1, 1, 1, dtype=torch.int32, device=device)
    mask = BlockMask.from_kv_blocks(
        one,
        index,
        full_kv_num_blocks=one,
        full_kv_indices=index,
        BLOCK_SIZE=(128, 128),
        mask_mod=everything,
        seq_lengths=(16, 128),
        compute_q_blocks=False,
    )
    q, k = torch.zeros(1, 1, 16, 64, device=device), torch.zeros(1, 1, 128, 64, device=device)
    try:
        with torch.no_grad():
            _compile(0, options_for(device, q.dtype, 128), True, lambda: None)(q, k, k, mask, 1.0)
    except RuntimeError:  # NotImplementedError is one
        return False
    return True
