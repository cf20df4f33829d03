"""A decode step for which all that is not hot is copied and verified: from warm, from cold, from cold on the bare disk.

A figure is given only where every timed step brought up just what was not hot, and compared all of it.

Imports: this package's harness, page_cache, shapes and traffic; tieredkv, torch, transformers.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from benchmarks import harness, page_cache, shapes
from benchmarks.harness import Row
from benchmarks.shapes import BLOCK, step_of
from benchmarks.traffic import STREAM, not_hot
from tieredkv import CacheSettings, TieredCache

LIMITS = {"warm": 1.25, "cold": 1.35}
"""What a step may take over what its computing and its copies take, by where the copies come from."""
BEYOND = 8 * BLOCK
"""Tokens that hot has beside the window: the open block, what has left the window of late, staging."""
MOST_HELD = 0.02
"""Share of the files in the system's memory up to which a step counts as one from the bare disk: a block that is on its
way down meanwhile cannot be dropped."""


class NotStreamedError(RuntimeError):
    """Some step did not do what its figure is about."""


@dataclasses.dataclass(frozen=True)
class Step:
    """What one step brought up, and what it had to.

    Args:
        streamed_bytes: brought up for attention, from wherever.
        tier_bytes: brought up from the tier that the figure is about.
        not_hot_bytes: of the distinct blocks that were not hot.
        not_hot: the same as layer pieces.
        verified: layer pieces that were compared.
        transfer_seconds: spent on bringing them up.
    """

    streamed_bytes: int
    tier_bytes: int
    not_hot_bytes: int
    not_hot: int
    verified: int
    transfer_seconds: float


class Witness:
    """Counts what each step of a cache did, and says whether that was streaming.

    Args:
        cache: of one row.
        tier: where all of it is to come from.
    """

    def __init__(self, cache: TieredCache, tier: str) -> None:
        self._cache, self._tier = cache, tier
        self.steps: list[Step] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """Counts the step that is taken inside the `with`."""
        before = self._counted()
        yield
        # Where blocks lie changes at the next forward's begin: this is what the step found.
        pieces, total = not_hot(self._cache)
        streamed, from_tier, verified, seconds = (now - then for now, then in zip(self._counted(), before, strict=True))
        self.steps.append(Step(int(streamed), int(from_tier), total, pieces, int(verified), seconds))

    def _counted(self) -> tuple[float, float, float, float]:
        stats = self._cache.stats()
        move = stats.moves.get(f"{self._tier}_to_hot")
        decode = stats.decode
        return decode.streamed_bytes, move.bytes if move else 0, stats.verified_blocks, decode.transfer_seconds

    def told(self) -> dict[str, Any]:
        """How the blocks were read, for a row's detail.

        Raises:
            NotStreamedError: some step did not stream all that was not hot, or did not compare it.
        """
        mode, verify = self._cache.mode, self._cache.settings.verify
        wrong = [step for step in self.steps if not _is_streamed(step)]
        if mode != "blocks" or wrong or not self.steps:
            raise NotStreamedError(
                f"no figure of streaming from {self._tier}: mode {mode} ({self._cache.fallback_reason}), verify "
                f"{verify}, {len(wrong)} of {len(self.steps)} steps did not stream and verify all: {wrong[:1]}"
            )
        count = len(self.steps)
        return {
            "mode": mode,
            "verify": verify,
            "steps": count,
            "streamed_bytes_a_step": sum(step.streamed_bytes for step in self.steps) / count,
            "not_hot_bytes_a_step": sum(step.not_hot_bytes for step in self.steps) / count,
            "verified_blocks_a_step": sum(step.verified for step in self.steps) / count,
            "not_hot_blocks_a_step": sum(step.not_hot for step in self.steps) / count,
        }

    def transfer_seconds(self) -> float:
        """The median over the steps."""
        return harness.timing([step.transfer_seconds for step in self.steps]).median_seconds


def _is_streamed(step: Step) -> bool:
    """A block that goes down meanwhile is compared too, so that more may be verified than was brought up."""
    exact = step.streamed_bytes == step.tier_bytes == step.not_hot_bytes > 0
    return exact and step.verified >= step.not_hot


def figures(
    config: LlamaConfig, tokens: int, sizes: Sequence[int], rounds: int, settings: CacheSettings = STREAM
) -> list[Row]:
    """For each window: from warm, from cold with the files in the system's memory, from cold without.

    Where not everything was streamed and verified, a row says so and has no figure.
    """
    model = shapes.two_models(config, torch.float32)[1]
    rows = []
    with TieredCache(model.config, hot=f"{tokens + 2048} tokens", warm=0) as everything:
        shapes.fill(everything, config, tokens, torch.float32)
        for tier in LIMITS:
            for window in sizes:
                try:
                    rows += _of_window(model, everything, tokens, window, tier, rounds, settings)
                except NotStreamedError as error:
                    what = f"streamed from {tier}, window {window}, verified: not measured"
                    rows.append(Row(what, 0.0, "", f"<= {LIMITS[tier]}", False, {"why": str(error)}))
                everything.crop(tokens - everything.get_seq_length())  # or it would grow from window to window
    return rows


def _of_window(
    model: Any,
    everything: TieredCache,
    tokens: int,
    window: int,
    tier: str,
    rounds: int,
    settings: CacheSettings,
) -> list[Row]:
    """The rows of one window and tier; `everything` is the same with all of it hot.

    Raises:
        NotStreamedError: there is no figure.
    """
    config, is_cold = model.config, tier == "cold"
    with (
        tempfile.TemporaryDirectory(prefix="tieredkv-streamed-") as folder,
        TieredCache(
            config,
            hot=f"{window + BEYOND} tokens",
            warm=0 if is_cold else f"{tokens + 2048} tokens",
            cold=folder if is_cold else None,
            window=window,
            settings=settings,
        ) as part,
    ):
        shapes.fill(part, config, tokens, torch.float32)
        steps = {"all hot": step_of(model, everything), "streamed": step_of(model, part)}
        seen = Witness(part, tier)
        times = harness.interleave(steps, rounds=rounds, inner=5, around={"streamed": seen.step})
        if everything.mode != "blocks":
            raise NotStreamedError(f"no figure to compare with: everything hot is in mode {everything.mode}")
        detail = seen.told() | harness.plain(times)
        alone = transfer_core_seconds(steps["streamed"], part, tier, rounds)
        ratio = times["streamed"].median_seconds / (times["all hot"].median_seconds + alone / torch.get_num_threads())
        measure = f"streamed from {tier}, window {window}, verified: step over core-seconds ÷ cores"
        limit, detail = LIMITS[tier], detail | {"transfer_core_seconds_a_step": alone}
        rows = [Row(measure, ratio, "", f"<= {limit}", ratio <= limit, detail)]
        if is_cold:
            rows.append(bare_disk(steps["streamed"], part, Path(folder), window, rounds))
    return rows


def transfer_core_seconds(step: Callable[[], Any], cache: TieredCache, tier: str, steps: int) -> float:
    """What one core, with nothing beside it, takes for the transfers of a step: the least that they cost."""
    threads, seen = torch.get_num_threads(), Witness(cache, tier)
    torch.set_num_threads(1)
    try:
        for _ in range(max(steps, 3)):
            with seen.step():
                step()
    finally:
        torch.set_num_threads(threads)
    seen.told()
    return seen.transfer_seconds()


def bare_disk(step: Callable[[], Any], cache: TieredCache, folder: Path, window: int, rounds: int) -> Row:
    """A step before which the system's memory gave up the cold files; what a disk has in a memory of its own stays."""
    seen, held = Witness(cache, "cold"), list[float]()

    @contextmanager
    def dropped() -> Iterator[None]:
        files = sorted(folder.rglob("*.safetensors"))
        page_cache.drop(files)
        held.append(page_cache.held_share(files))
        with seen.step():
            yield

    times = harness.interleave({"bare disk": step}, rounds=rounds, warmup=0, around={"bare disk": dropped})
    kind, most = page_cache.file_system(folder), max(held)
    detail = seen.told() | {"file_system": kind, "share_held_by_the_system": most} | harness.plain(times)
    what = f"streamed from cold, window {window}, the system's cache dropped before each step"
    if most > MOST_HELD:
        return Row(f"{what}: not measured, on {kind} it holds on to its files", 100 * most, "% held", detail=detail)
    total = detail["streamed_bytes_a_step"]
    rate = total / seen.transfer_seconds()
    detail["read_bytes_per_second"] = rate
    measure = f"{what}: {total / 1e6:.0f} MB read at {rate / 1e9:.2f} GB/s"
    return Row(measure, 1e3 * times["bare disk"].median_seconds, "ms a step", detail=detail)
