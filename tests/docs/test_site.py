"""The site builds without a warning, with the reference made from docstrings and pages from outside docs/."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("mkdocstrings") is None,
    reason="the site needs tieredkv[docs]; `make docs` installs it",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    out = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return out


def test_the_reference_is_made_from_docstrings(site: Path) -> None:
    text = (site / "reference" / "cache" / "index.html").read_text(encoding="utf-8")
    assert "hot_bytes" in text or "device memory for blocks" in text
    assert 'id="tieredkv.TieredCache.reserve"' in text


def test_every_page_is_on_the_site(site: Path) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").with_suffix("")
        folder = name.parent if name.name in ("index", "README") else name
        assert (site / folder / "index.html").is_file(), name
    assert (site / "integrations" / "chat" / "index.html").is_file()


def test_a_link_out_of_docs_leads_to_the_page_made_of_it(site: Path) -> None:
    text = (site / "index.html").read_text(encoding="utf-8")
    assert 'href="project/readme/"' in text


def test_a_page_fetches_nothing_from_elsewhere(site: Path) -> None:
    text = (site / "index.html").read_text(encoding="utf-8")
    assert "fonts.googleapis" not in text
    assert "unpkg.com" not in text
