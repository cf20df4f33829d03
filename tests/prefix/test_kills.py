"""Processes that are killed while they publish and save: every block is whole or absent, and what was told is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "kill_runs.py"
ROOT = SCRIPT.parent.parent.parent


@pytest.mark.parametrize("runs", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_killed_at_random_points(tmp_path: Path, runs: int) -> None:
    command = [sys.executable, "-W", "ignore", str(SCRIPT), str(tmp_path), "0", str(runs)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    out = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    found = json.loads(out.stdout.splitlines()[-1])
    assert found["published"] >= 6 * runs // 3
    assert found["reused"] >= 0.99 * found["published"]
    assert found["worst"] <= 2e-5, "logits of a fresh run"
    assert found["set_aside"] == 0
    assert found["saved"] and found["loaded"] == 100
    assert len(found["left"]) <= runs, "temporary files, of killed saves alone"
