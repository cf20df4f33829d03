"""The token ids of a cache, however they came: one at a time, many at once, taken back, copied."""

from __future__ import annotations

import pytest
import torch

from tieredkv.hf.rates import Rates
from tieredkv.hf.watching import TokenWatch

ROWS = 2


def watch_of(ids: torch.Tensor) -> TokenWatch:
    return TokenWatch("seed", "salt", Rates(), ids)


@pytest.mark.parametrize("seed", range(12))
def test_known_ids_are_those_that_were_seen(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)

    def draw(limit: int) -> int:
        return int(torch.randint(limit, (), generator=random))

    want = torch.randint(99, (ROWS, draw(5)), generator=random)
    watch = watch_of(want)
    for _ in range(300):
        action = draw(40)
        if action == 0:
            want = want[:, : draw(want.shape[1] + 1)]
            watch.crop(want.shape[1])
        elif action == 1:
            rows = [draw(ROWS) for _ in range(ROWS)]
            want = want[rows]
            watch.select(rows)
        elif action == 2:
            watch = watch.fork()
        elif action == 3:
            assert watch.known().tolist() == want.tolist()
        else:
            new = torch.randint(99, (ROWS, 1 if action > 8 else 1 + draw(30)), generator=random)
            watch.saw(want.shape[1], new, None, None)
            want = torch.cat([want, new], 1)
            new.fill_(-1)  # the caller uses its tensor again
    assert watch.known().tolist() == want.tolist()


def test_a_forward_that_nobody_saw_ends_what_is_known() -> None:
    watch = watch_of(torch.tensor([[1, 2, 3]]))
    watch.saw(3, torch.tensor([[4]]), None, None)
    watch.saw(6, torch.tensor([[7]]), None, None)
    assert watch.known().tolist() == [[1, 2, 3, 4]]


def test_ids_behind_a_mask_or_other_positions_are_not_known() -> None:
    watch = watch_of(torch.tensor([[1, 2]]))
    watch.saw(2, torch.tensor([[3]]), torch.tensor([[1, 1, 1]]), torch.tensor([[2]]))
    watch.saw(3, torch.tensor([[4]]), torch.tensor([[0, 1, 1, 1]]), None)
    watch.saw(4, torch.tensor([[5]]), None, torch.tensor([[4]]))
    assert watch.known().tolist() == [[1, 2, 3]]
    watch.saw(3, torch.tensor([[6]]), None, torch.tensor([[9]]))
    assert watch.known().tolist() == [[1, 2, 3]]
