"""What every tier keeps, whatever its medium: one suite, run for each of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tieredkv.block import Plane, Planes
from tieredkv.checksum import Checksummer
from tieredkv.errors import BudgetError, ClosedError, ConfigError, MismatchError
from tieredkv.tiers import ColdTier, HotTier, Tier, WarmTier, cold_bytes, pack_rows, row_bytes, slot_bytes

Layers = list[tuple[Plane, ...]]

LAYERS: Layers = [
    (Plane("k", torch.bfloat16, 3, (16, 5)), Plane("v", torch.bfloat16, 3, (16, 7))),
    (
        Plane("k", torch.float8_e4m3fn, 2, (16, 4)),
        Plane("k_scale", torch.float32, 2, (16,)),
        Plane("v", torch.float8_e4m3fn, 2, (16, 9)),
        Plane("v_scale", torch.float32, 2, (4, 1)),
    ),
    (Plane("k", torch.uint8, 1, (16, 3)), Plane("v", torch.float64, 1, (16, 1))),
]
TOTAL = 150  # three files, several pieces
COLD = {"block_size": 16, "codec": "raw", "fingerprint": "model"}


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def hot(layers: Layers, slots: int, folder: Path) -> Tier:
    return HotTier(layers, slots, empty)


def warm_one(layers: Layers, slots: int, folder: Path) -> Tier:
    return WarmTier(layers, slots, empty)


def warm_growing(layers: Layers, slots: int, folder: Path) -> Tier:
    return WarmTier(layers, slots, empty, pieces="growing", first_piece_bytes=8 * slot_bytes(layers))


def cold_capped(layers: Layers, slots: int, folder: Path) -> Tier:
    return ColdTier(folder, layers, cap_bytes=cold_bytes(layers, slots, **COLD), **COLD)


def cold_unlimited(layers: Layers, slots: int, folder: Path) -> Tier:
    return ColdTier(folder, layers, **COLD)


MAKERS = [hot, warm_one, warm_growing, cold_capped, cold_unlimited]
Maker = Callable[[Layers, int, Path], Tier]


@pytest.fixture(params=MAKERS, ids=lambda maker: maker.__name__)
def make(request: pytest.FixtureRequest) -> Maker:
    return request.param


@pytest.fixture
def tier(make: Maker, cold_dir: Path) -> Iterator[Tier]:
    made = make(LAYERS, TOTAL, cold_dir)
    yield made
    made.close()


def random_planes(layer: int, blocks: int, layers: Layers = LAYERS) -> Planes:
    """Random bytes, so that a conversion on the way (of a NaN, for example) would show."""
    planes = []
    for plane in layers[layer]:
        data = torch.randint(0, 256, (plane.kv_heads, blocks, plane.block_bytes // plane.kv_heads), dtype=torch.uint8)
        planes.append(data.view(plane.dtype).view(plane.kv_heads, blocks, *plane.inner))
    return tuple(planes)


def as_bytes(planes: Planes) -> list[bytes]:
    return [plane.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for plane in planes]


def picked(planes: Planes, indices: list[int]) -> Planes:
    # index_select has no fp8 kernel everywhere
    return tuple(torch.cat([plane[:, i : i + 1] for i in indices], dim=1) for plane in planes)


def new_planes(layer: int, blocks: int) -> Planes:
    return tuple(plane.empty(blocks) for plane in LAYERS[layer])


@pytest.mark.parametrize("layer", range(len(LAYERS)))
def test_blocks_come_back_bit_for_bit_in_any_order(tier: Tier, layer: int) -> None:
    slots = tier.slots.allocate_many(TOTAL)
    order = random.sample(range(TOTAL), TOTAL)
    written = random_planes(layer, TOTAL)
    tier.write(layer, [slots[i] for i in order], picked(written, order))
    for chosen in (order, list(range(TOTAL)), random.sample(range(TOTAL), 17), [64], []):
        out = new_planes(layer, len(chosen))
        tier.read(layer, [slots[i] for i in chosen], out)
        assert as_bytes(out) == as_bytes(picked(written, chosen) if chosen else out)


def test_layers_and_neighbours_do_not_touch_each_other(tier: Tier) -> None:
    slots = tier.slots.allocate_many(5)
    written = [random_planes(layer, 5) for layer in range(len(LAYERS))]
    for layer, planes in enumerate(written):
        tier.write(layer, slots, planes)
    changed = random_planes(1, 1)
    tier.write(1, [slots[2]], changed)
    for layer, planes in enumerate(written):
        out = new_planes(layer, 5)
        tier.read(layer, slots, out)
        wanted = tuple(plane.clone() for plane in planes)
        if layer == 1:
            for plane, new in zip(wanted, changed, strict=True):
                plane[:, 2:3] = new
        assert as_bytes(out) == as_bytes(wanted)


def test_tensors_of_any_stride_are_taken_and_filled(tier: Tier) -> None:
    slots = tier.slots.allocate_many(4)
    whole = tuple(plane.empty(9).transpose(0, 1).contiguous().transpose(0, 1) for plane in LAYERS[0])
    for plane, values in zip(whole, random_planes(0, 9), strict=True):
        plane.copy_(values)
    tier.write(0, slots, tuple(plane[:, 2:6] for plane in whole))
    out = tuple(torch.zeros_like(plane) for plane in whole)
    tier.read(0, slots, tuple(plane[:, 1:8:2] for plane in out))
    assert as_bytes(tuple(plane[:, 1:8:2] for plane in out)) == as_bytes(tuple(plane[:, 2:6] for plane in whole))
    assert all(not plane[:, 0::2].view(torch.uint8).any() for plane in out)


@pytest.mark.parametrize("layer", range(len(LAYERS)))
def test_what_is_summed_on_the_way_is_what_was_read(tier: Tier, layer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tieredkv.tiers.cold.AT_ONCE_BYTES", 1)
    monkeypatch.setattr("tieredkv.tiers.rows.LEAST_PIECE_BYTES", 1)
    slots, written, summer = tier.slots.allocate_many(TOTAL), random_planes(layer, TOTAL), Checksummer()
    tier.write(layer, slots, written)
    for chosen in (list(range(TOTAL)), random.sample(range(TOTAL), 17), [64]):
        out = new_planes(layer, len(chosen))
        sums = tier.read_summed(layer, [slots[i] for i in chosen], out, summer)
        wanted = picked(written, chosen)
        assert as_bytes(out) == as_bytes(wanted)
        assert sums == summer.checksum(wanted).tolist()
    assert tier.read_summed(layer, slots, new_planes(layer, TOTAL), Checksummer(native=False)) is None


def test_a_run_is_the_tier_s_own_memory_or_none(tier: Tier) -> None:
    slots = tier.slots.allocate_many(TOTAL)
    written = random_planes(0, TOTAL)
    tier.write(0, slots, written)
    for index, start, length in tier.runs(slots):
        views = tier.run(0, start, length)
        if tier.role == "cold":
            assert views is None
            continue
        assert views is not None
        assert as_bytes(views) == as_bytes(tuple(plane[:, index : index + length] for plane in written))
        again = random_planes(0, 1)
        tier.write(0, [start + length - 1], again)
        assert as_bytes(tuple(view[:, -1:] for view in views)) == as_bytes(again)
        views[0].zero_()
        out = new_planes(0, length)
        tier.read(0, list(range(start, start + length)), out)
        assert not out[0].any()


def test_runs_cover_the_slots_in_order(tier: Tier) -> None:
    slots = tier.slots.allocate_many(TOTAL)
    random.shuffle(slots)
    slots = sorted(slots[:60]) + slots[60:90]
    covered = [(index + i, start + i) for index, start, length in tier.runs(slots) for i in range(length)]
    assert covered == list(enumerate(slots))


def test_neighbours_are_joined(tier: Tier) -> None:
    slots = tier.slots.allocate_many(TOTAL)
    assert len(tier.runs(sorted(slots))) < 10
    assert tier.runs([3, 4, 5, 1]) == [(0, 3, 3), (3, 1, 1)]


def test_bytes_are_counted(tier: Tier) -> None:
    assert tier.slot_bytes == sum(plane.block_bytes for planes in LAYERS for plane in planes)
    assert (tier.used_bytes, tier.peak_bytes, tier.reserved_bytes) == (0, 0, 0)
    slots = tier.slots.allocate_many(7)
    for layer in range(len(LAYERS)):
        tier.write(layer, slots, random_planes(layer, 7))
    tier.slots.begin_flight(slots[0])
    for slot in slots[:3]:
        tier.slots.release(slot)
    assert tier.used_bytes == 5 * tier.slot_bytes
    assert tier.peak_bytes == 7 * tier.slot_bytes
    assert tier.reserved_bytes >= tier.peak_bytes


def test_the_budget_is_never_exceeded(tier: Tier) -> None:
    if tier.budget_bytes is None:
        pytest.skip("no limit")
    assert tier.free_blocks() == TOTAL
    slots = tier.slots.allocate_many(TOTAL)
    assert tier.free_blocks() == 0
    for layer in range(len(LAYERS)):
        tier.write(layer, slots, random_planes(layer, TOTAL))
    with pytest.raises(BudgetError) as caught:
        tier.slots.allocate()
    assert caught.value.tier == tier.role
    assert tier.used_bytes <= tier.reserved_bytes <= tier.budget_bytes


def test_memory_made_in_inference_mode_is_written_outside_of_it(tier: Tier) -> None:
    slots = tier.slots.allocate_many(2)
    with torch.inference_mode():
        first = random_planes(0, 2)
        tier.write(0, slots, first)
        out = new_planes(0, 2)
        tier.read(0, slots, out)
        assert as_bytes(out) == as_bytes(first)
    second = random_planes(0, 2)
    tier.write(0, slots, second)
    out = new_planes(0, 2)
    tier.read(0, slots, out)
    assert as_bytes(out) == as_bytes(second)


def test_what_does_not_belong_is_refused(tier: Tier) -> None:
    slots = tier.slots.allocate_many(2)
    good = random_planes(0, 2)
    tier.write(0, slots, good)
    bad: list[tuple[int, list[int], Planes]] = [
        (3, slots, good),
        (-1, slots, good),
        (1, slots, good),
        (0, slots, good[:1]),
        (0, slots, (good[0].float(), good[1])),
        (0, slots, tuple(plane[:, :1] for plane in good)),
        (0, slots, tuple(plane[:1] for plane in good)),
        (0, [slots[0], 10_000], good),
        (0, [-1, slots[0]], good),
    ]
    for layer, where, planes in bad:
        with pytest.raises(MismatchError):
            tier.write(layer, where, planes)
        with pytest.raises(MismatchError):
            tier.read(layer, where, planes)
    out = new_planes(0, 2)
    tier.read(0, slots, out)
    assert as_bytes(out) == as_bytes(good)


def test_closing_twice_is_closing_once_and_nothing_works_afterwards(tier: Tier) -> None:
    slots = tier.slots.allocate_many(1)
    planes = random_planes(0, 1)
    tier.write(0, slots, planes)
    assert not tier.closed
    tier.close()
    tier.close()
    assert tier.closed
    for use in (tier.write, tier.read):
        with pytest.raises(ClosedError):
            use(0, slots, planes)
    if tier.role != "cold":
        with pytest.raises(ClosedError):
            tier.run(0, slots[0], 1)


def test_a_plane_of_odd_bytes_is_refused(make: Maker, cold_dir: Path) -> None:
    with pytest.raises(ConfigError, match="8-byte"):
        make([(Plane("k", torch.uint8, 1, (3,)),)], 4, cold_dir)


def test_a_tier_without_layers_is_refused(make: Maker, cold_dir: Path) -> None:
    with pytest.raises(ConfigError, match="layer"):
        make([], 4, cold_dir)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_operations_agree_with_a_dict(make: Maker, data: st.DataObject, tmp_path_factory: object) -> None:
    folder = tmp_path_factory.mktemp("cold")  # type: ignore[attr-defined]
    tier = make(LAYERS, TOTAL, folder)
    stored: dict[int, list[bytes]] = {}  # slot -> row of each layer
    try:
        for _ in range(data.draw(st.integers(1, 12))):
            action = data.draw(st.sampled_from(["write", "write", "release"]))
            if action == "write":
                count = data.draw(st.integers(1, 40))
                if count > TOTAL - len(stored):
                    continue
                slots = tier.slots.allocate_many(count, data.draw(st.none() | st.integers(0, TOTAL)))
                slots = data.draw(st.permutations(slots))
                rows = []
                for layer in range(len(LAYERS)):
                    planes = random_planes(layer, count)
                    tier.write(layer, slots, planes)
                    rows.append(rows_of(layer, planes))
                stored.update((slot, [layer[i] for layer in rows]) for i, slot in enumerate(slots))
            else:
                for slot in data.draw(st.lists(st.sampled_from(sorted(stored)), unique=True)) if stored else []:
                    tier.slots.release(slot)
                    del stored[slot]
            assert tier.slots.free + tier.slots.live + tier.slots.in_flight == tier.slots.total
            chosen = data.draw(st.permutations(sorted(stored)))
            for layer in range(len(LAYERS)):
                out = new_planes(layer, len(chosen))
                tier.read(layer, chosen, out)
                assert rows_of(layer, out) == [stored[slot][layer] for slot in chosen]
    finally:
        tier.close()


def rows_of(layer: int, planes: Planes) -> list[bytes]:
    rows = torch.empty((planes[0].shape[1], row_bytes(LAYERS[layer])), dtype=torch.uint8)
    pack_rows(LAYERS[layer], planes, rows)
    return [row.numpy().tobytes() for row in rows]
