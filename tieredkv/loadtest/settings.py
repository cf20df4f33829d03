"""What a load test is to do, checked when it is made.

Imports: errors.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tieredkv.errors import ConfigError

MIX = "mix"
DEFAULT_CONCURRENCY = 8


@dataclasses.dataclass(frozen=True)
class LoadSettings:
    """What is sent, when, and where to.

    Requests come at the times of the trace or at a rate (an open loop: they do not wait for each other), or so many are
    kept going at once (a closed loop). With a `concurrency` or a `ramp` the loop is closed, without it it is open where
    there are times, and closed otherwise.

    Args:
        url: of the server, with or without `/v1`.
        model: name of the model; None for the first that the server lists.
        api_key: sent as a bearer token; never part of a report.
        chat: ask `/v1/chat/completions`; otherwise `/v1/completions`.
        requests: how many are sent at most; a trace may have fewer.
        trace: file from which lengths and times are taken, or None.
        shape: without a trace, "mix" for short, medium and long requests, or "IN:OUT" tokens, such as "500:150".
        scale: the trace's times are multiplied by it: 0.1 is ten times as fast.
        rate: requests a second on average, at random times; None for the times of the trace.
        concurrency: requests kept going at once; with `ramp`, at its end.
        ramp: begin with short requests and one at a time, and end with long ones and `concurrency`.
        longest: requests with more tokens than this, prompt and answer together, are left out; None for all.
        timeout_seconds: after which a request of which nothing comes is given up.
        seed: of words, lengths and times.
        extra: more fields of each request's body.
    """

    url: str
    model: str | None = None
    api_key: str | None = dataclasses.field(default=None, repr=False)
    chat: bool = True
    requests: int = 100
    trace: Path | None = None
    shape: str = MIX
    scale: float = 1.0
    rate: float | None = None
    concurrency: int | None = None
    ramp: bool = False
    longest: int | None = None
    timeout_seconds: float = 600.0
    seed: int = 0
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not re.match(r"https?://[^/\s]+", self.url):
            raise _refusal("http://HOST:PORT", f"--url {self.url}", "pass the server's address")
        if self.shape != MIX and not re.fullmatch(r"[1-9]\d*:[1-9]\d*", self.shape):
            raise _refusal(f"{MIX}, or tokens such as 500:150", f"--shape {self.shape}", "pass one of these")
        for name in ("requests", "scale", "rate", "concurrency", "longest", "timeout_seconds"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise _refusal("a number above 0", f"{name}={value}", "pass a positive number")
        if self.rate is not None and (self.concurrency is not None or self.ramp):
            got = "--rate beside --concurrency or --ramp"
            raise _refusal(
                "an open loop (--rate) or a closed one (--concurrency, --ramp)", got, "leave one of them out"
            )

    @property
    def base_url(self) -> str:
        """The address without `/v1`."""
        return self.url.rstrip("/").removesuffix("/v1").rstrip("/")

    @property
    def is_open(self) -> bool:
        """Whether requests come at times of their own."""
        timed = self.rate is not None or self.trace is not None
        return timed and self.concurrency is None and not self.ramp

    @property
    def at_once(self) -> int:
        """Requests kept going at once in a closed loop, with a ramp at its end."""
        return self.concurrency or DEFAULT_CONCURRENCY

    @property
    def load(self) -> str:
        """What is asked and when, in a line."""
        what = f"lengths of {self.trace.name}" if self.trace is not None else f"lengths {self.shape}"
        if self.longest is not None:
            what += f" up to {self.longest} tokens"
        if self.ramp:
            return f"{what}, a ramp up to {self.at_once} at once"
        if not self.is_open:
            return f"{what}, {self.at_once} at once"
        return f"{what}, {self.rate:g} a second" if self.rate is not None else f"{what} at its times x {self.scale:g}"


def _refusal(wanted: str, got: str, change: str) -> ConfigError:
    return ConfigError("Not a load that can be sent.", wanted=wanted, got=got, change=change)
