"""Who a request of the endpoint comes from, what it asked for, and which handles of the engine belong to it.

Imports: request.
"""

from __future__ import annotations

import contextvars
import dataclasses

from tieredkv.serving.request import RequestHandle


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a body asks for that transformers' handlers do not pass on.

    Args:
        stop: strings that end the answer, and are no part of it.
        most_tokens: most new tokens; None for as many as fit, at most `EndpointSettings.default_tokens`.
        seed: of its sampling.
        priority: as for `Engine.submit`.
        temperature, top_p: of its sampling; None for the model's own.
        ignore_eos: go on after an end-of-sequence token.
    """

    stop: tuple[str, ...] = ()
    most_tokens: int | None = None
    seed: int | None = None
    priority: int = 0
    temperature: float | None = None
    top_p: float | None = None
    ignore_eos: bool = False


class Client:
    """One request over HTTP. Used on the event loop's thread.

    Args:
        salt: prefixes are shared within one salt.
    """

    def __init__(self, salt: str = "") -> None:
        self.salt, self.asked = salt, Asked()
        self.is_chat = self.is_gone = False
        self._handles: list[RequestHandle] = []

    def follow(self, handle: RequestHandle) -> None:
        """A request of the engine is this client's, and is cancelled when it goes."""
        self._handles.append(handle)
        if self.is_gone:
            handle.cancel()

    def leave(self) -> None:
        """Nobody reads the answer any more."""
        self.is_gone = True
        for handle in self._handles:
            handle.cancel()


CLIENT: contextvars.ContextVar[Client] = contextvars.ContextVar("tieredkv_client")
"""The request that the running task serves; the handlers of transformers pass nothing of ours on."""
