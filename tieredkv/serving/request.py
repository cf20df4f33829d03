"""One request: what was asked, how far it has come, and the handle that its caller holds.

Imports: cache, errors, sampling.
"""

from __future__ import annotations

import dataclasses
import enum
import queue
import threading
import time
from collections.abc import Callable, Iterator

import torch

from tieredkv.cache import TieredCache
from tieredkv.errors import TieredKVError
from tieredkv.serving.sampling import Sampler


class Finish(enum.StrEnum):
    """Why a request ended."""

    STOP = "stop"
    """An end-of-sequence token, a stop string, or another stopping criterion."""
    LENGTH = "length"
    """As many tokens as were asked for."""
    CANCELLED = "cancelled"
    """The caller cancelled it, or the engine was closed."""
    ERROR = "error"
    """It could not go on; the handle has the error."""


class RequestHandle:
    """What `Engine.submit` returns: iterate over it for tokens as they come, or wait for all of them.

    Safe to use from any thread; one thread iterates.

    Args:
        number: of the request.
        prompt_tokens: length of its prompt.

    Attributes:
        waits_for: what keeps it from going on, in words, or None while nothing does; it changes at any time.
        error: why it ended with `Finish.ERROR`, else None. It is set when `finish` is.
    """

    def __init__(self, number: int, prompt_tokens: int) -> None:
        self.number, self.prompt_tokens = number, prompt_tokens
        self.error: TieredKVError | None = None
        self.waits_for: str | None = None
        self._tokens: list[int] = []
        self._queue: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._done = threading.Event()
        self._cancelled = threading.Event()
        self._stopped = False
        self._finish: Finish | None = None
        self._listener: Callable[[int | None], None] | None = None
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[int]:
        """Token ids as they come; ends when the request does.

        Raises:
            TieredKVError: the request ended with an error.
        """
        while (token := self._queue.get()) is not None:
            yield token
        if self.error is not None:
            raise self.error

    def result(self, timeout_seconds: float | None = None) -> list[int]:
        """All new token ids, when the request has ended.

        Raises:
            TimeoutError: it has not within `timeout_seconds`.
            TieredKVError: it ended with an error.
        """
        if not self._done.wait(timeout_seconds):
            raise TimeoutError(f"request {self.number} has not ended within {timeout_seconds} s")
        if self.error is not None:
            raise self.error
        return list(self._tokens)

    def cancel(self) -> None:
        """End the request before the engine's next step; its memory is freed then. May be called again."""
        self._cancelled.set()

    def stop(self) -> None:
        """For a listener: the token that it was called with is the request's last one."""
        self._stopped = True

    def listen(self, listener: Callable[[int | None], None]) -> None:
        """Call `listener` on the engine's thread with each token, and with None at the end; past ones at once.

        Args:
            listener: must return quickly and not raise.
        """
        with self._lock:
            self._listener = listener
            for token in self._tokens:
                listener(token)
            if self._done.is_set():
                listener(None)

    @property
    def finish(self) -> Finish | None:
        """Why it ended, or None while it goes on."""
        return self._finish

    @property
    def is_cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._cancelled.is_set()

    @property
    def is_stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopped

    def put(self, token: int) -> None:
        """For the engine: a new token."""
        with self._lock:
            self._tokens.append(token)
            self._queue.put(token)
            if self._listener is not None:
                self._listener(token)

    def end(self, finish: Finish, error: TieredKVError | None = None) -> None:
        """For the engine: the request ended."""
        with self._lock:
            if self._done.is_set():
                return
            self._finish, self.error = finish, error
            self._done.set()
            self._queue.put(None)
            if self._listener is not None:
                self._listener(None)


@dataclasses.dataclass(eq=False)
class Request:
    """A request as the engine sees it.

    Args:
        handle: its caller's side.
        ids: prompt and new token ids so far, int64 on the CPU, with room to grow.
        length: how many of `ids` there are.
        sampler: chooses its tokens, and says when it ends.
        priority: high comes first.
        salt: prefixes are shared within one salt.
        arrived_step: number of the engine's step when it came.
        arrived_seconds: when it came, monotonic.
        cache: its blocks, while it has any.
        prefilled: how many of `ids` are in the cache.
        first_token_seconds, last_token_seconds: when these came, monotonic.
        preempted: how often its blocks were taken away.
    """

    handle: RequestHandle
    ids: torch.Tensor
    length: int
    sampler: Sampler
    priority: int
    salt: str
    arrived_step: int
    arrived_seconds: float = dataclasses.field(default_factory=time.monotonic)
    cache: TieredCache | None = None
    prefilled: int = 0
    first_token_seconds: float | None = None
    last_token_seconds: float | None = None
    preempted: int = 0
    _head: tuple[str, bytes] | None = None

    def head(self, block_size: int) -> tuple[str, bytes]:
        """Salt and first block of tokens: requests that differ in it share nothing."""
        if self._head is None:
            self._head = (self.salt, self.known[:block_size].numpy().tobytes())
        return self._head

    @property
    def known(self) -> torch.Tensor:
        """Prompt and new token ids so far, `[length]`."""
        return self.ids[: self.length]

    @property
    def missing(self) -> int:
        """Tokens that are known and not in the cache: 1 while decoding."""
        return self.length - self.prefilled

    def add(self, token: int) -> None:
        """Append a new token."""
        if self.length == len(self.ids):
            self.ids = torch.cat([self.ids, torch.empty(max(len(self.ids), 64), dtype=torch.int64)])
        self.ids.numpy()[self.length] = token  # the same memory; to set a tensor's element takes ten times as long
        self.length += 1
