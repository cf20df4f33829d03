"""A load test of any OpenAI-compatible server: what is asked, when, by whom, and what came of it.

It talks HTTP alone and knows nothing of the engine, so that peers are measured in the same way.

Imports: errors, eviction's trace readers and this package; httpx2, and matplotlib where it is installed.
"""

from __future__ import annotations

from tieredkv.loadtest.clock import Clock
from tieredkv.loadtest.compare import compare
from tieredkv.loadtest.report import Report
from tieredkv.loadtest.run import run
from tieredkv.loadtest.settings import LoadSettings

__all__ = ["Clock", "LoadSettings", "Report", "compare", "run"]
