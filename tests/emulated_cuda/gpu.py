"""The emulated GPU itself: what stands in for torch.cuda, and how an operation is queued.

Imports: torch, and this package.
"""

from __future__ import annotations

import contextlib
import math
import queue
import random
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from emulated_cuda.kernels import FLASH, flash, histc
from emulated_cuda.streams import FakeEvent, FakeStream
from emulated_cuda.tensor import GpuTensor, inner_of, know_cuda

aten = torch.ops.aten

UNINITIALISED = {
    *(aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default),
    *(aten.new_empty.default, aten.new_empty_strided.default),
}
"""What makes a tensor and writes nothing."""
READ_BY_THE_HOST = {aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default}
"""What waits for the GPU by itself."""


class _Mode(TorchDispatchMode):
    """Catches what makes tensors on the GPU out of nothing."""

    def __init__(self, gpu: EmulatedGpu) -> None:
        super().__init__()
        self._gpu = gpu
        self._before: list[bool] = []

    def __enter__(self) -> _Mode:
        # `torch.tensor(..., device="cuda")` makes a tensor of the host, shows it to the mode, and then moves it.
        self._before.append(torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        torch._C._set_only_lift_cpu_tensors(self._before.pop())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._gpu.dispatch(func, args, kwargs or {})


class EmulatedGpu:
    """The GPU; inside the `with` torch.cuda is its own, for the calling thread and for streams' threads.

    Args:
        seed: of the order in which things are done.
        eagerness: how often, from 0 to 1, something is done before anything waits for it.
        computes_ahead: whether what is asked on the default stream is done at once, with what it has to wait for; so
            it meets all that other streams have not done yet.

    Attributes:
        host_waits: how often a thread of the host waited: (its name, what made it wait) -> times.
        custom: stands in for operations that have no CPU kernel: operation -> function of plain tensors.
        asked: how often each operation was.
    """

    def __init__(self, seed: int = 0, eagerness: float = 0.2, computes_ahead: bool = False) -> None:
        self.lock = threading.RLock()
        self.streams: list[FakeStream] = []
        self.host_waits: Counter[tuple[str, str]] = Counter()
        self.custom: dict[Any, Callable[..., Any]] = {FLASH: flash, aten.histc.default: histc}
        self.asked: Counter[Any] = Counter()
        self._rng, self._eagerness, self._computes_ahead = random.Random(seed), eagerness, computes_ahead
        self._default = FakeStream(self)
        self._current = threading.local()
        self._dropped: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._memory: dict[int, tuple[int, torch.Tensor, FakeStream]] = {}  # storage -> tensors alive, bytes, stream
        self._pinned: dict[int, int] = {}  # address -> bytes
        self._likes: dict[Any, tuple[list[Any], Any]] = {}
        self._stack = contextlib.ExitStack()

    # ---- torch.cuda

    def __enter__(self) -> EmulatedGpu:
        know_cuda()
        replaced = {
            "_lazy_init": lambda: None,
            "Stream": lambda device=None: FakeStream(self),
            "Event": lambda enable_timing=False: FakeEvent(self),
            "stream": self.on_stream,
            "current_stream": lambda device=None: self.stream,
            "default_stream": lambda device=None: self._default,
            "is_available": lambda: True,
            "get_device_name": lambda device=None: "Emulated GPU",
            "empty_cache": lambda: None,
            "current_device": lambda: 0,
            "synchronize": lambda device=None: self.synchronize(),
            "mem_get_info": lambda device=None: (1 << 33, 1 << 34),
            "memory_reserved": lambda device=None: 0,
            "memory_allocated": lambda device=None: 0,
            "get_device_capability": lambda device=None: (9, 0),
        }
        for name, value in replaced.items():
            self._stack.enter_context(mock.patch.object(torch.cuda, name, value))
        self._stack.enter_context(mock.patch.object(torch, "Stream", lambda device=None: FakeStream(self)))
        is_built = mock.patch.object(torch.backends.cuda, "is_flash_attention_available", lambda: True)
        self._stack.enter_context(is_built)
        self._stack.enter_context(_Mode(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self.synchronize()

    @property
    def stream(self) -> FakeStream:
        """The calling thread's current stream."""
        return getattr(self._current, "stream", self._default)

    @contextlib.contextmanager
    def on_stream(self, stream: FakeStream) -> Iterator[None]:
        """Make a stream the calling thread's current one."""
        before, self._current.stream = self.stream, stream
        try:
            # A stream's own thread is outside the `with` of whoever made the GPU.
            with contextlib.nullcontext() if before is not self._default else _Mode(self):
                yield
        finally:
            self._current.stream = before

    def synchronize(self) -> None:
        """Do everything."""
        for stream in tuple(self.streams):
            stream.advance(stream.queued)

    def waited(self, what: str) -> None:
        """Count a wait of the calling thread."""
        self.host_waits[threading.current_thread().name, what] += 1

    def wander(self) -> None:
        """Do something or nothing, as the seed says."""
        with self.lock:
            if self._computes_ahead and self.stream is self._default:
                self._default.advance(self._default.queued)
            if self._rng.random() < self._eagerness:
                stream = self._rng.choice(self.streams)
                stream.advance(self._rng.randint(stream.done, stream.queued))

    # ---- tensors

    def put(self, tensor: torch.Tensor) -> GpuTensor:
        """A copy on the GPU."""
        with torch.inference_mode(False), torch.no_grad():
            return self._wrap(tensor.detach().clone())

    def put_module(self, module: torch.nn.Module) -> None:
        """Move a module's parameters and buffers, in place."""
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    part._parameters[name] = torch.nn.Parameter(self.put(parameter), requires_grad=False)
            for name, buffer in part._buffers.items():
                if buffer is not None:
                    part._buffers[name] = self.put(buffer)

    def get(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in host memory, once everything is done."""
        self.synchronize()
        if not isinstance(tensor, GpuTensor):
            raise TypeError(f"not on the GPU: {type(tensor)}")
        return tensor.inner.clone()

    def _wrap(self, inner: torch.Tensor) -> GpuTensor:
        key = inner.untyped_storage()._cdata
        tensor = GpuTensor(inner, self)
        with self.lock:
            alive, memory, stream = self._memory.get(key, (0, _whole(inner), self.stream))
            self._memory[key] = alive + 1, memory, stream
        weakref.finalize(tensor, self._dropped.put, key).atexit = False
        return tensor

    def _bury(self) -> None:
        """Fill with NaN what nobody refers to any more, in the order of the stream that it was made on."""
        with contextlib.suppress(queue.Empty):
            while True:
                key = self._dropped.get_nowait()
                alive, memory, stream = self._memory[key]
                if alive > 1:
                    self._memory[key] = alive - 1, memory, stream
                else:
                    del self._memory[key]
                    stream.push(lambda memory=memory: memory.fill_(255))

    def _made(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        inner = torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device="cpu")
        _garble(inner)
        return inner

    # ---- operations

    def dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        """One operation of the host."""
        with self.lock, torch.inference_mode(False), torch.no_grad():
            flat, spec = tree_flatten((args, dict(kwargs)))
            device = kwargs.get("device")
            to_gpu = device is not None and torch.device(device).type == "cuda"
            if not to_gpu and not any(isinstance(x, GpuTensor) for x in flat):
                return self._on_host(func, args, dict(kwargs))
            self._bury()
            self.asked[func] += 1
            if func is aten._to_copy.default:
                result = self._converted(args[0], dict(kwargs))
            elif func is aten.copy_.default:
                result = self._copied(args[0], args[1], bool(args[2] if len(args) > 2 else kwargs.get("non_blocking")))
            elif func is aten._foreach_copy_.default:
                non_blocking = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))
                for target, source in zip(args[0], args[1], strict=True):
                    self._copied(target, source, non_blocking)
                result = None
            elif func in READ_BY_THE_HOST:
                result = self._read(func, flat, spec)
            else:
                result = self._computed(func, flat, spec)
            self.wander()
            return result

    def _on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        pinned = kwargs.pop("pin_memory", False)
        result = func(*args, **kwargs)
        if pinned:
            self._pin(result)
        return result

    def _pin(self, tensor: torch.Tensor) -> None:
        start = tensor.data_ptr()
        self._pinned[start] = tensor.nbytes
        weakref.finalize(tensor.untyped_storage(), self._pinned.pop, start, None).atexit = False

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        at = tensor.data_ptr()
        return any(start <= at < start + size for start, size in tuple(self._pinned.items()))

    def _read(self, func: Any, flat: list[Any], spec: Any) -> Any:
        self.waited(str(func))
        self.stream.advance(self.stream.queued)
        args, kwargs = tree_unflatten([inner_of(x) for x in flat], spec)
        return tree_map(lambda x: self._wrap(x) if isinstance(x, torch.Tensor) else x, func(*args, **kwargs))

    def _converted(self, source: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        """`Tensor.to`."""
        device = torch.device(kwargs.pop("device", None) or source.device)
        non_blocking, dtype = kwargs.pop("non_blocking", False), kwargs.pop("dtype", None) or source.dtype
        kwargs.pop("pin_memory", None)
        like = aten._to_copy.default(torch.empty_like(inner_of(source), device="meta"), dtype=dtype, **kwargs)
        inner = self._made(like.shape, like.stride(), dtype)
        if device.type == "cpu":
            if non_blocking:
                self._pin(inner)
            self._copied(inner, source, non_blocking)
            return inner
        target = self._wrap(inner)
        self._copied(target, source, non_blocking)
        return target

    def _copied(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        into, taken = inner_of(target), inner_of(source)
        if isinstance(target, GpuTensor) != isinstance(source, GpuTensor):
            host = source if isinstance(target, GpuTensor) else target
            if not self._is_pinned(host) or into.dtype != taken.dtype or not _is_one_copy(into, taken):
                non_blocking = non_blocking and isinstance(target, GpuTensor) and not self._is_pinned(host)
                taken = taken.clone() if isinstance(target, GpuTensor) else taken  # the driver's own buffer
            if target is host:
                _garble(into)
            self.stream.push(lambda: into.copy_(taken))
            if not non_blocking:
                self.waited("copy")
                self.stream.advance(self.stream.queued)
        else:
            self.stream.push(lambda: into.copy_(taken))
        return target

    def _computed(self, func: Any, flat: list[Any], spec: Any) -> Any:
        _check_devices(func, flat)
        args, kwargs = tree_unflatten([inner_of(x) for x in flat], spec)
        if "device" in kwargs:
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        if func.is_view or func is aten._unsafe_view.default or func is aten.lift_fresh.default:
            views = func(*args, **kwargs)
            return tree_map(lambda x: self._wrap(x) if isinstance(x, torch.Tensor) else x, views)
        work = self.custom.get(func, func)
        if func._schema.is_mutable:
            self.stream.push(lambda: work(*args, **kwargs))
            return _written(func, *tree_unflatten(flat, spec))
        likes, out_spec = self._likes_of(func, work, args, kwargs)
        outs = [self._made(x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x for x in likes]

        def run() -> None:
            for out, value in zip(outs, tree_flatten(work(*args, **kwargs))[0], strict=True):
                if isinstance(out, torch.Tensor):
                    out.copy_(value)

        if func not in UNINITIALISED:
            self.stream.push(run)
        return tree_unflatten([self._wrap(x) if isinstance(x, torch.Tensor) else x for x in outs], out_spec)

    def _likes_of(self, func: Any, work: Callable[..., Any], args: Any, kwargs: Any) -> tuple[list[Any], Any]:
        """What the operation gives, without values: found out once for arguments of one kind, which takes most time."""
        flat, spec = tree_flatten((args, kwargs))
        kind = (func, spec, *(_kind(x) for x in flat))
        if kind not in self._likes:
            meta_args, meta_kwargs = tree_unflatten([_meta(x) for x in flat], spec)
            self._likes[kind] = tree_flatten(work(*meta_args, **meta_kwargs))
        return self._likes[kind]


def _kind(x: Any) -> Any:
    """What of an argument an operation's shapes depend on."""
    return (x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else (type(x), x)


def _meta(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return torch.device("meta") if isinstance(x, torch.device) or x == "cpu" else x


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of a tensor's memory."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),))  # type: ignore[call-overload,no-any-return]


def _garble(tensor: torch.Tensor) -> None:
    if tensor.dtype.is_floating_point:
        tensor.fill_(math.nan)
    elif tensor.dtype != torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


def _is_one_copy(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether the engine can copy it as it lies: else torch goes through temporary buffers, and the host waits."""
    return target.is_contiguous() and source.is_contiguous()


def _check_devices(func: Any, flat: list[Any]) -> None:
    """As CUDA: a tensor of the host may stand beside others only as a scalar, or as an index."""
    if func in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default):
        return
    for x in flat:
        if isinstance(x, torch.Tensor) and not isinstance(x, GpuTensor) and x.dim() > 0:
            raise RuntimeError(f"Expected all tensors to be on the same device: {func} has a tensor of the host")


def _written(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operation that writes into its arguments returns: those."""
    named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    written = [named[a.name] for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    returns = len(func._schema.returns)
    return None if returns == 0 else written[0] if returns == 1 else tuple(written)
