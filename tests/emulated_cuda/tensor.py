"""A tensor that says it is on "cuda:0", and what a torch without CUDA has to be told for that.

Imports: torch.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten

if TYPE_CHECKING:
    from emulated_cuda.gpu import EmulatedGpu

CUDA = torch.device("cuda", 0)

GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10::impl { C10_REGISTER_GUARD_IMPL(CUDA, NoOpDeviceGuardImpl<DeviceType::CUDA>) }
"""


@functools.cache
def know_cuda() -> None:
    """Indexing asks torch for the device of a tensor, and only a torch that was built for it has one.

    Raises:
        FileNotFoundError: there is no C++ compiler.
    """
    if torch.backends.cuda.is_built():
        return
    torch_folder = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "guard.cpp"), Path(folder, "guard.so")
        source.write_text(GUARD)
        options = ["-std=c++20", "-shared", "-fPIC", f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}"]
        subprocess.run(["g++", *options, str(source), "-o", str(library), "-lc10"], check=True)
        ctypes.CDLL(str(library))


class GpuTensor(torch.Tensor):
    """A tensor on the GPU; `inner` is its memory."""

    inner: torch.Tensor
    gpu: EmulatedGpu

    @staticmethod
    def __new__(cls, inner: torch.Tensor, gpu: EmulatedGpu) -> GpuTensor:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined,no-any-return]
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=CUDA,
        )

    def __init__(self, inner: torch.Tensor, gpu: EmulatedGpu) -> None:
        self.inner, self.gpu = inner, gpu

    def __repr__(self, **_: object) -> str:
        return f"GpuTensor({tuple(self.shape)}, {self.dtype})"

    def tolist(self) -> Any:
        """As numbers; torch does not do it for tensors of other classes."""
        return self.cpu().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        found = memo.get(id(self))
        if found is None:
            found = self.detach().clone()
            found = memo[id(self)] = torch.nn.Parameter(found, False) if hasattr(self, "_is_param") else found
        return found

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        flat, _ = tree_flatten((args, kwargs))
        gpu = next(x.gpu for x in flat if isinstance(x, GpuTensor))
        return gpu.dispatch(func, args, kwargs or {})


def inner_of(x: Any) -> Any:
    """The memory of a tensor on the GPU; anything else as it is."""
    return x.inner if isinstance(x, GpuTensor) else x
