"""The wheel and the source archive: they build, and hold what they should and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source archive, built from a copy of what the repository holds."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, source)
    for folder in ("tieredkv", "tests", "docs", "integrations", "benchmarks"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return out


def only(folder: Path, pattern: str) -> Path:
    """The one file that matches."""
    (path,) = folder.glob(pattern)
    return path


def test_the_wheel_holds_the_typed_package_and_nothing_else(built: Path) -> None:
    wheel = zipfile.ZipFile(only(built, "tieredkv-0.1.0-py3-none-any.whl"))
    names = set(wheel.namelist())
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "tieredkv").rglob("*.py")}
    info = "tieredkv-0.1.0.dist-info"
    assert names >= sources | {"tieredkv/py.typed", f"{info}/licenses/LICENSE", f"{info}/entry_points.txt"}
    assert {name.split("/")[0] for name in names} == {"tieredkv", info}
    assert "tieredkv = tieredkv.cli:main" in wheel.read(f"{info}/entry_points.txt").decode()


def test_the_wheel_says_what_it_needs(built: Path) -> None:
    wheel = zipfile.ZipFile(only(built, "*.whl"))
    metadata = wheel.read("tieredkv-0.1.0.dist-info/METADATA").decode()
    assert "Requires-Python: >=3.11" in metadata
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Dist: torch>=2.11\n" in metadata
    assert "Requires-Dist: transformers<6,>=5.17\n" in metadata


def test_the_wheel_installs_and_is_imported_from_where_it_was_installed(built: Path, tmp_path: Path) -> None:
    """Beside the environment's own torch and transformers, which are too large to install for a test."""
    wheel = only(built, "*.whl")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(tmp_path / "in"),
    ]
    subprocess.run([*pip, str(wheel)], check=True, capture_output=True, timeout=120)
    code = "import tieredkv, tieredkv.cli; print(tieredkv.__file__, tieredkv.__version__)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "in")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
    )
    assert done.stdout.split() == [str(tmp_path / "in" / "tieredkv" / "__init__.py"), "0.1.0"]


def test_the_source_archive_can_be_tested(built: Path) -> None:
    with tarfile.open(only(built, "tieredkv-0.1.0.tar.gz")) as archive:
        names = set(archive.getnames())
    wanted = ("LICENSE", "README.md", "Makefile", "constraints.txt", "tieredkv/py.typed", "tests/conftest.py")
    wanted += ("mkdocs.yml", "mkdocs_hooks.py", "benchmarks/harness.py", "docs/figures/life-of-a-block.svg")
    assert {f"tieredkv-0.1.0/{name}" for name in wanted} <= names
