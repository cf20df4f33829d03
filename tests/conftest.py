"""What every test shares: no network, fixed seeds, a fair share of the cores, and a folder for cold tiers.

Imports nothing of the package, so that a test decides itself when the package is imported.
"""

from __future__ import annotations

import gc
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Compiling in this process is quicker for a few small kernels than starting a pool of compilers in each worker.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import hypothesis
import on_simulated
import pytest
import torch

_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
torch.set_num_threads(max(1, (os.cpu_count() or 1) // _WORKERS))

# Time limits are pytest-timeout's: on a machine that others use too, a deadline per example only makes noise.
_QUIET = [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture]
hypothesis.settings.register_profile(
    "local", deadline=None, print_blob=True, max_examples=50, suppress_health_check=_QUIET
)
hypothesis.settings.register_profile("ci", hypothesis.settings.get_profile("local"), derandomize=True, database=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test marked `gpu` needs a CUDA device."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    if on_simulated.IS_ASKED_FOR:
        on_simulated.skip_what_is_of_the_cpu(item)


@pytest.fixture(autouse=True)
def _seeds() -> None:
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another test compiled, perhaps by a stand-in, serves no cache of this one."""
    module = sys.modules.get("tieredkv.attention.kernels")
    if module is not None:
        monkeypatch.setattr(module, "COMPILED", module.CompiledFlex())


@pytest.fixture(autouse=True)
def _device() -> Iterator[None]:
    if not on_simulated.IS_ASKED_FOR:
        yield
        return
    with on_simulated.standing_in():
        yield


@pytest.fixture
def no_collection() -> Iterator[None]:
    """For a test that bounds how long something takes: the garbage collector looks at everything torch imported first,
    which takes 0.3 seconds, and comes when it likes.
    """
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.fixture
def cold_dir(tmp_path: Path) -> Path:
    """A path for a cold tier, in this test's own folder; nothing is there yet."""
    return tmp_path / "cold"
