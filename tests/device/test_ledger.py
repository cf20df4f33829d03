"""All caches together never exceed a memory."""

from __future__ import annotations

import gc

import pytest

from tieredkv.device import Ledger
from tieredkv.errors import BudgetError


class Owner:
    """Something that is promised memory."""


def test_promises_add_up_and_are_released() -> None:
    ledger, first, second = Ledger(), Owner(), Owner()
    ledger.promise(first, "cpu", 60, 100, "hot")
    with pytest.raises(BudgetError, match="40 bytes of 100") as refused:
        ledger.promise(second, "cpu", 41, 100, "warm")
    assert refused.value.tier == "warm"
    ledger.promise(second, "cuda:0", 41, 100, "hot")
    ledger.promise(second, "cpu", 40, 100, "warm")
    assert ledger.promised_bytes("cpu") == 100
    ledger.release(first)
    assert ledger.promised_bytes("cpu") == 40
    assert ledger.promised_bytes("cuda:0") == 41


def test_an_owner_that_is_gone_has_no_promises() -> None:
    ledger, owner = Ledger(), Owner()
    ledger.promise(owner, "cpu", 60, 100, "hot")
    del owner
    gc.collect()
    assert ledger.promised_bytes("cpu") == 0


def test_an_owner_may_be_collected_while_promises_are_added_up() -> None:
    """The collector runs inside any allocation, and the end of what it finds gives promises up."""
    ledger, owners = Ledger(), [Owner() for _ in range(3)]

    class Promises(dict[str, int]):
        def get(self, memory: str, default: int = 0) -> int:  # type: ignore[override]
            while len(owners) > 1:
                ledger.release(owners.pop())
            return super().get(memory, default)

    for owner in owners:
        ledger.promise(owner, "cpu", 10, 100, "hot")
    ledger._promises[owners[0]] = Promises(cpu=10)
    assert ledger.promised_bytes("cpu") == 10
    ledger.promise(owners[0], "cpu", 90, 100, "hot")
