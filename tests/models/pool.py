"""Each class of the matrix in a process of its own, a few at a time: one that hangs or crashes costs its own row only.

Imports: matrix.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from models.matrix import Outcome, examine

LIMIT_SECONDS = 120.0


def examine_all(
    model_types: Sequence[str],
    *,
    workers: int = 2,
    limit_seconds: float = LIMIT_SECONDS,
    function: Callable[[str], Outcome] = examine,
) -> Iterator[Outcome]:
    """Outcomes, in the order in which they come.

    Args:
        model_types: what to examine.
        workers: how many at a time, each on one thread.
        limit_seconds: for each; what takes longer is ended.
        function: what does it; importable, as it runs in another process.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers", "tieredkv.cache"])
    left = list(reversed(model_types))
    running: dict[Connection, tuple[str, Any, float]] = {}
    while left or running:
        while left and len(running) < workers:
            name = left.pop()
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(there, function, name), daemon=True)
            process.start()
            there.close()
            running[here] = (name, process, time.monotonic() + limit_seconds)
        ready = wait(list(running), timeout=0.5)
        for connection, (name, process, deadline) in list(running.items()):
            if connection not in ready and time.monotonic() < deadline:
                continue
            yield _result(name, connection, process, connection in ready, limit_seconds)
            connection.close()
            del running[connection]


def _result(name: str, connection: Connection, process: Any, ready: bool, limit_seconds: float) -> Outcome:
    outcome = Outcome(name, failure=f"took longer than {limit_seconds:.0f} s")
    if ready:
        try:
            outcome = connection.recv()
        except EOFError:
            process.join(5)
            outcome = Outcome(name, failure=f"the process ended with code {process.exitcode}")
    process.kill()
    process.join()
    return outcome


def _work(connection: Connection, function: Callable[[str], Outcome], name: str) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)
    connection.send(function(name))
