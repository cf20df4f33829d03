"""What the server says of its memory on its Prometheus page, while the load runs.

Two metrics are looked for, so the page's lines are read here, and no other package is needed for it.

Imports: clock.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Awaitable, Callable

from tieredkv.loadtest.clock import Clock

KV_BYTES = "tieredkv_tier_used_bytes"
"""Bytes of blocks, for each tier; they are added up."""
DEVICE_BYTES, DEVICE_TIER = "tieredkv_tier_peak_bytes", 'tier="hot"'
"""Most bytes that a tier held; the hot one lies on the device."""
EVERY_SECONDS = 1.0

_LINE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+-?\d+)?\s*")


@dataclasses.dataclass
class ServerFigures:
    """Memory of a server over time; empty where it does not say.

    Args:
        kv_bytes: (the clock's seconds, bytes of keys and values in all tiers).
        device_bytes: (the clock's seconds, most bytes of keys and values on the device since the server began).
        missing: why there is nothing, or "".
    """

    kv_bytes: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    device_bytes: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    missing: str = ""

    def add(self, seconds: float, page: str) -> None:
        """What a page says at a moment."""
        for points, value in (
            (self.kv_bytes, total(page, KV_BYTES)),
            (self.device_bytes, total(page, DEVICE_BYTES, DEVICE_TIER)),
        ):
            if value is not None:
                points.append((seconds, value))
        absent = [n for points, n in ((self.kv_bytes, KV_BYTES), (self.device_bytes, DEVICE_BYTES)) if not points]
        self.missing = f"the server's metrics have no {' and no '.join(absent)}" if absent else ""


def total(page: str, name: str, label: str = "") -> float | None:
    """The sum of a metric's values over its labels, or over those with `label`, written as on the page.

    Returns:
        None where the page has none, or one that is no number.
    """
    found: float | None = None
    for line in page.splitlines():
        match = _LINE.fullmatch(line)
        if match is not None and match["name"] == name and label in (match["labels"] or ""):
            try:
                found = (found or 0.0) + float(match["value"])
            except ValueError:
                return None
    return found


async def watch(read: Callable[[], Awaitable[str | None]], clock: Clock, until: asyncio.Event) -> ServerFigures:
    """Read the page again and again until told, and once more then."""
    figures = ServerFigures()
    while True:
        last = until.is_set()
        page = await read()
        if page is None:
            figures.missing = figures.missing or "the server has no page of metrics"
        else:
            figures.add(clock.now(), page)
        if last or page is None:
            return figures
        waiting = asyncio.create_task(until.wait())
        pause = asyncio.ensure_future(clock.sleep(EVERY_SECONDS))
        await asyncio.wait({waiting, pause}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        pause.cancel()
