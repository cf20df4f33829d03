"""What the site needs beyond docs/: README, changelog and examples as pages, and links that lead to them.

In the repository a link is right as it stands. On the site, one that leaves docs/ leads to the page made of its target,
or, where there is none (source files, folders), is plain text. One that leads nowhere is an error.

Imports: mkdocs.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
PROJECT = {
    "README.md": "project/readme.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
}


def outside() -> dict[str, str]:
    """Repository path -> site path of the pages that are not in docs/."""
    examples = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "integrations").rglob("README.md"))
    names = {path: posixpath.dirname(path).removeprefix("integrations").strip("/") for path in examples}
    return PROJECT | {path: f"integrations/{name or 'index'}.md" for path, name in names.items()}


def on_config(config: Any) -> Any:
    """Fill in the parts of the navigation that end in /*, and leave out pages that are not there."""
    found = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    found = sorted([*found, *outside().values()], key=lambda path: (not path.endswith(("index.md", "README.md")), path))
    nav = []
    for entry in config.nav:
        ((title, target),) = entry.items()
        if target.endswith("/*"):
            pages = [path for path in found if posixpath.dirname(path) == target[:-2]]
            if pages:
                nav.append({title: pages})
        elif target in found:
            nav.append(entry)
    config.nav = nav
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside docs/."""
    for source, target in outside().items():
        files.append(File.generated(config, target, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn the links of a page."""
    pages = outside()
    here = page.file.src_uri
    source = next((path for path, target in pages.items() if target == here), f"docs/{here}")

    def turn(found: re.Match[str]) -> str:
        text, target = found.groups()
        path, hash_, anchor = target.partition("#")
        if not path or re.match(r"[a-z]+:", target):
            return found[0]
        wanted = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        on_site = pages.get(wanted, wanted.removeprefix("docs/") if wanted.startswith("docs/") else "")
        if files.get_file_from_path(on_site) is None:
            return text if (ROOT / wanted).exists() else found[0]  # what leads nowhere is left for MkDocs to see
        return f"[{text}]({posixpath.relpath(on_site, posixpath.dirname(here) or '.')}{hash_}{anchor})"

    return LINK.sub(turn, markdown)
