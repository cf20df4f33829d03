"""How much memory does a cache take as the context grows? Run: python -m benchmarks.memory [--quick]

Two layers of Llama-3-8B's shape (8 K/V heads of 128, bf16) get a prompt and then a few single tokens, without the rest
of a model, and what a process holds is measured, in a process of its own for each figure. Shown is the memory for 32
layers: 16 times what two layers keep, and once what is held only while one layer is worked on. On a CPU, device and
host are one memory: what warm holds is taken off, and all else that a cache takes counts for the device.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import itertools
import multiprocessing
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import DynamicCache, QuantizedCache, StaticCache

from benchmarks import harness, shapes
from benchmarks.harness import Row
from benchmarks.plots import Chart
from benchmarks.shapes import BLOCK, Attention
from tieredkv import TieredCache
from tieredkv.hf import seam
from tieredkv.hf.layers import Handle

LAYERS, SHOWN_LAYERS = 2, 32
SCALE = SHOWN_LAYERS // LAYERS
FIRST, SINGLE = 16, 3
"""Tokens before the prompt, by which a cache finds out how it is attended; tokens after it, one at a time."""
HOT_TOKENS = 4096
WINDOW = 2048
GIB = 2**30
SLOW = {"QuantizedCache, hqq, 4 bits": 2048}
"""Most tokens of what takes minutes for more."""
LEAST_SAVING = 4.0
"""What is asked at the longest context: device memory of DynamicCache over ours with a budget."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """Bytes of two layers.

    Args:
        kept_bytes: on the device as long as the cache lives.
        passing_bytes: on the device at some time beside that, while one layer is worked on.
        host_bytes: what the warm tier held at its peak.
        disk_bytes: what the cold tier held at its peak.
    """

    kept_bytes: int
    passing_bytes: int
    host_bytes: int
    disk_bytes: int

    @property
    def device_bytes(self) -> int:
        """For all layers that are shown, at the peak."""
        return SCALE * self.kept_bytes + self.passing_bytes


def config_of_shape() -> Any:
    """K/V of Llama-3-8B, with no more query heads than K/V heads: they do not change what a cache holds."""
    config = shapes.llama3_8b_config(LAYERS)
    config.num_attention_heads = config.num_key_value_heads
    config._attn_implementation = "tieredkv"
    return config


def feed(cache: DynamicCache, config: Any, prompt: torch.Tensor) -> None:
    """Feed K = V = `prompt` `[1, kv_heads, tokens, dim]`. Prefills are not attended: that would measure attention."""
    module = Attention(1).eval()
    borders = [0, FIRST, *range(prompt.shape[2] - SINGLE, prompt.shape[2] + 1)]
    for start, stop in itertools.pairwise(borders):
        new = prompt[:, :, start:stop]
        for layer in range(config.num_hidden_layers):
            keywords: dict[str, Any] = {}
            k, v = cache.update(new, new.view_as(new), layer, kwargs=keywords)
            if not isinstance(cache, TieredCache):
                continue
            handle = Handle.of(k, v)
            if handle is not None and start == FIRST:
                handle.claimed = True  # as attention would
            else:
                seam.attention(module, new, k, v, None, scaling=config.head_dim**-0.5, **keywords)


def ours(**settings: Any) -> Callable[[Any, int], TieredCache]:
    """What makes a cache of ours."""
    return lambda config, tokens: TieredCache(config, **settings)


def makers(folder: str) -> dict[str, Callable[[Any, int], Any]]:
    """Every contestant: (config, tokens) -> a cache."""
    part = {"hot": f"{HOT_TOKENS} tokens", "window": WINDOW}
    budget = f"ours, {HOT_TOKENS:,} tokens hot"
    found: dict[str, Callable[[Any, int], Any]] = {
        "DynamicCache": lambda config, tokens: DynamicCache(config=config),
        "StaticCache": lambda config, tokens: StaticCache(config=config, max_cache_len=tokens),
        "QuantizedCache, fp8": lambda config, tokens: QuantizedCache("fp8", config),
    }
    quanto, hqq = "QuantizedCache, quanto, 4 bits", "QuantizedCache, hqq, 4 bits"
    found[quanto] = lambda config, tokens: QuantizedCache("quanto", config, nbits=4)
    found[hqq] = lambda config, tokens: QuantizedCache("hqq", config, nbits=4, axis_key=1, axis_value=1)
    return found | {
        "ours, everything hot": lambda config, tokens: TieredCache(config, hot=f"{tokens + BLOCK} tokens", warm=0),
        f"{budget}, rest warm": ours(warm="40000 tokens", **part),
        f"{budget}, rest warm as int8": ours(warm="40000 tokens", codec="int8", **part),
        f"ours, on the device, int8 outside the last {WINDOW:,} tokens": lambda config, tokens: TieredCache(
            config, hot=f"{HOT_TOKENS + tokens * 9 // 16} tokens", warm=0, window=WINDOW, codec="int8", hot_codec="int8"
        ),
        f"{budget}, rest cold": ours(warm=0, cold=folder, **part),
    }


def status_bytes(field: str) -> int:
    """A figure of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"/proc/self/status has no {field}")


def tensors_bytes() -> int:
    """Bytes of all live tensors, each storage once."""
    storages = {}
    for thing in gc.get_objects():
        # A quantised tensor of another package has no storage of its own; the tensors inside it are seen too.
        if issubclass(type(thing), torch.Tensor) and not is_traceable_wrapper_subclass(thing):
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def measure(name: str, tokens: int) -> Measured:
    """Feed one contestant in this process; what is loaded at first use is loaded before."""
    torch.set_grad_enabled(False)
    config = config_of_shape()
    prompt = torch.randn(1, config.num_key_value_heads, tokens, config.head_dim).to(torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder:
        make = makers(folder)[name]
        first = make(config, tokens)
        feed(first, config, prompt)
        close(first)
        del first
        gc.collect()
        before, start = tensors_bytes(), resident_bytes(anew=True)
        cache = make(config, tokens)
        feed(cache, config, prompt)
        peak, kept = status_bytes("VmHWM") - start, tensors_bytes() - before
        touched, host, disk = kept, 0, 0
        if isinstance(cache, TieredCache):
            stats = cache.stats()
            if stats.mode != "blocks":
                raise LookupError(f"{name} gathered: {stats.fallback_reason}")
            host, disk, kept = stats.warm.peak_bytes, stats.cold.peak_bytes, kept - stats.warm.reserved_bytes
            touched = host + min(kept, stats.hot.peak_bytes + stats.packed.peak_bytes)  # pools take memory as they fill
        measured = Measured(kept, max(peak - touched, 0), host, disk)
        close(cache)
        return measured


def resident_bytes(anew: bool) -> int:
    """Memory of this process; `anew` lets the peak begin here, after what torch and Python have freed is given back."""
    if anew:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


def close(cache: Any) -> None:
    """Close a cache of ours."""
    if isinstance(cache, TieredCache):
        cache.close()


def worker() -> ProcessPoolExecutor:
    """Runs each call in a new process, which has torch and transformers loaded and nothing else done."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tieredkv", "benchmarks.decode"])
    return ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1)


def measure_all(names: Sequence[str], lengths: Sequence[int]) -> dict[str, list[Measured]]:
    """`measure` for each at each length, one at a time; what does not work here is left out, and says so.

    A quantiser may be absent, or want a GPU or a compiler.
    """
    found: dict[str, list[Measured]] = {}
    for name in names:
        with worker() as pool:
            try:
                found[name] = [pool.submit(measure, name, n).result() for n in lengths if n <= SLOW.get(name, n)]
            except Exception as error:  # whatever another package raises, the others are still measured
                if name.startswith("ours"):
                    raise
                print(f"{name} is left out: {type(error).__name__}: {str(error)[:100]}")
    return found


def figures(quick: bool) -> tuple[list[Row], list[Chart]]:
    """Memory of every contestant at every length."""
    lengths = [1024, 6144] if quick else [2048, 4096, 8192, 16384, 32768]
    everyone = list(makers(""))
    if quick:
        everyone = [name for name in everyone if not name.startswith(("Q", "S")) and "int8" not in name]
    found = measure_all(everyone, lengths)
    rows = []
    for name, measured in found.items():
        for tokens, each in zip(lengths, measured, strict=False):
            below = [f"{SCALE * each.host_bytes / GIB:.2f} GiB of host memory"] * (each.host_bytes > 0)
            below += [f"{SCALE * each.disk_bytes / GIB:.2f} GiB of disk"] * (each.disk_bytes > 0)
            beside = f" (beside {' and '.join(below)})" if below else ""
            title = f"{name}, {tokens:,} tokens: device memory at its peak{beside}"
            rows.append(Row(title, each.device_bytes / GIB, "GiB", detail=dataclasses.asdict(each)))
    stock = found["DynamicCache"][-1].device_bytes
    for name, measured in found.items():
        if "tokens hot" in name:
            ratio = stock / measured[-1].device_bytes
            must, reached = ("", None) if quick else (f">= {LEAST_SAVING:g}", ratio >= LEAST_SAVING)
            title = f"device memory of DynamicCache over {name}, {lengths[-1]:,} tokens"
            rows.append(Row(title, ratio, "x", must, reached))
    lines = {
        name: [(float(tokens), each.device_bytes / GIB) for tokens, each in zip(lengths, measured, strict=False)]
        for name, measured in found.items()
    }
    note = f"8 K/V heads of 128 in bf16; two layers measured on a CPU, what they keep shown times {SCALE}, as 32 layers"
    title = "Device memory for keys and values, at its peak"
    chart = Chart("device", title, "tokens of context", "GiB", lines, log_x=True, note=note)
    return rows, [chart]


def main() -> None:
    """Measure, print, write."""
    harness.answer("memory", __doc__, figures)


if __name__ == "__main__":
    main()
