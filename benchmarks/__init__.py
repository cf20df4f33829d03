"""Benchmarks: one file per question, run as `python -m benchmarks.<question>`; results go to benchmarks/results."""
