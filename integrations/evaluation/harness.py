"""The same scoring inside lm-evaluation-harness: a model of the harness whose K and V live in a TieredCache.

python integrations/evaluation/harness.py                                       # the questions of evaluation.py
python integrations/evaluation/harness.py --model PATH-OR-ID --tasks arc_easy   # downloads what the task wants
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from typing import Any

import datasets
import pyarrow
import torch
from evaluation import QUESTIONS, Scorer
from lm_eval import simple_evaluate
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.huggingface import HFLM

import tieredkv
from tieredkv.cli.model import load, quiet
from tieredkv.cli.prompt import python_prose


class TieredLM(HFLM):
    """The harness's own transformers model, which scores and generates through a cache.

    Args:
        model: a transformers causal language model.
        tokenizer: its tokenizer.
        cache: an empty TieredCache, with sizes in bytes where the harness also generates, in batches of any size.
        options: those of HFLM.
    """

    def __init__(self, model: Any, tokenizer: Any, cache: tieredkv.TieredCache, **options: Any) -> None:
        super().__init__(pretrained=model, tokenizer=tokenizer, **options)
        self.cache, self.scorer = cache, Scorer(model, cache)

    def _loglikelihood_tokens(
        self, requests: Any, disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Requests of one context are scored together; contexts come sorted, so that neighbours share most."""
        if any(len(context) + len(choice) > self.max_length + 1 for _, context, choice in requests):
            # These have to be cut on the left, which the harness does, and leaves nothing to share.
            return super()._loglikelihood_tokens(requests, disable_tqdm, override_bs)
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, (_, context, _) in enumerate(requests):
            groups.setdefault(tuple(context), []).append(index)
        scores: dict[int, tuple[float, bool]] = {}
        for context in sorted(groups):
            found = self.scorer.score(context, [requests[index][2] for index in groups[context]])
            scores.update(zip(groups[context], found, strict=True))
        for index, (request, _, _) in enumerate(requests):
            if request is not None:
                self.cache_hook.add_partial("loglikelihood", request, scores[index])
        return [scores[index] for index in range(len(requests))]

    def _model_generate(self, context: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        self.cache.reset()
        self.scorer.held = []
        out: torch.Tensor = super()._model_generate(context, *arguments, past_key_values=self.cache, **options)
        return out


def own_task(document: str) -> ConfigurableTask:
    """The questions of evaluation.py as a task of the harness, each after the same document."""
    rows = [
        {"text": f"{document}\n\nQuestion: {question}\nAnswer:", "choices": [c.strip() for c in choices], "best": best}
        for question, choices, best in QUESTIONS
    ]
    # With a fingerprint of its own, or it makes one by pickling the table, which fails with some versions of pyarrow.
    questions = datasets.Dataset(pyarrow.Table.from_pylist(rows), fingerprint="python_modules")
    return ConfigurableTask(
        config={
            "task": "python_modules",
            "custom_dataset": lambda **_: {"test": questions},
            "test_split": "test",
            "output_type": "multiple_choice",
            "doc_to_text": "text",
            "doc_to_choice": "choices",
            "doc_to_target": "best",
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        }
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Evaluate, and print the harness's figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder, a .gguf file or a hub id")
    parser.add_argument("--tasks", nargs="+", help="names of the harness's tasks; by default one of our own")
    parser.add_argument("--limit", type=int, help="questions of each task")
    parser.add_argument("--characters", type=int, default=6000, help="of the text that our own questions share")
    chosen = parser.parse_args(arguments)
    with quiet(), tempfile.TemporaryDirectory() as cold:
        loaded = load(chosen.model, torch.float32, None)
        tasks = chosen.tasks or [own_task(python_prose()[: chosen.characters])]
        with tieredkv.TieredCache(loaded.model, hot="256MiB", warm="512MiB", cold=cold, block_size=64) as cache:
            model = TieredLM(loaded.model, loaded.tokenizer, cache)
            results = simple_evaluate(model=model, tasks=tasks, limit=chosen.limit, bootstrap_iters=0)
    for name, figures in results["results"].items():
        print(name, {key: value for key, value in figures.items() if isinstance(value, float)})
    print(f"{model.scorer.tokens_read:,} tokens read")


if __name__ == "__main__":
    main()
