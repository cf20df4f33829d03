"""Strings that end an answer, found in its text however it is cut into tokens.

Imports nothing of the package.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Lets text through up to the first stop string. What could be the beginning of one is held back.

    Args:
        strings: none of them empty.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._held = ""
        self.is_found = False

    def feed(self, text: str) -> str:
        """What is now known to belong to the answer."""
        if self.is_found or not self._strings:
            return "" if self.is_found else text
        whole = self._held + text
        places = [place for place in map(whole.find, self._strings) if place >= 0]
        if places:
            self.is_found, self._held = True, ""
            return whole[: min(places)]
        keep = self._beginning(whole)
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep]

    def finish(self) -> str:
        """What was held back, at the end of an answer without a stop string."""
        rest, self._held = self._held, ""
        return rest

    def _beginning(self, text: str) -> int:
        """Length of the longest end of a text with which a stop string begins."""
        most = min(len(text), max(map(len, self._strings)) - 1)
        for length in range(most, 0, -1):
            if any(string.startswith(text[-length:]) for string in self._strings):
                return length
        return 0
