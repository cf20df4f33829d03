"""A stop string is found however the text is cut, and nothing of it or after it is let through."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tieredkv.serving.stop_strings import StopStrings

TEXT = st.text("abc", max_size=30)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)


def cut(text: str, places: list[int]) -> list[str]:
    """The text in pieces."""
    borders = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[first:last] for first, last in itertools.pairwise(borders)]


@given(TEXT, STOPS, st.lists(st.integers(0, 30), max_size=8))
def test_text_up_to_the_first_stop_string(text: str, stops: list[str], places: list[int]) -> None:
    """Of pieces that each may end one, the first piece after which one is there decides, as tokens do."""
    found, seen, wanted = StopStrings(stops), "", None
    out = []
    for piece in cut(text, places):
        seen += piece
        out.append(found.feed(piece))
        if wanted is None and any(stop in seen for stop in stops):
            wanted = seen[: min(seen.find(stop) for stop in stops if stop in seen)]
        assert found.is_found == (wanted is not None)
    assert "".join(out) + found.finish() == (text if wanted is None else wanted)


def test_what_cannot_begin_a_stop_string_is_not_held_back() -> None:
    stop = StopStrings(["END"])
    assert [stop.feed(text) for text in ("abE", "N", "x", "E", "ND", "y")] == ["ab", "", "ENx", "", "", ""]
    assert stop.is_found and stop.finish() == ""
