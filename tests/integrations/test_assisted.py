"""The assisted decoding example: tokens are the model's own, in fewer forwards where the guesses are good."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support import assert_close, audit, small, tokens

Example = Callable[[str], ModuleType]
Holds = Callable[[Any, Any, torch.Tensor], None]


@pytest.mark.parametrize("assistant", ["lookup", "shallow", "itself"])
def test_tokens_are_the_models_own(
    example: Example, model: Any, assert_holds: Holds, cold_dir: Path, assistant: str
) -> None:
    module = example("assisted")
    ids = tokens(30).repeat(1, 7)  # repeats itself, for the lookup
    guesser = {"lookup": None, "shallow": module.shallow(model, 1), "itself": model}[assistant]
    with small(model, cold_dir) as cache:
        out = module.answer(model, ids, cache, guesser, max_new_tokens=40)
        with torch.no_grad():
            wanted = model(out, use_cache=False).logits[:, ids.shape[1] - 1 : -1].argmax(-1)
        assert out[:, ids.shape[1] :].tolist() == wanted.tolist()
        assert_holds(model, cache, torch.cat([out[:, : cache.get_seq_length()], torch.tensor([[5, 6, 7]])], 1))
        stats = cache.stats()
        assert stats.mode == "blocks"
        assert stats.warm.peak_blocks > 0
        if assistant == "itself":
            assert stats.prefill.forwards + stats.decode.forwards < 25
        audit(cache)


def test_a_shallow_assistant_is_the_models_first_layers(example: Example, model: Any) -> None:
    ids = tokens(20)
    whole, first = example("assisted").shallow(model, 3), example("assisted").shallow(model, 1)
    with torch.no_grad():
        assert_close(whole(ids).logits, model(ids).logits)
        hidden = model(ids, output_hidden_states=True).hidden_states[1]
        assert_close(first(ids).logits, model.lm_head(model.model.norm(hidden)))
    assert first.lm_head.weight.data_ptr() == model.lm_head.weight.data_ptr()


@pytest.mark.parametrize("assistant", [[], ["--assistant", "shallow"], ["--assistant", "itself"]])
def test_it_counts_forwards(
    example: Example, tiny_folder: Path, capsys: pytest.CaptureFixture[str], assistant: list[str]
) -> None:
    assistant = [str(tiny_folder) if value == "itself" else value for value in assistant]
    arguments = ["--model", str(tiny_folder), "--tokens", "800", "--new-tokens", "8", *assistant]
    example("assisted").main(arguments)
    assert "8 tokens in " in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("assistant", [[], ["--assistant", "shallow"]])
def test_it_answers_with_the_real_model(run_real: Callable[..., str], assistant: list[str]) -> None:
    assert "32 tokens in " in run_real("assisted", *assistant)
