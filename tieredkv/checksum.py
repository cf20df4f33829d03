"""One 64-bit checksum per block over a layer's planes: the same bits on every device, native, eager or compiled.

A block's bytes in row order (for each plane in order, `[kv_heads, *inner]` contiguous) are read as 64-bit words x[i].
Each has an odd pseudo-random weight w[i], a function of i alone, and

    t[i] = x[i] * w[i]        t[i] ^= t[i] >>> 40        checksum = seed(words) + sum of t[i] * w[i]    (mod 2^64)

Every step is a bijection of x[i], so whatever happens inside one word (a flipped bit above all) is seen with certainty.
The multiplication before the shift carries every bit to the top and the shift brings the top down again, so flips in
several words, the top bits included, do not cancel by any pattern; swapped words meet other weights. Damage to many
words is missed with a chance near 2^-64. This guards against accidents, not against forgery.

Imports: errors, block, checksum_native, compiler.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Sequence

import torch

from tieredkv.block import Planes
from tieredkv.checksum_native import NativeSum
from tieredkv.compiler import slower_without
from tieredkv.errors import MismatchError

SHIFT = 40
"""Of the formula."""
_SHIFT_MASK = (1 << (64 - SHIFT)) - 1  # int64 shifts drag the sign along; the mask makes the shift logical
_WORD_BYTES = 8

# Words worked on at once by the eager path on a CPU: enough to hide the dispatch of eight operations, while the two
# temporaries of 1 MiB stay in cache. With 32 Ki words it runs at .75 of the speed.
_EAGER_PIECE_WORDS = 128 * 1024
# Below this the dispatch of the compiled kernel costs more than it saves.
_COMPILED_MIN_WORDS = 32 * 1024
_COMPILED_MIN_HEAD_WORDS = 8
# Compiling takes 5 to 10 seconds cold; the eager kernel loses that much over some tens of gigabytes.
_COMPILE_AFTER_BYTES = 8 * 1024**3

_Kernel = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclasses.dataclass(slots=True)
class CompileRecord:
    """What became of the compiled kernel on one device type.

    Args:
        state: "waiting" (not enough bytes yet), "compiling", "ready" or "failed" (the eager path serves).
        seconds: time spent compiling.
        error: why it failed, or None.
    """

    state: str = "waiting"
    seconds: float = 0.0
    error: str | None = None


class Checksummer:
    """Computes checksums; owns the weights and the compiled kernel. Safe to use from several threads.

    The bits of a checksum depend on the block's bytes alone, so it makes no difference which Checksummer, device or
    path computed it. Results are on the device of the data and ordered on its current stream, as any tensor operation.
    Data on a CPU is summed by a small C++ kernel; without a C++ compiler by single operations, at a fifth of the speed.

    Args:
        native: whether to use the C++ kernel.
        compiled: whether to compile a graph for data that the C++ kernel does not serve; else single operations do.
        compile_after_bytes: bytes on one device type after which to compile, so that short uses never wait for a
            compiler. The call that passes it waits; calls on other threads go on eagerly meanwhile.
    """

    def __init__(
        self, *, native: bool = True, compiled: bool = True, compile_after_bytes: int = _COMPILE_AFTER_BYTES
    ) -> None:
        self._compiled = compiled
        self._wants_native = native
        self._native: NativeSum | None = None
        self.native_reason: str | None = None
        self._compile_after_bytes = compile_after_bytes
        self._lock = threading.Lock()
        self._weights: dict[torch.device, list[torch.Tensor]] = {}  # the last of each is the longest
        self._seen_bytes: dict[str, int] = {}
        self._kernels: dict[str, _Kernel] = {}
        self._records: dict[str, CompileRecord] = {}

    def checksum(self, planes: Planes) -> torch.Tensor:
        """The checksum of each of n blocks.

        Args:
            planes: tensors `[kv_heads, n, *inner]` of any dtype, one head of one block a multiple of 8 bytes. Read in
                place when `inner` is contiguous and the strides are whole words; copied first when not.

        Returns:
            int64 `[n]`.

        Raises:
            MismatchError: the planes differ in n, or a head is not a multiple of 8 bytes.
        """
        words = [_words(plane) for plane in planes]
        return self._checksum(words, self._native_for(words))

    def checksum_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """The same for blocks whose planes lie in row order.

        Args:
            rows: uint8 `[n, row_bytes]`, row_bytes a multiple of 8.

        Returns:
            int64 `[n]`, equal to `checksum` of the planes.

        Raises:
            MismatchError: a row is not a multiple of 8 bytes.
        """
        words = [_words(rows.unsqueeze(0))]
        return self._checksum(words, self._native_for(words))

    def copy_summed(self, out: Planes, planes: Planes) -> torch.Tensor | None:
        """Copy blocks in the memory of a CPU, and sum each as it is in `out`, while it is in the processor's cache.

        Args:
            out: like `planes`, written; the two share no memory.
            planes: as for `checksum`.

        Returns:
            int64 `[n]`, the checksums of `out`; None, and nothing is copied, where memory is not a CPU's, `out` is not
            of whole words, or the C++ kernel does not serve.
        """
        native = self._native_for((*out, *planes))
        if native is None:
            return None
        words = [_words(plane) for plane in out]
        if any(each.data_ptr() != plane.data_ptr() for each, plane in zip(words, out, strict=True)):
            return None  # a copy of what is not in whole words
        return self._checksum(words, native, [_words(plane) for plane in planes])

    @property
    def is_native(self) -> bool:
        """Whether the C++ kernel serves on this machine; compiled when asked for the first time."""
        return self._native_sum() is not None

    def parts(self, row_bytes: int) -> tuple[torch.Tensor, int]:
        """What a checksum of rows of so many bytes is made of on a CPU, for whoever sums by `WEIGHTED_SUM`.

        Returns:
            (weights, int64, at least one for each word; what the sum starts from).
        """
        row_words = row_bytes // _WORD_BYTES
        return self._weights_for(row_words, torch.device("cpu")), _seed(row_words)

    def compile_records(self) -> dict[str, CompileRecord]:
        """For each device type used so far: whether its kernel is compiled, what that took, why it failed."""
        with self._lock:
            return {device: dataclasses.replace(record) for device, record in self._records.items()}

    def _native_for(self, tensors: Sequence[torch.Tensor]) -> NativeSum | None:
        return self._native_sum() if all(tensor.is_cpu for tensor in tensors) else None

    def _checksum(
        self, words: Sequence[torch.Tensor], native: NativeSum | None, sources: Sequence[torch.Tensor] = ()
    ) -> torch.Tensor:
        """Of words, which the C++ kernel first copies from the sources, where there are some."""
        blocks = {plane.shape[1] for plane in words}
        if len(blocks) != 1:
            raise MismatchError(
                "Planes to checksum are not of the same blocks.",
                wanted="tensors [kv_heads, n, *inner] with one n",
                got=f"n in {sorted(blocks)}",
                change="pass the same slots of every plane",
            )
        row_words = sum(plane.shape[0] * plane.shape[2] for plane in words)
        device = words[0].device
        weights = self._weights_for(row_words, device)
        sums = torch.full((blocks.pop(),), _seed(row_words), dtype=torch.int64, device=device)
        start = 0
        for plane, source in itertools.zip_longest(words, sources):
            heads, _, head_words = plane.shape
            if native is not None:
                native.add(sums, plane, weights, start, source)
            else:
                part = weights[start : start + heads * head_words].view(heads, head_words)
                sums += self._weighted_sum(plane, part)
            start += heads * head_words
        return sums

    def _weights_for(self, row_words: int, device: torch.device) -> torch.Tensor:
        """At least `row_words` weights on `device`; a longer row has the weights of a shorter one in front."""
        with self._lock:
            kept = self._weights.setdefault(device, [])
            if not kept or len(kept[-1]) < row_words:
                with torch.inference_mode(False):  # the weights outlive the caller's mode
                    # The shorter ones are kept: kernels of another stream may not have read them yet.
                    kept.append(_make_weights(1 << max(0, row_words - 1).bit_length()).to(device))
            return kept[-1]

    def _weighted_sum(self, words: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """words `[heads, n, head_words]`, weights `[heads, head_words]` -> `[n]`."""
        if self._compiled and words.numel() >= _COMPILED_MIN_WORDS:
            fitting = _fit_to_kernel(words, weights)
            device = words.device.type
            kernel = self._kernels.get(device)
            if fitting and kernel:
                try:
                    return _call(kernel, *fitting)
                except Exception as error:  # whatever a recompilation ran into: the eager path has the same bits
                    self._give_up(device, error)
            elif fitting and self._claim_compilation(device, words.numel() * _WORD_BYTES):
                return self._compile_on(*fitting)
        return _eager_weighted_sum(words, weights)

    def _native_sum(self) -> NativeSum | None:
        """The C++ kernel, compiled when asked for the first time, or None; `native_reason` says why."""
        if self._native is None and self._wants_native:
            with self._lock:
                try:
                    self._native = self._native or NativeSum(SHIFT)
                except OSError as error:
                    self._wants_native, self.native_reason = False, slower_without("checksums", error)
        return self._native

    def _claim_compilation(self, device: str, new_bytes: int) -> bool:
        """Count bytes; True for the one call that is to compile."""
        with self._lock:
            record = self._records.setdefault(device, CompileRecord())
            self._seen_bytes[device] = self._seen_bytes.get(device, 0) + new_bytes
            if record.state != "waiting" or self._seen_bytes[device] < self._compile_after_bytes:
                return False
            record.state = "compiling"
            return True

    def _compile_on(self, words: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Compile, and use the kernel from now on if its bits on these tensors are right."""
        device, started = words.device.type, time.monotonic()
        wanted = _eager_weighted_sum(words, weights)
        try:
            kernel = _compile(words.device)
            if not torch.equal(_call(kernel, words, weights), wanted):
                raise RuntimeError("the compiled kernel's bits differ from the eager path's")
        except Exception as error:  # a compiler may fail in any way; the eager path has the same bits
            self._give_up(device, error)
        else:
            with self._lock:
                self._kernels[device] = kernel
                self._records[device].state = "ready"
        with self._lock:
            self._records[device].seconds = time.monotonic() - started
        return wanted

    def _give_up(self, device: str, error: Exception) -> None:
        with self._lock:
            self._kernels.pop(device, None)
            self._records[device].state = "failed"
            self._records[device].error = f"{type(error).__name__}: {error}"


def _words(plane: torch.Tensor) -> torch.Tensor:
    """`plane` `[heads, n, *inner]` as int64 `[heads, n, words]`, a view where its layout allows."""
    heads, blocks, *inner = plane.shape
    elements = 1
    for size in inner:
        elements *= size
    if elements * plane.element_size() % _WORD_BYTES:
        raise MismatchError(
            "A plane to checksum is not made of 64-bit words.",
            wanted="a multiple of 8 bytes for each head of a block",
            got=f"{elements * plane.element_size()} bytes ({tuple(plane.shape)}, {plane.dtype})",
            change="pad the plane's last dimension",
        )
    flat = plane.reshape(heads, blocks, elements)
    per_word = _WORD_BYTES // plane.element_size()
    whole_words = all(stride % per_word == 0 for stride in (*flat.stride()[:2], flat.storage_offset()))
    if flat.stride(2) != 1 or not whole_words:
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.int64)


def _sum_of(words: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """What is compiled: `[heads, n, words]`, `[heads, words]` -> `[n]`, in one pass over the data."""
    weights = weights.unsqueeze(1)
    mixed = words * weights
    mixed = mixed ^ ((mixed >> SHIFT) & _SHIFT_MASK)
    return (mixed * weights).sum(2).sum(0)


def _compile(device: torch.device) -> _Kernel:
    kernel = torch.compile(_sum_of, fullgraph=True, dynamic=True)
    with torch.inference_mode(False):
        # Sizes of which nothing is assumed, and strides that no size explains: one graph serves every layout.
        words = torch.empty_strided((3, 5, 24), (200, 32, 1), dtype=torch.int64, device=device).zero_()
        weights = torch.zeros((3, 24), dtype=torch.int64, device=device)
        for tensor in (words, weights):
            for dim in range(tensor.dim()):
                torch._dynamo.decorators.mark_unbacked(tensor, dim)
    _call(kernel, words, weights)
    return kernel


def _fit_to_kernel(words: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The same data in the one order of strides that the compiled graph is for, or None if it does not lie so."""
    heads, blocks, head_words = words.shape
    head_stride, block_stride, _ = words.stride()
    # The stride of a dimension of one is arbitrary; the graph was made for distinct ones.
    if blocks == 1:
        block_stride = head_words if head_stride > head_words else heads * head_words
    if head_stride == head_words and block_stride >= heads * head_words:  # row order: the heads of a block adjoin
        heads, head_words = 1, heads * head_words
    if heads == 1:
        head_stride = 2 * blocks * block_stride
    if not head_stride > block_stride >= head_words >= _COMPILED_MIN_HEAD_WORDS:
        return None
    strides = (head_stride, block_stride, 1)
    return words.as_strided((heads, blocks, head_words), strides), weights.view(heads, head_words)


def _call(kernel: _Kernel, words: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    # A compiled graph is bound to the grad mode it was made in; this way there is one for all.
    with torch.inference_mode(False), torch.no_grad():
        return kernel(words, weights)


def _eager_weighted_sum(words: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The same as `_sum_of` by single operations, on a CPU in pieces that stay in cache."""
    heads, blocks, head_words = words.shape
    weights = weights.unsqueeze(1)
    if words.device.type != "cpu" or words.numel() <= _EAGER_PIECE_WORDS:
        mixed = words * weights
        return _mix_and_sum(mixed, mixed >> SHIFT, weights)
    word_step = min(head_words, max(1, _EAGER_PIECE_WORDS // heads))
    block_step = min(blocks, max(1, _EAGER_PIECE_WORDS // (heads * word_step)))
    mixed_room = torch.empty((heads, block_step, word_step), dtype=torch.int64, device=words.device)
    shifted_room = torch.empty_like(mixed_room)
    total = torch.zeros(blocks, dtype=torch.int64, device=words.device)
    for first in range(0, blocks, block_step):
        for start in range(0, head_words, word_step):
            piece = words[:, first : first + block_step, start : start + word_step]
            weight = weights[:, :, start : start + word_step]
            mixed, shifted = (room[:, : piece.shape[1], : piece.shape[2]] for room in (mixed_room, shifted_room))
            torch.mul(piece, weight, out=mixed)
            torch.bitwise_right_shift(mixed, SHIFT, out=shifted)
            total[first : first + block_step] += _mix_and_sum(mixed, shifted, weight)
    return total


def _mix_and_sum(mixed: torch.Tensor, shifted: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """From words times weights, and those shifted, to `[n]`; overwrites both."""
    return mixed.bitwise_xor_(shifted.bitwise_and_(_SHIFT_MASK)).mul_(weights).sum((0, 2))


def _make_weights(count: int) -> torch.Tensor:
    """int64 `[count]`, odd: the splitmix64 sequence of the positive integers."""
    state = torch.arange(1, count + 1, dtype=torch.int64, device="cpu") * _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = (state ^ ((state >> shift) & ((1 << (64 - shift)) - 1))) * _signed(factor)
    return (state ^ ((state >> 31) & ((1 << 33) - 1))) | 1


def _seed(row_words: int) -> int:
    """Where the sum starts, so that a row of zeros has no checksum of zero and rows of other lengths have another."""
    return _signed((row_words + 1) * 0xD1342543DE82EF95)


def _signed(value: int) -> int:
    """The int64 with the low 64 bits of `value`."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value
