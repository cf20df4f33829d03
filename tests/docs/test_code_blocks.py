"""Every Python block of the README and of docs/ runs, with a small model in the place of the one it names.

A block sees `model`, `tokenizer`, `inputs` and `cache` as a reader would have them. `import transformers` inside it
gives a stand-in whose `from_pretrained` returns the small model; nothing of transformers itself is changed. Folders
that a block names for a cold tier lie in the test's own folder, and sizes are 4 MiB. The blocks of one file run in
order and share their names, but for `cache`, which is new and filled for each. A block after `<!-- not run: reason -->`
is not run, and is counted.
"""

from __future__ import annotations

import builtins
import re
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support import SIZES, tiny, tokens

import tieredkv

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "integrations").rglob("*.md"))]
BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^\n]+) -->\n+)?```python\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE
)
NOT_RUN = 1
"""How many blocks are not run. Give a reason there, and raise this, to add one."""

SIZE = re.compile(r'"\d+ ?[MG]i?B"')
FOLDER = re.compile(r'"/(?:nvme|path)[^"]*"')
PROMPT_TOKENS = 200


class Tokenizer:
    """Stands in for a tokenizer: the same ids for every text."""

    chat_template = None
    pad_token = "<pad>"

    def __call__(self, text: Any, **options: Any) -> transformers.BatchEncoding:
        ids = tokens(PROMPT_TOKENS, rows=len(text) if isinstance(text, list) else 1)
        return transformers.BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})

    def decode(self, ids: Any, **options: Any) -> str:
        return " ".join(str(int(i)) for i in ids)


class StandIn(types.ModuleType):
    """transformers, but for `from_pretrained` and for `pipeline`."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        super().__init__("transformers")
        self.AutoModelForCausalLM = types.SimpleNamespace(from_pretrained=lambda *names, **options: model)
        self.AutoTokenizer = types.SimpleNamespace(from_pretrained=lambda *names, **options: tokenizer)
        self.pipeline = lambda task, model, tokenizer: (
            lambda text, **options: model.generate(**tokenizer(text), **options)
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(transformers, name)


def blocks_of(page: Path) -> list[tuple[str, str | None]]:
    """(code, reason not to run it) of each Python block, in order."""
    return [(found["code"], found["reason"]) for found in BLOCK.finditer(page.read_text(encoding="utf-8"))]


def names_for(folder: Path) -> dict[str, Any]:
    """What a block finds: see the module's docstring."""
    model, tokenizer = tiny(), Tokenizer()
    model.generation_config.max_new_tokens = 4
    stand_in = StandIn(model, tokenizer)

    def import_(name: str, *arguments: Any, **options: Any) -> Any:
        return stand_in if name == "transformers" else builtins.__import__(name, *arguments, **options)

    return {
        "__builtins__": vars(builtins) | {"__import__": import_, "print": lambda *values: [str(v) for v in values]},
        "__name__": "__block__",
        "model": model,
        "adapted_model": model,
        "tokenizer": tokenizer,
        "inputs": tokenizer("text"),
        "name": "name",
        "folder": str(folder / "cold"),
        "tieredkv": tieredkv,
        "torch": torch,
    }


PAGES_WITH_BLOCKS = [page for page in PAGES if blocks_of(page)]


@pytest.mark.parametrize("page", PAGES_WITH_BLOCKS, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path) -> None:
    names = names_for(tmp_path)
    for number, (code, reason) in enumerate(blocks_of(page)):
        if reason is not None:
            continue
        code = SIZE.sub('"4MiB"', FOLDER.sub(lambda found: repr(str(tmp_path / "cold")), code))
        with tieredkv.TieredCache(names["model"], **SIZES, cold=tmp_path / "filled") as names["cache"], torch.no_grad():
            names["model"](names["inputs"]["input_ids"][:, :150], past_key_values=names["cache"])
            exec(compile(code, f"{page.name}, block {number}", "exec"), names)


def test_blocks_that_are_not_run_have_a_reason_and_are_counted() -> None:
    reasons = [reason for page in PAGES for _, reason in blocks_of(page) if reason is not None]
    assert len(reasons) == NOT_RUN, reasons


def test_no_block_escapes() -> None:
    """Every fence that says python is seen by BLOCK, so that none is left out by a space or an indent."""
    for page in PAGES:
        fences = re.findall(r"^\s*```\s*(?:python|py)\b", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert len(fences) == len(blocks_of(page)), page


def test_a_wrong_block_is_seen(tmp_path: Path) -> None:
    names = names_for(tmp_path)
    code = "from transformers import AutoModelForCausalLM\nAutoModelForCausalLM.from_pretrained('x').no_such_method()"
    with pytest.raises(AttributeError, match="no_such_method"):
        exec(compile(code, "block", "exec"), names)
