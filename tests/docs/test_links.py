"""Every relative link of the pages leads to a file that exists, and to a heading that is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    + [page for folder in ("docs", "integrations") for page in (ROOT / folder).rglob("*.md")]
)
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
SCRIPT = re.compile(r"^\$ python (\S+\.py)", re.MULTILINE)


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in HEADING.findall(prose(page))]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(page: Path) -> list[str]:
    """The relative links of a page that lead nowhere."""
    broken = []
    for target in LINK.findall(CODE.sub("", prose(page))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_scripts_that_a_page_names_exist(page: Path) -> None:
    named = SCRIPT.findall(page.read_text(encoding="utf-8"))
    assert [script for script in named if not (ROOT / script).is_file()] == []


def test_every_guide_and_every_example_is_linked() -> None:
    linked = {(page.parent / target).resolve() for page in PAGES for target in LINK.findall(prose(page))}
    pages = {*(ROOT / "docs" / "guides").glob("*.md"), *(ROOT / "integrations").glob("*/README.md")}
    assert pages - linked == set()


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A title, here\n[a](#a-title-here) [b](page.md#no) [c](none.md) `[d](none.md)` [e](https://x)\n")
    assert broken_links(page) == ["page.md#no", "none.md"]
