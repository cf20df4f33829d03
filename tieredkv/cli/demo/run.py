"""One measured generation of the demo, from any cache: greedy, its prefill with a progress bar, its tokens timed.

Imports: model, prompt, stock; torch, transformers and rich.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import TextStreamer

from tieredkv.cli.model import Loaded
from tieredkv.cli.prompt import Prompt
from tieredkv.cli.stock import cache_keyword


@dataclasses.dataclass(frozen=True)
class Run:
    """What one generation gave, and when.

    Args:
        tokens: the new tokens.
        text: the new tokens as text.
        logits: [new tokens, vocabulary], fp32, on the CPU: before any processing.
        token_seconds: for each new token, seconds from the start of generate to its arrival.
    """

    tokens: list[int]
    text: str
    logits: torch.Tensor
    token_seconds: list[float]

    @property
    def seconds_to_first_token(self) -> float:
        """The whole prefill."""
        return self.token_seconds[0] if self.token_seconds else 0.0

    @property
    def first_step_seconds(self) -> float:
        """The first decode step, in which attention may be compiled."""
        return self.token_seconds[1] - self.token_seconds[0] if len(self.token_seconds) > 1 else 0.0

    @property
    def tokens_per_second(self) -> float:
        """The rate of the decode steps after the first, 0 when there are none."""
        steps = self.token_seconds[1:]
        return (len(steps) - 1) / (steps[-1] - steps[0]) if len(steps) > 1 else 0.0


class TokenClock(TextStreamer):
    """Notes when each new token arrives, and passes text on.

    Args:
        tokenizer: of the model.
        arrived: called at each new token, with how many there are.
        write: called with each piece of text; None for none.
    """

    def __init__(
        self, tokenizer: Any, arrived: Callable[[int], None], write: Callable[[str], None] | None = None
    ) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.token_seconds: list[float] = []
        self._arrived, self._write = arrived, write
        self._start = time.perf_counter()

    def put(self, value: torch.Tensor) -> None:
        """A new token; the prompt comes first, and is neither timed nor shown."""
        if not self.next_tokens_are_prompt:
            self.token_seconds.append(time.perf_counter() - self._start)
            self._arrived(len(self.token_seconds))
        super().put(value)  # type: ignore[no-untyped-call]

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Text that no later token changes."""
        if self._write is not None:
            self._write(text + ("\n" if stream_end else ""))


def generate(
    loaded: Loaded, prompt: Prompt, cache: Any, *, new_tokens: int, chunk_tokens: int, console: Console, stream: bool
) -> Run:
    """Answer the prompt from an empty cache, greedily.

    Args:
        loaded: model and tokenizer.
        prompt: what to answer.
        cache: any transformers cache, empty.
        new_tokens: most tokens of the answer; it ends earlier where the model ends it.
        chunk_tokens: tokens of one prefill forward, 0 for the whole prompt in one.
        console: where progress and text go.
        stream: show the answer as it comes; otherwise progress only.
    """
    ids = prompt.input_ids.to(loaded.model.device)
    columns = (BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    progress = Progress(TextColumn("  {task.description}"), *columns, console=console, transient=stream)
    prefill = progress.add_task(f"reads {prompt.tokens:,} tokens")
    decode = progress.add_task(f"writes up to {new_tokens} tokens", total=new_tokens, visible=False)

    def arrived(count: int) -> None:
        if count == 1:
            progress.update(prefill, completed=1.0, total=1.0)
            if stream:
                progress.stop()
        progress.update(decode, completed=count, visible=True)

    def write(text: str) -> None:
        console.print(text, end="", style="italic", markup=False, highlight=False, emoji=False, soft_wrap=True)

    clock = TokenClock(loaded.tokenizer, arrived, write if stream else None)
    with progress, prefill_steps(loaded.model, prompt.tokens, lambda done: progress.update(prefill, completed=done)):
        progress.update(prefill, total=1.0)
        out = loaded.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=new_tokens,
            prefill_chunk_size=chunk_tokens or None,
            streamer=clock,
            output_logits=True,
            return_dict_in_generate=True,
            **{cache_keyword(loaded.model): cache},
        )
    tokens = out.sequences[0, prompt.tokens :].tolist()
    logits = torch.cat([step.float().cpu() for step in out.logits])  # [new tokens, vocabulary]
    text = str(loaded.tokenizer.decode(tokens, skip_special_tokens=True))
    return Run(tokens, text, logits, clock.token_seconds)


@contextlib.contextmanager
def prefill_steps(model: Any, prompt_tokens: int, done: Callable[[float], None]) -> Iterator[None]:
    """Report the share of the prompt that is through the layers, after each layer of each forward."""
    layers = decoder_layers(model)
    seen = 0

    def after(module: torch.nn.Module, inputs: object, output: Any) -> None:
        nonlocal seen
        hidden = output[0] if isinstance(output, tuple) else output  # [1, tokens, hidden]
        seen += hidden.shape[1]
        done(min(seen / (prompt_tokens * len(layers)), 1.0))

    hooks = [layer.register_forward_hook(after) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def decoder_layers(model: Any) -> list[torch.nn.Module]:
    """The model's decoder layers, or nothing where they are not one list of modules."""
    count = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", 0)
    lists = (module for module in model.modules() if isinstance(module, torch.nn.ModuleList) and len(module) == count)
    return list(next(lists, []))
