"""Checksums: the stated formula in every layout, path and dtype, and no damage that passes unseen."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from tieredkv import checksum as module
from tieredkv.block import Planes
from tieredkv.checksum import Checksummer
from tieredkv.checksum_native import LEAST_WORDS
from tieredkv.errors import MismatchError

MASK = 2**64 - 1
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.uint8, torch.int64]


def specified(row: bytes) -> int:
    """The formula of the module's docstring, in Python's integers."""
    words = [int.from_bytes(row[at : at + 8], "little") for at in range(0, len(row), 8)]
    total = (len(words) + 1) * 0xD1342543DE82EF95
    for i, word in enumerate(words, start=1):
        weight = i * 0x9E3779B97F4A7C15 & MASK
        weight = (weight ^ weight >> 30) * 0xBF58476D1CE4E5B9 & MASK
        weight = (weight ^ weight >> 27) * 0x94D049BB133111EB & MASK
        weight = (weight ^ weight >> 31) | 1
        mixed = word * weight & MASK
        total += (mixed ^ mixed >> 40) * weight
    return total & MASK


def unsigned(sums: torch.Tensor) -> list[int]:
    return [value & MASK for value in sums.tolist()]


def random_bytes(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def rows_of(planes: Planes) -> torch.Tensor:
    """uint8 `[n, row_bytes]`: the planes in row order."""
    halves = [plane.transpose(0, 1).contiguous().view(torch.uint8) for plane in planes]
    return torch.cat([half.flatten(1) for half in halves], 1)


@st.composite
def some_planes(draw: st.DrawFn) -> Planes:
    heads, n = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    planes = []
    for dtype in draw(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=4)):
        inner = draw(st.sampled_from([(8,), (16, 24), (2, 4, 8), (128, 8)]))
        raw = random_bytes(heads, n, *inner[:-1], inner[-1] * dtype.itemsize, seed=draw(st.integers(0, 2**31)))
        planes.append(raw.view(dtype))
    return tuple(planes)


@pytest.mark.parametrize("native", [True, False])
@hypothesis.settings(max_examples=30)
@hypothesis.given(planes=some_planes())
def test_planes_rows_and_specification_agree(native: bool, planes: Planes) -> None:
    summer, rows = Checksummer(native=native), rows_of(planes)
    sums = summer.checksum(planes)
    assert sums.dtype == torch.int64 and sums.shape == (planes[0].shape[1],)
    assert torch.equal(sums, summer.checksum_rows(rows))
    assert unsigned(sums) == [specified(row.numpy().tobytes()) for row in rows]


@pytest.mark.parametrize("native", [True, False])
@hypothesis.settings(max_examples=20)
@hypothesis.given(planes=some_planes(), start=st.integers(0, 3))
def test_strides_make_no_difference(native: bool, planes: Planes, start: int) -> None:
    """Slots in the middle of a pool, inner dimensions that are not contiguous, and rows at odd addresses."""
    summer = Checksummer(native=native)
    wanted = summer.checksum(planes)
    pools, transposed = [], []
    for plane in planes:
        pool = torch.zeros(plane.shape[0], plane.shape[1] + 5, *plane.shape[2:]).to(plane.dtype)
        pool[:, start : start + plane.shape[1]] = plane
        pools.append(pool[:, start : start + plane.shape[1]])
        transposed.append(plane.transpose(1, -1).contiguous().transpose(1, -1))
    assert torch.equal(summer.checksum(tuple(pools)), wanted)
    assert torch.equal(summer.checksum(tuple(transposed)), wanted)
    rows = rows_of(planes)
    odd = torch.zeros(rows.shape[0], rows.shape[1] + 3, dtype=torch.uint8)[:, 1 : 1 + rows.shape[1]]
    assert torch.equal(summer.checksum_rows(odd.copy_(rows)), wanted)


@pytest.mark.parametrize("native", [True, False])
def test_rows_larger_than_one_eager_piece(native: bool) -> None:
    summer = Checksummer(native=native)
    for shape in ((2, 3, 90_000), (3, 700, 130), (140_000, 2, 1)):
        words = random_bytes(*shape, 8).view(torch.int64)
        rows = words.transpose(0, 1).flatten(1).contiguous().view(torch.uint8)
        assert torch.equal(summer.checksum((words,)), summer.checksum_rows(rows))
        one_by_one = [summer.checksum_rows(row[None]) for row in rows[:5]]
        assert torch.equal(summer.checksum_rows(rows)[:5], torch.cat(one_by_one))


def test_no_blocks_and_refusals() -> None:
    summer = Checksummer()
    assert summer.checksum((torch.empty(2, 0, 16, 8),)).shape == (0,)
    assert summer.checksum_rows(torch.empty(0, 64, dtype=torch.uint8)).shape == (0,)
    with pytest.raises(MismatchError, match="64-bit words"):
        summer.checksum_rows(torch.zeros(2, 12, dtype=torch.uint8))
    with pytest.raises(MismatchError, match="same blocks"):
        summer.checksum((torch.zeros(1, 2, 8), torch.zeros(1, 3, 8)))


def test_zeros_have_a_checksum_that_tells_their_length() -> None:
    sums = {unsigned(Checksummer().checksum_rows(torch.zeros(1, size, dtype=torch.uint8)))[0] for size in (8, 16, 64)}
    assert len(sums) == 3 and 0 not in sums


def test_weights_are_odd_and_distinct_and_do_not_depend_on_the_longest_row() -> None:
    weights = module._make_weights(1 << 15)
    assert (weights & 1).all() and len(set(weights.tolist())) == len(weights)
    rows, summer = random_bytes(3, 800), Checksummer(native=False)
    short_first = summer.checksum_rows(rows)
    summer.checksum_rows(random_bytes(1, 80_000))
    assert torch.equal(short_first, summer.checksum_rows(rows))


ROW_BYTES = 1024  # planes k and v, two heads of 256 bytes each


def flip_bits(rows: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """One bit of each row, by number."""
    damaged = rows.clone()
    damaged[torch.arange(len(rows)), bits // 8] ^= (1 << (bits % 8)).to(torch.uint8)
    return damaged


def flip_one_bit(rows: torch.Tensor) -> torch.Tensor:
    return flip_bits(rows, torch.randint(0, ROW_BYTES * 8, (len(rows),)))


def flip_top_bits_of_two_words(rows: torch.Tensor) -> torch.Tensor:
    first = torch.randint(0, ROW_BYTES // 8, (len(rows),))
    second = (first + torch.randint(1, ROW_BYTES // 8, (len(rows),))) % (ROW_BYTES // 8)
    return flip_bits(flip_bits(rows, first * 64 + 63), second * 64 + 63)


def flip_the_same_bit_of_every_word(rows: torch.Tensor) -> torch.Tensor:
    bit = torch.randint(0, 64, (len(rows), 1))
    return (rows.view(torch.int64) ^ (1 << bit)).view(torch.uint8)


def swap(rows: torch.Tensor, size: int) -> torch.Tensor:
    """Two different stretches of `size` bytes of each row change places."""
    pieces, at = rows.view(len(rows), -1, size).clone(), torch.arange(len(rows))
    first = torch.randint(0, pieces.shape[1], (len(rows),))
    second = (first + torch.randint(1, pieces.shape[1], (len(rows),))) % pieces.shape[1]
    pieces[at, first], pieces[at, second] = pieces[at, second], pieces[at, first]
    return pieces.flatten(1)


def zero_tail(rows: torch.Tensor) -> torch.Tensor:
    keep = torch.randint(0, ROW_BYTES - 8, (len(rows), 1))
    return rows * (torch.arange(ROW_BYTES) < keep)


def tail_of_another(rows: torch.Tensor) -> torch.Tensor:
    """A torn write: the block that was there before shows from some byte on."""
    keep = torch.randint(0, ROW_BYTES - 8, (len(rows), 1))
    return torch.where(torch.arange(ROW_BYTES) < keep, rows, rows.roll(1, 0))


FAULTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "one bit": flip_one_bit,
    "top bits of two words": flip_top_bits_of_two_words,
    "a bit of every word": flip_the_same_bit_of_every_word,
    "swapped words": lambda rows: swap(rows, 8),
    "swapped heads": lambda rows: swap(rows, 256),
    "swapped planes": lambda rows: rows.roll(ROW_BYTES // 2, 1),
    "swapped blocks": lambda rows: rows.flip(0),
    "zeroed tail": zero_tail,
    "torn write": tail_of_another,
    "shifted by a word": lambda rows: rows.roll(8, 1),
}


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("data", ["random", "near zero", "signs"])
def test_no_fault_passes_unseen(native: bool, fault: str, data: str) -> None:
    """1,000 blocks under each of ten faults, in data without structure and in data with much: 30,000 in all."""
    rows = random_bytes(1000, ROW_BYTES)
    if data == "near zero":  # fp32 numbers that share sign and exponent
        rows = (1 + rows.view(torch.int32).float().abs() * 2.0**-40).view(torch.uint8)
    elif data == "signs":  # bf16 ones and minus ones
        rows = torch.randn(1000, ROW_BYTES // 2).sign().bfloat16().view(torch.uint8)
    summer = Checksummer(native=native)
    damaged = FAULTS[fault](rows)
    changed = (damaged != rows).any(1)
    assert changed.sum() >= 400  # a swap of equal words is no fault
    assert torch.equal(summer.checksum_rows(rows) != summer.checksum_rows(damaged), changed)


@pytest.mark.parametrize("native", [True, False])
def test_every_single_bit_and_every_pair_of_top_bits_counts(native: bool) -> None:
    summer, row = Checksummer(native=native), random_bytes(1, ROW_BYTES)
    wanted = summer.checksum_rows(row)
    every_bit = flip_bits(row.repeat(ROW_BYTES * 8, 1), torch.arange(ROW_BYTES * 8))
    assert (summer.checksum_rows(every_bit) != wanted).all()
    first, second = torch.triu_indices(ROW_BYTES // 8, ROW_BYTES // 8, offset=1)
    pairs = flip_bits(flip_bits(row.repeat(len(first), 1), first * 64 + 63), second * 64 + 63)
    assert (summer.checksum_rows(pairs) != wanted).all()


@pytest.fixture
def large() -> Planes:
    """Enough for the compiled path: 2 heads, 9 blocks out of a pool, and a small second plane."""
    return random_bytes(2, 12, 64, 512, seed=1)[:, 2:11].view(torch.bfloat16), random_bytes(2, 9, 16, seed=2)


def fake_compiler(kernel: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    return lambda function, **options: kernel


def test_short_uses_never_compile(large: Planes, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(function: object, **options: object) -> None:
        raise AssertionError("compiled")

    monkeypatch.setattr(torch, "compile", refuse)
    summer = Checksummer(native=False)
    summer.checksum(large)
    assert summer.compile_records()["cpu"].state == "waiting"
    off = Checksummer(native=False, compiled=False, compile_after_bytes=0)
    off.checksum(large)
    assert off.compile_records() == {}


def test_failed_compilation_is_recorded_and_harmless(large: Planes, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(function: object, **options: object) -> None:
        raise OSError("no compiler here")

    monkeypatch.setattr(torch, "compile", fail)
    wanted, summer = (
        Checksummer(native=False, compiled=False).checksum(large),
        Checksummer(native=False, compile_after_bytes=0),
    )
    for _ in range(2):
        assert torch.equal(summer.checksum(large), wanted)
    record = summer.compile_records()["cpu"]
    assert record.state == "failed" and record.error == "OSError: no compiler here"


@pytest.mark.parametrize("fault", ["wrong bits", "raises later"])
def test_bad_kernel_is_dropped(fault: str, large: Planes, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def kernel(words: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if fault == "raises later" and calls > 2:
            raise RuntimeError("recompile limit")
        return module._sum_of(words, weights) + (fault == "wrong bits")

    monkeypatch.setattr(torch, "compile", fake_compiler(kernel))
    wanted, summer = (
        Checksummer(native=False, compiled=False).checksum(large),
        Checksummer(native=False, compile_after_bytes=0),
    )
    for _ in range(3):
        assert torch.equal(summer.checksum(large), wanted)
    record = summer.compile_records()["cpu"]
    assert record.state == "failed" and record.error is not None
    assert ("bits differ" if fault == "wrong bits" else "recompile limit") in record.error


def test_other_threads_do_not_wait_for_the_compiler(large: Planes, monkeypatch: pytest.MonkeyPatch) -> None:
    compiling, go_on = threading.Event(), threading.Event()

    def kernel(words: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        compiling.set()
        assert go_on.wait(30)
        return module._sum_of(words, weights)

    monkeypatch.setattr(torch, "compile", fake_compiler(kernel))
    wanted, summer = (
        Checksummer(native=False, compiled=False).checksum(large),
        Checksummer(native=False, compile_after_bytes=0),
    )
    results: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: results.append(summer.checksum(large)))
    thread.start()
    assert compiling.wait(30)
    assert torch.equal(summer.checksum(large), wanted)
    assert summer.compile_records()["cpu"].state == "compiling"
    go_on.set()
    thread.join()
    assert torch.equal(results[0], wanted) and summer.compile_records()["cpu"].state == "ready"


@pytest.fixture
def one_graph_only() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield


@pytest.mark.slow  # one compilation: 3 to 10 seconds
def test_one_compiled_graph_serves_every_layout_and_thread(large: Planes, one_graph_only: None) -> None:
    eager, summer = Checksummer(native=False, compiled=False), Checksummer(native=False, compile_after_bytes=0)
    cases = [large, *((plane,) for plane in large)]
    cases += [(plane.transpose(0, 1).contiguous().transpose(0, 1),) for plane in large]
    cases += [(random_bytes(heads, n, 32, 8192 // heads),) for heads, n in ((1, 40), (4, 2), (2, 1), (1, 1))]
    cases += [(random_bytes(70_000, 2, 8),), (random_bytes(1, 70_000, 8),), (random_bytes(1, 1, 1 << 19),)]
    wanted = [eager.checksum(planes) for planes in cases]
    wrong: list[int] = []

    def check() -> None:
        for i, planes in enumerate(cases * 3):
            if not torch.equal(summer.checksum(planes), wanted[i % len(cases)]):
                wrong.append(i)
            rows = rows_of(planes)
            if not torch.equal(summer.checksum_rows(rows), wanted[i % len(cases)]):
                wrong.append(i)

    check()
    assert summer.compile_records()["cpu"].error is None
    threads = [threading.Thread(target=check) for _ in range(2)]
    for thread in threads:
        thread.start()
    with torch.no_grad():
        check()
    for thread in threads:
        thread.join()
    assert wrong == [] and summer.compile_records()["cpu"].error is None


def test_without_a_compiler_the_bits_are_the_same(large: Planes, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = Checksummer().checksum(large)

    def fail(*args: object) -> None:
        raise OSError("no C++ compiler")

    monkeypatch.setattr(module, "NativeSum", fail)
    summer = Checksummer()
    with pytest.warns(RuntimeWarning, match="slower without C"):
        assert torch.equal(summer.checksum(large), wanted)
    assert summer.native_reason == "checksums: no C++ compiler"


def test_several_threads_share_one_native_kernel(large: Planes) -> None:
    summer = Checksummer()
    results: list[torch.Tensor] = []
    threads = [threading.Thread(target=lambda: results.append(summer.checksum(large))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wanted = Checksummer(native=False).checksum(large)
    assert len(results) == 4 and all(torch.equal(sums, wanted) for sums in results)


def test_several_cores_make_no_difference(large: Planes) -> None:
    before, sums = torch.get_num_threads(), []
    assert large[0].numel() * large[0].element_size() > 2 * 8 * LEAST_WORDS
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            sums.append(Checksummer().checksum(large))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(sums[0], sums[1]) and torch.equal(sums[0], sums[2])
