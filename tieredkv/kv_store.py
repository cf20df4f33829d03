"""`KVStore`: blocks that outlive caches, so that what was prefilled once is not prefilled again.

    store = tieredkv.KVStore(model, hot="2GiB", warm="16GiB", cold="/nvme/kv")
    with store.cache(input_ids) as cache:       # begins with the longest known prefix
        out = model.generate(input_ids, past_key_values=cache)
                                                # on leaving, what was computed becomes findable

Blocks are found by a chain of hashes over token ids. The ids are those that the model was seen to be given, by a hook;
what came in another way (`inputs_embeds`, images, padding, positions of one's own) is never findable. Where K and V do
not follow from token ids, or a layer keeps more than K and V by position, nothing is shared, and `refusal` says why.

Imports: everything to its left; the hook and places of caches from hf.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
import weakref
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Literal

import torch

from tieredkv import eviction, prefix
from tieredkv.block import Block, LayerGeometry
from tieredkv.cache import TieredCache
from tieredkv.config import CacheSettings, ColdSettings, Size
from tieredkv.device import Device
from tieredkv.durable import DurableSettings, DurableStats, salt_digest
from tieredkv.errors import ClosedError, ConfigError, MismatchError
from tieredkv.fingerprint import Fingerprint
from tieredkv.hf import refusals
from tieredkv.hf.attachment import Attachment
from tieredkv.hf.rates import Rates
from tieredkv.hf.tenancy import SharedStore
from tieredkv.hf.watching import TokenWatch, watch
from tieredkv.hf.ways import Ways
from tieredkv.published import Published
from tieredkv.sizing import kv_layers
from tieredkv.store import planner, requests

logger = logging.getLogger("tieredkv")


@dataclasses.dataclass(frozen=True)
class KVStoreStats:
    """What a `KVStore` has done.

    Args:
        caches: how many were given out.
        asked_tokens: tokens of their prompts, over all rows.
        attached_tokens: of these, how many were there already, in memory or on disk.
        restored_blocks: blocks read from disk.
        kept_blocks: blocks that can be found in memory now.
        evicted_blocks: blocks that were let go to make room.
        refused: prompts and caches of which nothing may be shared (padding, for example).
        durable: the directory of published blocks, or None where there is none.
    """

    caches: int
    asked_tokens: int
    attached_tokens: int
    restored_blocks: int
    kept_blocks: int
    evicted_blocks: int
    refused: int
    durable: DurableStats | None


class KVStore:
    """Blocks of one model, shared by the caches it hands out, and found again by token ids.

    Args:
        model: a transformers model. Attention over blocks is selected on it until `close`.
        hot, warm, cold, block_size, window, codec, hot_codec: as for `TieredCache`; all caches of the store together
            stay within these sizes. Sizes in tokens are for each row of the first cache's batch.
        settings: everything else; the arguments above win over it.
        durable: where published blocks are kept for other processes and for later: a directory, or its settings; False
            for nowhere. Default: the folder `cold`, with its free-space floor, where there is one.
        policy: which blocks that no cache uses go first when room is needed: "lhd" (default), "s3fifo", "arc" or
            "lru".
        device: the computing device, for tests.

    Attributes:
        refusal: why nothing is shared and every prompt is computed whole, in words, or None.

    Raises:
        ConfigError: a setting that cannot be served.
        UnsupportedModelError: a model that a TieredCache refuses.
    """

    def __init__(
        self,
        model: Any,
        *,
        hot: Size | int | str | None = None,
        warm: Size | int | str | None = None,
        cold: ColdSettings | str | os.PathLike[str] | None = None,
        block_size: int | None = None,
        window: int | None = None,
        codec: str | None = None,
        hot_codec: str | None = None,
        settings: CacheSettings | None = None,
        durable: DurableSettings | str | os.PathLike[str] | Literal[False] | None = None,
        policy: str = eviction.DEFAULT_POLICY,
        device: Device | None = None,
    ) -> None:
        self._settings = CacheSettings.chosen(
            settings,
            hot=hot,
            warm=warm,
            cold=cold,
            block_size=block_size,
            window=window,
            codec=codec,
            hot_codec=hot_codec,
        )
        eviction.policy(policy)  # refuses an unknown one; the store takes it with its first cache
        folder = _durable_settings(durable, self._settings.cold_settings)
        self._attachment, self._device = Attachment.to(model), device
        self._model, self._config = model, model.config
        self.refusal = prefix.why_not_shared(self._config)
        if self._settings.beyond == "drop":
            self.refusal = 'with beyond="drop", K and V depend on when tokens were dropped'
        self._fingerprint = Fingerprint(model)
        self._rates = Rates()
        self._shared = SharedStore(policy)
        self._published = Published(folder, self._rates)
        self._ways: Ways | None = None
        self._last: weakref.ref[TieredCache] | None = None
        self._counts = dict.fromkeys(("caches", "asked_tokens", "attached_tokens", "refused"), 0)
        self._closed = False
        self._attachment.select()
        self._hooks = watch(model)
        self._unhooking = weakref.finalize(self, _remove, self._hooks)
        if self.refusal is not None:
            logger.warning("tieredkv: no prefixes are shared: %s", self.refusal)

    def cache(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        salt: str = "",
    ) -> TieredCache:
        """A cache that begins with the longest known prefix of a prompt.

        At least the prompt's last token is left to be computed, so the cache can be given to `generate` together with
        the whole prompt. All rows begin with as many tokens as are known of every row. A prompt with padding begins
        with nothing.

        Args:
            input_ids: int `[rows, tokens]`, on any device.
            attention_mask: `[rows, tokens]`, or None where nothing is padded.
            salt: prompts under different salts share nothing, neither in memory nor on disk; "" is one too.

        Raises:
            MismatchError: not token ids `[rows, tokens]`.
            ClosedError: the store is closed.
        """
        self._check_open()
        _check_ids(input_ids)
        cache = TieredCache(self._config, settings=self._settings, device=self._device)
        self._learn_ways()
        if self._ways is not None:
            cache.ways = self._ways
        self._last = weakref.ref(cache)
        self._counts["caches"] += 1
        self._counts["asked_tokens"] += input_ids.numel()
        if self.refusal is not None or not self._is_whole(input_ids, attention_mask):
            self._counts["refused"] += 1
            cache.move_in(self._shared, None)
            return cache
        digest = salt_digest(salt)
        with self.same_model():
            seed = self._seed(digest)
            with self._known(cache, input_ids, seed) as (rows, tokens):
                place = cache.move_in(self._shared, TokenWatch(seed, digest, self._rates, input_ids[:, :tokens]))
                if tokens and (store := self._shared.store) is not None:
                    for block in itertools.chain.from_iterable(rows):
                        block.refs += 1
                    place.begin_with(self._shared, store, rows, tokens)
                    requests.expect(store, place.need_holder(), input_ids.shape[1] - tokens)
                    self._counts["attached_tokens"] += tokens * len(rows)
        cache.leaving = self._leaves
        return cache

    def publish(self, cache: TieredCache, output_ids: torch.Tensor | None = None, *, durable: bool = True) -> int:
        """Make the full blocks of a cache findable by their token ids; done too on leaving a `with store.cache(...)`.

        Args:
            cache: a cache of this store.
            output_ids: int `[rows, tokens]`, what `generate` returned for this cache, to be compared with the ids that
                the model was seen to be given. Publishing needs none.
            durable: also for other processes and for later, where the store has a directory. Without, for a prompt
                that is still being read in: its blocks would come to disk in small files.

        Returns:
            how many blocks are findable that were not before.

        Raises:
            MismatchError: a cache of another store, or ids that are not what the cache was given.
        """
        self._check_open()
        place, seen = cache.ended(), cache.watch
        self._learn_ways(cache)
        store, holder, kept = place.store, place.holder, self._shared.kept
        if place.shared is not self._shared:
            raise refusals.not_of_this_store()
        if seen is None or store is None or holder is None or kept is None or not holder.table.rows:
            return 0
        with self.same_model():
            if seen.seed != self._seed(seen.salt):
                logger.warning(
                    "tieredkv: not published: the model's weights or adapters changed since the cache was made"
                )
                return 0
            ids = _agreed(seen.known(), output_ids, len(holder.table))
            new = 0
            with store.lock:
                planner.settle(store, holder)
                tokens = min(ids.shape[1], holder.tokens)
                if holder.exact_tokens is not None:
                    tokens = min(tokens, holder.exact_tokens)
                for row, blocks in zip(ids, holder.table, strict=True):
                    hashes = prefix.chain(row[:tokens], store.block_size, seen.seed)
                    new += kept.add(hashes, blocks[: len(hashes)])
                    if durable:
                        found = blocks[: len(hashes)]
                        self._published.publish(store, self._fingerprint.current(), seen.salt, hashes, found)
        return new

    def same_model(self) -> contextlib.AbstractContextManager[None]:
        """Inside, weights and adapters do not change, and are looked at once, which takes milliseconds."""
        return self._fingerprint.held()

    def stats(self) -> KVStoreStats:
        """What was found and kept so far."""
        kept = self._shared.kept
        return KVStoreStats(
            kept_blocks=0 if kept is None else len(kept),
            evicted_blocks=0 if kept is None else kept.evicted,
            restored_blocks=self._published.restored_blocks,
            durable=self._published.stats(),
            **self._counts,
        )

    def close(self) -> None:
        """Let go of the blocks, and give the model its attention implementation back.

        Caches go on that were used or began with a known prefix; others are refused at their first forward. May be
        called again: what Ctrl-C broke off is done then.
        """
        self._closed = True
        with contextlib.ExitStack() as steps:
            # From the last to the first, and each of them whatever comes of those before.
            steps.callback(self._published.close)
            steps.callback(self._shared.close)
            steps.callback(self._attachment.restore)
            steps.callback(self._unhooking.detach)
            steps.callback(_remove, self._hooks)

    def __enter__(self) -> KVStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _leaves(self, cache: TieredCache) -> None:
        """A `with store.cache(...)` came to its end; the store may have been closed before."""
        if not self._closed:
            self.publish(cache)

    # ---- looking up

    @contextlib.contextmanager
    def _known(
        self, cache: TieredCache, ids: torch.Tensor, seed: str
    ) -> Iterator[tuple[Sequence[Sequence[Block]], int]]:
        """Inside, blocks of each row and how many tokens of them count; they stay where they are until the end."""
        size, rows = self._settings.block_size, ids.tolist()
        first = {tuple(row): index for index, row in reversed(list(enumerate(rows)))}
        chains = {row: prefix.chain(ids[index], size, seed) for row, index in first.items()}
        kept, store = self._shared.kept, self._shared.store
        if (kept is None or store is None) and self._published.is_open and self._is_on_one_device:
            # Nothing ran yet, and something may lie on disk: the geometry is what the config says.
            layers, device = self._geometry(cache), self._model.device
            store, kept = cache.move_in(self._shared, None).open_shared(self._shared, layers, device, len(rows))
        if kept is None or store is None:
            yield [], 0
            return
        name = self._fingerprint.current()
        with store.lock, self._published.found(store, kept, name, list(chains.values())) as found:
            count = min(map(len, found))
            tokens = min(count * size, ids.shape[1] - 1)
            by_row = dict(zip(chains, found, strict=True))
            yield [by_row[tuple(row)][: -(-tokens // size)] for row in rows], tokens

    def _geometry(self, cache: TieredCache) -> list[LayerGeometry]:
        """The geometry of each tiered layer as the config and the weights' dtype say, before any forward."""
        layers = kv_layers(self._attachment.config)
        return [layers[index].geometry(self._model.dtype) for index in cache.parts().tiered]

    def _seed(self, salt: str) -> str:
        settings = self._settings
        name = self._fingerprint.current()
        return prefix.seed(name, block_size=settings.block_size, codec=settings.codec, salt=salt)

    @property
    def _is_on_one_device(self) -> bool:
        return len({weight.device for weight in self._model.parameters()}) == 1

    def _is_whole(self, ids: torch.Tensor, mask: torch.Tensor | None) -> bool:
        """Whether no token of the prompt is masked, be it because `generate` takes it for padding."""
        if mask is not None:
            return tuple(mask.shape) == tuple(ids.shape) and bool((mask != 0).all())
        generation = getattr(self._model, "generation_config", None)
        padding, ends = (getattr(generation, name, None) for name in ("pad_token_id", "eos_token_id"))
        if padding is None or padding in (ends if isinstance(ends, list) else [ends]):
            return True
        return not bool((ids == padding).any())

    def _learn_ways(self, cache: TieredCache | None = None) -> None:
        """A prefilled cache cannot find out by itself how attention gets K and V; an earlier one did."""
        cache = cache or (None if self._last is None else self._last())
        if cache is not None and cache.mode == "blocks":
            self._ways = cache.ways

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("The store is closed.", wanted="an open store", got="closed", change="make a new one")


def _durable_settings(
    durable: DurableSettings | str | os.PathLike[str] | Literal[False] | None, cold: ColdSettings | None
) -> DurableSettings | None:
    if isinstance(durable, DurableSettings):
        return durable
    if durable is None:
        return None if cold is None else DurableSettings(cold.path, free_floor=cold.free_floor)
    if durable is False:
        return None
    if not isinstance(durable, str | os.PathLike):
        raise ConfigError(
            "Not a place for published blocks.",
            wanted="a directory, DurableSettings, or False for none",
            got=repr(durable),
            change="give durable= a directory; leave it out to use the folder of cold=",
        )
    return DurableSettings(durable)


def _agreed(seen: torch.Tensor, given: torch.Tensor | None, rows: int) -> torch.Tensor:
    """Token ids of the cache's rows, [rows, tokens], as they were seen.

    Raises:
        MismatchError: those that were given are others.
    """
    if given is None or given.shape[0] != rows:
        return seen  # beams, of which `generate` returns some
    _check_ids(given)
    given = given.to("cpu", torch.int64)
    both = min(seen.shape[1], given.shape[1])
    if not torch.equal(seen[:, :both], given[:, :both]):
        raise MismatchError(
            "Token ids that are not those the cache was given.",
            wanted="the ids of the cache's rows, prompt and output",
            got="others",
            change="pass what generate returned for this cache, or leave output_ids out",
        )
    return seen


def _check_ids(ids: torch.Tensor) -> None:
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.is_floating_point() or not ids.numel():
        raise MismatchError(
            "Not token ids.",
            wanted="an integer tensor [rows, tokens] with at least one token",
            got=tuple(ids.shape) if isinstance(ids, torch.Tensor) else type(ids).__name__,
            change="pass the tokenizer's input_ids",
        )


def _remove(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()
