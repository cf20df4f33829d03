"""Errors say what was wanted, what was got and what to change, and survive pickling."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from tieredkv import errors
from tieredkv.errors import BudgetError, ChecksumError, StepError, TieredKVError

KINDS = sorted(
    (kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, TieredKVError)),
    key=lambda kind: kind.__name__,
)

ALSO = {
    "BudgetError": MemoryError,
    "ColdTierError": OSError,
    "ConfigError": ValueError,
    "MismatchError": ValueError,
    "PositionError": ValueError,
    "UnsupportedModelError": TypeError,
}


def make(kind: type[TieredKVError]) -> TieredKVError:
    if kind is ChecksumError:
        return ChecksumError(block=7, layer=3, tier="cold", wanted=-1, got=2)
    if kind is StepError:
        return StepError(2, make(BudgetError))
    more: dict[str, Any] = {"tier": "warm"} if kind is BudgetError else {}
    return kind("It broke.", wanted="a whole", got="a half", change="add a half", **more)


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_says_what_is_needed(kind: type[TieredKVError]) -> None:
    error = make(kind)
    for part in (error.what, str(error.wanted), str(error.got), error.change):
        assert part and part in str(error)
    assert isinstance(error, ALSO.get(kind.__name__, Exception))


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_survives_pickling(kind: type[TieredKVError]) -> None:
    """Errors cross process borders (worker pools), and come out as they were."""
    error = make(kind)
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is kind
    assert str(back) == str(error)
    assert {name: repr(value) for name, value in vars(back).items()} == {
        name: repr(value) for name, value in vars(error).items()
    }


def test_a_budget_error_names_the_tier() -> None:
    error = make(BudgetError)
    assert isinstance(error, BudgetError)
    assert error.tier == "warm"


def test_a_checksum_error_names_block_layer_tier_and_both_values() -> None:
    error = make(ChecksumError)
    assert isinstance(error, ChecksumError)
    assert (error.block, error.layer, error.tier) == (7, 3, "cold")
    for part in ("7", "3", "cold", "0xffffffffffffffff", "0x0000000000000002"):
        assert part in str(error)
