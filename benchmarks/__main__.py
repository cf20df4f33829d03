"""Runs every benchmark, one after the other: python -m benchmarks [--quick]."""

from __future__ import annotations

import subprocess
import sys

QUESTIONS = ("decode",)

for question in QUESTIONS:
    # A process each: compiled graphs and memory of one do not weigh on the next.
    subprocess.run([sys.executable, "-m", f"benchmarks.{question}", *sys.argv[1:]], check=True)
