"""The evaluation example: scores through the cache are those without one, and shared contexts are read once."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support import audit, small, tokens

Example = Callable[[str], ModuleType]
# The harness brings forty packages, whose warnings are not ours.
OTHERS_WARN = pytest.mark.filterwarnings("default")
HARNESS = Path(__file__).parents[2] / "integrations" / "evaluation" / "harness.py"


@torch.no_grad()
def score_without_cache(model: Any, context: list[int], choice: list[int]) -> tuple[float, bool]:
    ids = torch.tensor([[*context, *choice]])
    logs = model(ids, use_cache=False).logits[0, len(context) - 1 : -1].log_softmax(-1)
    wanted = torch.tensor(choice)
    return float(logs.gather(1, wanted[:, None]).sum()), logs.argmax(-1).tolist() == choice


def greedy(model: Any, context: list[int], count: int) -> list[int]:
    out = model.generate(torch.tensor([context]), max_new_tokens=count, do_sample=False)
    return out[0, len(context) :].tolist()


def test_scores_are_those_without_a_cache(example: Example, model: Any, cold_dir: Path) -> None:
    document = tokens(150)[0].tolist()
    contexts = [document + tokens(count, seed=count)[0].tolist() for count in (20, 7, 40)]
    contexts += [contexts[-1], document, tokens(30, seed=9)[0].tolist()]  # the same again, a prefix, another text
    with small(model, cold_dir, hot="200 tokens") as cache:
        scorer = example("evaluation").Scorer(model, cache)
        for number, context in enumerate(contexts):
            choices = [tokens(count, seed=number * 7 + count)[0].tolist() for count in (1, 3, 9)]
            choices.append(greedy(model, context, 5))
            for (log, written), choice in zip(scorer.score(context, choices), choices, strict=True):
                wanted, wanted_written = score_without_cache(model, context, choice)
                assert log == pytest.approx(wanted, rel=1e-4)
                assert written == wanted_written
            assert written  # the last choice is the greedy one
            assert cache.get_seq_length() == len(context)
        assert cache.mode == "blocks"
        assert min(cache.stats().warm.peak_blocks, cache.stats().cold.peak_blocks) > 0
        assert scorer.tokens_read < sum(map(len, contexts))
        audit(cache)


def test_one_token_choices_need_one_forward(example: Example, model: Any, cold_dir: Path) -> None:
    context = tokens(40)[0].tolist()
    with small(model, cold_dir) as cache:
        scores = example("evaluation").Scorer(model, cache).score(context, [[5], [6], [7]])
        assert [log for log, _ in scores] == pytest.approx(
            [score_without_cache(model, context, [choice])[0] for choice in (5, 6, 7)], rel=1e-4
        )
        assert cache.stats().prefill.forwards + cache.stats().decode.forwards == 1


def test_it_counts_what_was_read(example: Example, tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example("evaluation").main(["--model", str(tiny_folder), "--tokens", "600"])
    last = capsys.readouterr().out.splitlines()[-1]
    assert "of 4 right" in last
    assert "tokens read, instead of" in last


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("lm_eval", reason="needs the package lm-eval: pip install -e '.[integrations]'")
    monkeypatch.syspath_prepend(str(HARNESS.parent))
    return importlib.import_module("harness")


@OTHERS_WARN
def test_the_harness_gets_the_scores_of_its_own_model(
    harness: ModuleType, model: Any, byte_tokenizer: Any, cold_dir: Path
) -> None:
    from lm_eval.api.instance import Instance

    document = "one long text that questions share " * 4
    pairs = [(document + question, choice) for question in ("a", "bc") for choice in (" yes", " no", " maybe so")]
    pairs += [("", "an empty context"), (document, " x")]
    requests = [Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=i) for i, pair in enumerate(pairs)]
    wanted = harness.HFLM(pretrained=model, tokenizer=byte_tokenizer).loglikelihood(requests, disable_tqdm=True)
    with small(model, cold_dir, hot="200 tokens") as cache:
        ours = harness.TieredLM(model, byte_tokenizer, cache)
        got = ours.loglikelihood(requests, disable_tqdm=True)
        assert [log for log, _ in got] == pytest.approx([log for log, _ in wanted], rel=1e-4)
        assert [written for _, written in got] == [written for _, written in wanted]
        until = [
            Instance("generate_until", {}, (document + text, {"until": ["zz"], "max_gen_toks": 8}), i)
            for i, text in enumerate(("a", "bcd"))
        ]
        stock = harness.HFLM(pretrained=model, tokenizer=byte_tokenizer, batch_size=2)
        assert ours.generate_until(until, disable_tqdm=True) == stock.generate_until(until, disable_tqdm=True)
        assert cache.get_seq_length() > 0
        audit(cache)


@OTHERS_WARN
def test_the_harness_runs_a_task(harness: ModuleType, tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    harness.main(["--model", str(tiny_folder), "--characters", "500"])
    out = capsys.readouterr().out
    assert "python_modules {" in out
    assert "tokens read" in out


@pytest.mark.slow
def test_it_scores_the_real_model(run_real: Callable[..., str]) -> None:
    assert "tokens read, instead of" in run_real("evaluation")
