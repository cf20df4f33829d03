"""`tieredkv demo`: what it is asked, how it generates and measures, and what it says of the two caches.

Imports: this package's command.
"""

from __future__ import annotations

from tieredkv.cli.demo.command import demo

__all__ = ["demo"]
