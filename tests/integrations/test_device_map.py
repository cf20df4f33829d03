"""The device_map example: with weights on disk or offloaded, logits and tokens are those of the whole model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support import assert_close, audit, feed, small, tokens

Example = Callable[[str], ModuleType]


def place(module: ModuleType, model: Any, way: str, folder: Path) -> None:
    if way == "offload":
        module.offload(model, "cpu")
        return
    half = sum(weight.nbytes for weight in model.parameters()) // 2
    devices = module.spread(model, {"cpu": half}, str(folder))
    assert set(devices.values()) == {"cpu", "disk"}


@pytest.mark.parametrize("way", ["spread", "offload"])
def test_logits_and_tokens_are_those_of_the_whole_model(
    example: Example, model: Any, cold_dir: Path, tmp_path: Path, way: str
) -> None:
    module, ids = example("device_map"), tokens(200)
    with torch.no_grad():
        wanted = model(ids, use_cache=False).logits
        whole = model.generate(ids, max_new_tokens=12, do_sample=False)
    place(module, model, way, tmp_path / "weights")
    assert any(weight.device.type == "meta" for weight in model.parameters())
    with small(model, cold_dir) as cache:
        assert_close(feed(model, ids, cache, [150, 1, 1, 30]), wanted)
        assert cache.mode == "blocks"
        assert min(cache.stats().warm.peak_blocks, cache.stats().cold.peak_blocks) > 0
        cache.reset()
        assert module.answer(model, ids, cache, max_new_tokens=12).tolist() == whole.tolist()
        audit(cache)


def test_memory_is_given_as_accelerate_wants_it(example: Example) -> None:
    assert example("device_map").parse_memory(["0=10GiB", "cpu=32GiB"]) == {0: "10GiB", "cpu": "32GiB"}


def test_it_says_where_the_weights_are(example: Example, tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example("device_map").main(["--model", str(tiny_folder)])
    out = capsys.readouterr().out
    assert "'cpu': " in out
    assert "'disk': " in out


@pytest.mark.slow
def test_it_answers_with_the_real_model(run_real: Callable[..., str]) -> None:
    assert "'disk': " in run_real("device_map")
