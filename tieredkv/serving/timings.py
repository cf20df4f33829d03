"""What an engine tells about the time its requests take, for whoever wants to count it.

Imports nothing of the package.
"""

from __future__ import annotations


class Timings:
    """Listens to nothing; a subclass overrides what it wants. Called on the engine's thread, must be quick."""

    def queued(self, seconds: float) -> None:
        """A request waited so long before its prompt was begun, for the first time."""

    def first_token(self, seconds: float) -> None:
        """A request's first token came so long after it was submitted."""

    def between_tokens(self, seconds: float) -> None:
        """A further token came so long after the one before it."""
