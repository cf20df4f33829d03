"""What became of one request.

Imports: shapes.
"""

from __future__ import annotations

import dataclasses
import itertools

from tieredkv.loadtest.shapes import Ask

CANNOT_CONNECT = "cannot connect"
BROKEN_OFF = "broken off"
MALFORMED = "malformed"
TIMED_OUT = "timed out"
SERVER_ERROR = "error in the stream"
TRANSPORT = "transport"


@dataclasses.dataclass
class Record:
    """What became of one request. All times are those of the run's clock.

    Args:
        ask: what was wanted.
        part: number of the part of the load it belongs to.
        planned_seconds: when it was to be sent; the same as `sent_seconds` in a closed loop.
        sent_seconds: when it was sent.
        ended_seconds: when its last byte came, or when it failed.
        piece_seconds: when each piece of its answer came. Servers send a token in a piece, or a few.
        prompt_tokens: of the prompt, as the server counted; None where it did not say.
        answer_tokens: of the answer, likewise.
        finish: the server's reason for its end, or None.
        error: the kind of failure: one of this module's, or "http STATUS"; None for an answer that is whole.
        message: what is known of the failure, shortened.
    """

    ask: Ask
    part: int
    planned_seconds: float
    sent_seconds: float
    ended_seconds: float = 0.0
    piece_seconds: list[float] = dataclasses.field(default_factory=list)
    prompt_tokens: int | None = None
    answer_tokens: int | None = None
    finish: str | None = None
    error: str | None = None
    message: str = ""

    @property
    def first_token_seconds(self) -> float | None:
        """From sending to the first piece of the answer; None where none came."""
        return self.piece_seconds[0] - self.sent_seconds if self.piece_seconds else None

    @property
    def gaps_seconds(self) -> list[float]:
        """Between a piece of the answer and the next."""
        return [after - before for before, after in itertools.pairwise(self.piece_seconds)]

    @property
    def new_tokens(self) -> int:
        """Tokens of the answer: as the server counted, else one for each piece."""
        return len(self.piece_seconds) if self.answer_tokens is None else self.answer_tokens
