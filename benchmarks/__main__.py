"""Runs every benchmark, one after the other: python -m benchmarks [--quick]."""

from __future__ import annotations

import subprocess
import sys

QUESTIONS = (
    "decode",
    "transfer",
    "codecs",
    "prefix",
    "capacity",
    "memory",
    "serving",
    "block_size",
    "windows",
    "quality",
    "quality_long",
)

failed = []
for question in QUESTIONS:
    # A process each: compiled graphs and memory of one do not weigh on the next.
    if subprocess.run([sys.executable, "-m", f"benchmarks.{question}", *sys.argv[1:]], check=False).returncode:
        failed.append(question)
sys.exit(f"failed: {', '.join(failed)}" if failed else 0)
