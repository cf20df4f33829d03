"""The LoRA example: with an adapter and without, logits and tokens are those without a cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support import assert_close, audit, difference, feed, small, tokens

pytest.importorskip("peft", reason="needs the package peft: pip install -e '.[integrations]'")
# peft still asks transformers by a name that goes away in transformers 6.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

Example = Callable[[str], ModuleType]


def test_logits_and_tokens_are_those_without_a_cache(example: Example, model: Any, cold_dir: Path) -> None:
    ids = tokens(200)
    with torch.no_grad():
        base = model(ids, use_cache=False).logits
        adapted = example("lora").with_random_adapter(model, scale=0.3)
        wanted = adapted(ids, use_cache=False).logits
    assert difference(wanted, base) > 0.1
    with small(adapted, cold_dir) as cache:
        assert_close(feed(adapted, ids, cache, [150, 1, 1, 30]), wanted)
        assert cache.mode == "blocks"
        assert min(cache.stats().warm.peak_blocks, cache.stats().cold.peak_blocks) > 0
        with adapted.disable_adapter():
            cache.reset()
            assert_close(feed(adapted, ids, cache, [150, 1, 1, 30]), base)
        out = example("lora").answer(adapted, ids, cache, max_new_tokens=12)
        with torch.no_grad():
            greedy = adapted(out, use_cache=False).logits[:, 199:-1].argmax(-1)
        assert out[:, 200:].tolist() == greedy.tolist()
        audit(cache)
    assert model.config._attn_implementation != "tieredkv"


def test_keys_of_another_adapter_are_of_no_use(example: Example, model: Any, cold_dir: Path) -> None:
    """Why the example resets: the README says that nothing in a cache can see the change."""
    ids = tokens(100)
    adapted = example("lora").with_random_adapter(model, scale=0.3)
    with small(adapted, cold_dir) as cache, torch.no_grad():
        wanted = adapted(ids, use_cache=False).logits[:, 90:]
        with adapted.disable_adapter():
            adapted(ids[:, :90], past_key_values=cache)
        assert difference(adapted(ids[:, 90:], past_key_values=cache).logits, wanted) > 0.01


def test_it_answers_with_and_without(example: Example, tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example("lora").main(["--model", str(tiny_folder)])
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("with the adapter: ") for line in lines)
    assert lines[-1] == "attention over blocks"


@pytest.mark.slow
def test_it_answers_with_the_real_model(run_real: Callable[..., str]) -> None:
    assert "attention over blocks" in run_real("lora")
