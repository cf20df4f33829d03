"""The time that a load test goes by, so that a test can give it another one.

Imports nothing of the package.
"""

from __future__ import annotations

import asyncio
import time


class Clock:
    """Seconds of this machine, which never go back."""

    def now(self) -> float:
        """Seconds since some moment."""
        return time.perf_counter()

    async def sleep(self, seconds: float) -> None:
        """Let others run for as long."""
        await asyncio.sleep(seconds)
