"""Runs the whole matrix and writes docs/models.md: `make models`, or `python -m models.report MODEL_TYPE...` to look.

Imports: families, matrix, pool; transformers.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import transformers
from models.families import FAMILIES, every_model_type
from models.matrix import SENSITIVE, Outcome, Scores
from models.pool import examine_all

PAGE = Path(__file__).parents[2] / "docs" / "models.md"

MEANINGS = {
    "blocks": "exact, attention over blocks where they lie",
    "gather": "exact, whole K and V of one layer at a time gathered for the model's own attention",
    "untiered": "exact, and nothing to tier: windows and states stay on the device, as in transformers' own cache",
    "refused": "`TieredCache(...)` raises `UnsupportedModelError`, which says why",
    "stock fails": "transformers' own cache is wrong or fails too, so there is nothing to hold ours against",
    "not built": "no tiny model could be built of the class, or it took too long",
    "error": "ours fails where transformers' own cache does not",
    "wrong": "silently wrong",
}
SHOWN_IF_NONE = ("error", "wrong")


def note(outcome: Outcome) -> str:
    """What a reader wants to know beyond the verdict."""
    verdict, notes = outcome.verdict, []
    if verdict == "not built":
        notes.append(outcome.failure)
    elif verdict in ("stock fails", "error", "wrong"):
        notes += [_scores("stock", outcome.stock), *(_scores(way, run.scores) for way, run in outcome.runs.items())]
    elif verdict in ("gather", "refused"):
        notes.append(outcome.runs["blocks"].reason or "")
    if verdict in ("blocks", "gather", "untiered"):
        inexact = [step for step, score in outcome.stock.items() if outcome.differs(step)]
        if inexact:
            notes.append("transformers' own cache is not exact or fails here: " + ", ".join(inexact))
    return "; ".join(text for text in notes if text).replace("|", "\\|").replace("\n", " ")


def _scores(name: str, scores: Scores) -> str:
    shown = ", ".join(f"{step} {score if isinstance(score, str) else f'{score:.0e}'}" for step, score in scores.items())
    return f"{name}: {shown}"


def counts(outcomes: Sequence[Outcome]) -> list[str]:
    """The figures, as lines of Markdown."""
    verdicts = Counter(outcome.verdict for outcome in outcomes)
    stock = [outcome for outcome in outcomes if outcome.stock_exact]
    exact = [outcome for outcome in stock if outcome.verdict in ("blocks", "gather", "untiered")]
    tiered = [outcome for outcome in exact if outcome.verdict != "untiered"]
    blocks = [outcome for outcome in exact if outcome.verdict == "blocks"]

    def share(some: Sequence[Outcome], of: Sequence[Outcome]) -> str:
        return f"{len(some)} of {len(of)} ({100 * len(some) / max(len(of), 1):.0f} %)"

    lines = [
        "| measure | classes |",
        "| --- | --- |",
        f"| model types | {len(outcomes)} |",
        f"| exact with transformers' `DynamicCache` | {len(stock)} |",
        f"| of these, exact with `TieredCache` | {share(exact, stock)} |",
        f"| of these, in blocks | {share(blocks, exact)} |",
        f"| in blocks, of those with something to tier | {share(blocks, tiered)} |",
    ]
    lines += ["", "| result | classes | meaning |", "| --- | --- | --- |"]
    for verdict, meaning in MEANINGS.items():
        if verdicts[verdict] or verdict in SHOWN_IF_NONE:
            lines.append(f"| {verdict} | {verdicts[verdict]} | {meaning} |")
    return lines


def page(outcomes: Sequence[Outcome]) -> str:
    """docs/models.md."""
    order = {name: index for index, name in enumerate(every_model_type())}
    outcomes = sorted(outcomes, key=lambda outcome: order[outcome.model_type])
    blind = sorted(o.model_type for o in outcomes if o.stock_exact and o.sensitivity < SENSITIVE)
    lines = [
        "# Models",
        "",
        "<!-- Written by `make models`; do not edit. -->",
        "",
        f"Every causal LM class of transformers {transformers.__version__}, built with a few layers and random "
        "weights, and held against a forward without any cache, in float64 where the class runs in it: a prompt of 100 "
        "tokens in two rows, decoding, a chunk of tokens, reordered rows, and crops as speculation makes them. Hot "
        "holds 64 tokens of each row, warm 32, the disk the rest, in blocks of 16. Exact means that no logit is off by "
        "more than rounding: 1e-5 of the largest, or four times what transformers' own cache is off by, if that is "
        "more.",
        "",
        *counts(outcomes),
        "",
        "What `TieredCache(model)` does with each. Layers are those of transformers' cache for the tiny config.",
        "",
        "| model type | class | layers | result | note |",
        "| --- | --- | --- | --- | --- |",
    ]
    for outcome in outcomes:
        name = f"**{outcome.model_type}**" if outcome.model_type in FAMILIES else outcome.model_type
        row = (name, outcome.name, outcome.layers, outcome.verdict, note(outcome))
        lines.append("| " + " | ".join(row) + " |")
    lines += ["", "In bold: the families that people use most, which CI runs on every change."]
    if blind:
        lines += ["", f"Logits that hardly depend on early tokens, so that errors would not show: {', '.join(blind)}."]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run model types, all by default; write the page if it was all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_types", nargs="*")
    parser.add_argument("--workers", type=int, default=2)
    chosen = parser.parse_args(arguments)
    outcomes = []
    for outcome in examine_all(chosen.model_types or every_model_type(), workers=chosen.workers):
        outcomes.append(outcome)
        print(f"{outcome.seconds:5.1f} s  {outcome.model_type:24} {outcome.verdict:12} {note(outcome)}", flush=True)
    if not chosen.model_types:
        PAGE.write_text(page(outcomes), encoding="utf-8")
    bad = [outcome.model_type for outcome in outcomes if outcome.verdict in SHOWN_IF_NONE]
    print("\n".join([*counts(outcomes), f"bad: {', '.join(bad) or 'none'}"]))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
