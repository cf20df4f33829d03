"""The house rules that a parser can check: who imports whom, and what shipped code does not contain."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "tieredkv"

LAYERS = """
    errors config stats counters compiler files
    block checksum_native checksum codecs sizing device
    tiers eviction durable loadtest block_table
    plan placement
    verified inflight transfer prefetcher
    fingerprint prefix
    store
    reference attention
    hf report events advice cache published kv_store serving
    __init__ cli __main__
"""
"""Left to right, top to bottom: a module imports only what stands before it. A package inside ours is one entry, and
may import inside itself."""

ORDER = {name: rank for rank, name in enumerate(LAYERS.split())}

MAY_NAME_CUDA = {"device"}
MAY_IMPORT_TRANSFORMERS = {"hf", "cli", "cache", "serving"}
MAY_IMPORT_TRANSFORMERS_LATE = {"sizing"}  # inside a function only
MAY_PRINT = {"cli"}
NOT_IMPORTED = {"reference"}  # the specification: tests compare with it, shipped code does not use it

MOST_LINES = 400
MOST_FUNCTION_LINES = 60

FILES = sorted(PACKAGE.rglob("*.py"))


def dotted(path: Path) -> str:
    """The module of a file: `tieredkv/tiers/hot.py` is "tieredkv.tiers.hot"."""
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)


def unit(module: str) -> str:
    """The entry of the table to which a module belongs, or "" when it has none."""
    first = (module.split(".")[1:] or ["__init__"])[0]
    return first if first in ORDER else ""


def imports(tree: ast.AST, module: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) for each import anywhere in a file; `from a import b` gives "a.b"."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from imports_at(node, module)


def imports_at(node: ast.Import | ast.ImportFrom, module: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) for each name of one import statement, relative ones resolved."""
    if isinstance(node, ast.Import):
        yield from ((node.lineno, alias.name) for alias in node.names)
        return
    base = node.module or ""
    if node.level:
        base = ".".join([*module.split(".")[: -node.level], *([base] if base else [])])
    yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def import_breaches(tree: ast.AST, module: str) -> list[str]:
    """Imports of the package that do not point to the left."""
    own, breaches = unit(module), []
    if not own:
        return [f"{module} is not in the table of layers: put it where it belongs"]
    for line, name in imports(tree, module):
        if name.split(".")[0] != "tieredkv":
            continue
        other = unit(name) or ("__init__" if name.count(".") == 1 else "")  # `from tieredkv import TieredCache`
        if not other:
            breaches.append(f"line {line}: {name} is not in the table of layers")
        elif other in NOT_IMPORTED and own != other:
            breaches.append(f"line {line}: {other} is for tests only")
        elif own != other and ORDER[other] >= ORDER[own]:
            breaches.append(f"line {line}: {own} imports {other}, which is not to its left")
    return breaches


def foreign_breaches(tree: ast.Module, module: str) -> list[str]:
    """Uses of torch.cuda and transformers outside the modules that may know them."""
    own, breaches = unit(module), []
    late = {id(node) for function in functions(tree) for node in ast.walk(function)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute | ast.Import | ast.ImportFrom):
            continue
        names = [] if isinstance(node, ast.Attribute) else [name for _, name in imports_at(node, module)]
        cuda = isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.cuda"
        if (cuda or any(name.startswith("torch.cuda") for name in names)) and own not in MAY_NAME_CUDA:
            breaches.append(f"line {node.lineno}: torch.cuda outside tieredkv/device")
        allowed = own in MAY_IMPORT_TRANSFORMERS or (own in MAY_IMPORT_TRANSFORMERS_LATE and id(node) in late)
        if any(name.split(".")[0] == "transformers" for name in names) and not allowed:
            breaches.append(f"line {node.lineno}: imports transformers")
    return breaches


def header_breaches(tree: ast.Module, path: Path) -> list[str]:
    """What the line "Imports:" at the top of a file says, against what is imported."""
    if path.name.startswith("__"):  # packages say in their docstring what is in them
        return []
    found = re.search(r"^Imports.*", ast.get_docstring(tree) or "", re.DOTALL | re.MULTILINE)
    if found is None:
        return ["no line that says what the file imports"]
    line = found[0].split("\n\n")[0]
    said, module, siblings, units = set(re.findall(r"\w+", line.split(";")[0])), dotted(path), set[str](), set[str]()
    for _, name in imports(tree, module):
        parts = name.split(".")
        if parts[0] == "tieredkv" and unit(name) != unit(module):
            units.add(unit(name))
        elif parts[:-1] and (path.parent / f"{parts[-2]}.py").exists() and path.parent != PACKAGE:
            siblings.add(parts[-2])
        elif parts[0] == "tieredkv" and (path.parent / f"{parts[-1]}.py").exists() and path.parent != PACKAGE:
            siblings.add(parts[-1])
    wanted = set[str]() if "everything to its left" in line else units | siblings
    if "this package" in line:
        wanted -= siblings
    claimed = {name for name in said if name in ORDER} - units - siblings - {unit(module), path.stem}
    missing = sorted(wanted - said - {""})
    return [f"the header does not name {name}" for name in missing] + [
        f"the header names {name}, which is not imported" for name in sorted(claimed)
    ]


def functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function of a file, methods and nested ones too."""
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def style_breaches(tree: ast.Module, module: str) -> list[str]:
    """What shipped code does not contain, and how long it may be."""
    breaches = [] if ast.get_docstring(tree) else ["no docstring that says what the module is for"]
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            breaches.append(f"line {node.lineno}: assert is gone under -O: raise a typed error")
        elif isinstance(node, ast.ExceptHandler) and node.type is None:
            breaches.append(f"line {node.lineno}: bare except")
        elif isinstance(node, ast.Global):
            breaches.append(f"line {node.lineno}: global")
        elif isinstance(node, ast.Name) and node.id == "NotImplementedError":
            breaches.append(f"line {node.lineno}: NotImplementedError")
        elif isinstance(node, ast.Name) and node.id == "print" and unit(module) not in MAY_PRINT:
            breaches.append(f"line {node.lineno}: print outside the command line")
    for function in functions(tree):
        lines = (function.end_lineno or 0) - function.lineno + 1
        if lines > MOST_FUNCTION_LINES:
            breaches.append(f"line {function.lineno}: {function.name} has {lines} lines")
    return breaches


def breaches(source: str, module: str) -> list[str]:
    """Every breach of the rules in one file."""
    tree = ast.parse(source)
    found = import_breaches(tree, module) + foreign_breaches(tree, module) + style_breaches(tree, module)
    lines = source.count("\n")
    return found + ([f"{lines} lines: split it"] if lines > MOST_LINES else [])


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_says_what_it_imports(path: Path) -> None:
    assert not header_breaches(ast.parse(path.read_text()), path)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_keeps_the_house_rules(path: Path) -> None:
    assert breaches(path.read_text(encoding="utf-8"), dotted(path)) == []


def test_there_are_files_to_check() -> None:
    assert PACKAGE / "errors.py" in FILES


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("block", "from tieredkv.store import Store"),
        ("block", "from tieredkv import store"),
        ("block", "from .store import Store"),
        ("block", "import tieredkv.store"),
        ("block", "import tieredkv"),
        ("block", "def f() -> None:\n    from tieredkv.store import Store"),
        ("block", "if TYPE_CHECKING:\n    from tieredkv.store import Store"),
        ("tiers.hot", "from ..placement import Placement"),
        ("tiers.hot", "from tieredkv import placement"),
        ("device.cuda", "from tieredkv.tiers import base"),
        ("attention.flex", "from tieredkv.reference import attend"),
        ("rooms", "import torch"),
        ("store", "from tieredkv.rooms import Room"),
        ("store", "from tieredkv import TieredCache"),
        ("store", "torch.cuda.synchronize()"),
        ("store", "import torch.cuda"),
        ("store", "from torch import cuda"),
        ("store", "from torch.cuda import Stream"),
        ("store", "import transformers"),
        ("store", "def f() -> None:\n    from transformers.cache_utils import DynamicCache"),
        ("sizing", "import transformers"),
        ("store", "assert True"),
        ("store", "try:\n    f()\nexcept:\n    pass"),
        ("store", "print(1)"),
        ("store", "def f() -> None:\n    global g\n    g = 1"),
        ("store", "raise NotImplementedError"),
        ("store", "def f() -> None:\n" + "    g()\n" * MOST_FUNCTION_LINES),
        ("store", "g()\n" * MOST_LINES),
    ],
)
def test_a_breach_is_found(module: str, line: str) -> None:
    assert breaches(f'"""For."""\n{line}\n', f"tieredkv.{module}")


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("store", "from tieredkv.block import Block"),
        ("store", "from tieredkv.tiers.hot import HotTier"),
        ("store", "from tieredkv import errors"),
        ("tiers.hot", "from ..block import Block"),
        ("tiers.hot", "from tieredkv.tiers.base import Tier"),
        ("tiers.hot", "from .base import Tier"),
        ("tiers.__init__", "from tieredkv.tiers.cold import ColdTier"),
        ("device.cuda", "from tieredkv.device.base import Device\ntorch.cuda.synchronize()"),
        ("device.__init__", "from tieredkv.device.cuda import Cuda"),
        ("sizing", "def f() -> None:\n    import transformers"),
        ("sizing.shapes", "def f() -> None:\n    import transformers"),
        ("cache", "import transformers\nfrom tieredkv.hf import seam"),
        ("cli", "import tieredkv\nprint(tieredkv.__version__)"),
        ("cli.demo", "from tieredkv import TieredCache\nfrom tieredkv.hf import register"),
        ("store", "g()\n" * (MOST_LINES - 2)),
        ("store", "def f() -> None:\n" + "    g()\n" * (MOST_FUNCTION_LINES - 1)),
    ],
)
def test_what_is_allowed_is_not_called_a_breach(module: str, line: str) -> None:
    assert breaches(f'"""For."""\n{line}\n', f"tieredkv.{module}") == []


def test_a_module_says_what_it_is_for() -> None:
    assert breaches("g()\n", "tieredkv.store")
