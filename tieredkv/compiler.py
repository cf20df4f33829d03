"""Small C++ sources to shared libraries: compiled once, kept in a folder of the user's, found again by content.

The compiler is the one that `torch.compile` needs on a CPU too. Without one, whoever asks keeps a slower way and tells
the user (`slower_without`).

Imports: nothing of the package.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
import weakref
from collections.abc import Mapping
from pathlib import Path

_FLAGS = ("-O3", "-march=native", "-std=c++17", "-ffp-contract=fast", "-fno-math-errno", "-shared", "-fPIC", "-fopenmp")


class Compiler:
    """Compiles sources and loads them.

    Args:
        folder: where libraries are kept; by default one under the user's cache folder (`XDG_CACHE_HOME`).
        compiler: the C++ compiler; by default `CXX`, else the first of g++, clang++ and c++ that is found.
    """

    def __init__(self, folder: Path | None = None, compiler: str | None = None) -> None:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self._folder = folder if folder is not None else home / "tieredkv" / "kernels"
        self._compiler = compiler

    def load(self, name: str, source: str, defines: Mapping[str, int]) -> ctypes.CDLL:
        """The library of a source with some macros defined. Calls into it run without the interpreter lock.

        Args:
            name: the beginning of the library's file name.
            source: C++.
            defines: macros.

        Raises:
            OSError: there is no compiler, or the source does not compile, or the library does not load.
        """
        return ctypes.CDLL(str(self._build(name, source, defines)))

    def _build(self, name: str, source: str, defines: Mapping[str, int]) -> Path:
        """The path of the shared library, compiled unless the folder has it."""
        candidates = (self._compiler, os.environ.get("CXX"), "g++", "clang++", "c++")
        compiler = next((found for each in candidates if each and (found := shutil.which(each))), None)
        if compiler is None:
            raise FileNotFoundError("no C++ compiler (CXX, g++, clang++ or c++)")
        options = [*_FLAGS, *(f"-D{macro}={value}" for macro, value in defines.items())]
        parts = [source.encode(), _identity(compiler).encode(), " ".join(options).encode(), _processor().encode()]
        digest = hashlib.sha256(b"\0".join(parts)).hexdigest()[:32]
        path = self._private_folder() / f"{name}-{digest}.so"
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
                text, built = Path(scratch, f"{name}.cpp"), Path(scratch, f"{name}.so")
                text.write_text(source)
                command = [compiler, *options, str(text), "-o", str(built)]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    raise OSError(f"{compiler}: {done.stderr.strip()[:500]}")
                built.replace(path)  # whole or absent, whoever else compiles it now
        return path

    def _private_folder(self) -> Path:
        """The folder, if code in it can only be the user's own; else a fresh one for this object."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            state = self._folder.stat()
        except OSError:
            state = None
        own = state is not None and state.st_uid == os.getuid() and not state.st_mode & 0o022
        if not own or not os.access(self._folder, os.W_OK):
            self._folder = Path(tempfile.mkdtemp(prefix="tieredkv-kernels-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        return self._folder


def slower_without(part: str, reason: OSError) -> str:
    """Warn that a part of the cache is served by something slower, since its C++ is not to be had.

    Args:
        part: what is slower, in the plural.
        reason: what `Compiler.load` raised.

    Returns:
        Part and reason, for `CacheStats.native_failures`.
    """
    said = f"{part}: {reason}"
    # Not by the log: Python shows a warning once in a process, however many caches it makes.
    warnings.warn(f"tieredkv: slower without C++, {said}", RuntimeWarning, stacklevel=2)
    return said


def _identity(compiler: str) -> str:
    """Changes when the compiler is replaced; asking it for its version would take longer than loading a library."""
    real = os.path.realpath(compiler)
    state = os.stat(real)
    return f"{real} {state.st_size} {state.st_mtime_ns}"


def _processor() -> str:
    """What "native" means to the compiler here: a folder may be shared by machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
