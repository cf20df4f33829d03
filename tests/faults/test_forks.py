"""A child that was forked while another thread was inside the store ends, whatever it does with what it inherited."""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import assert_close, feed, oracle, small, store_of, tiny, tokens

MOST_SECONDS = 20.0


def ends(child_does: Callable[[], Any]) -> bool:
    """Whether a child that does this comes to its end."""
    child = os.fork()
    if not child:
        code = 1
        try:
            child_does()
            code = 0
        finally:
            os._exit(code)
    stop = time.monotonic() + MOST_SECONDS
    while time.monotonic() < stop:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("how", ["close", "drop", "exit", "store"])
def test_a_fork_in_the_middle_of_a_step_ends(cold_dir: Path, how: str) -> None:
    model, ids = tiny(), tokens(120)
    with small(model, cold_dir) as cache:
        feed(model, ids[:, :100], cache)
        store, inside, done = store_of(cache), threading.Event(), threading.Event()

        def step() -> None:
            with store.lock:
                inside.set()
                done.wait(60)

        thread = threading.Thread(target=step)
        thread.start()
        inside.wait(60)
        child_does = {
            "close": cache.close,
            "drop": lambda: cache._place._finalizer(),
            "exit": atexit._run_exitfuncs,
            "store": store.close,
        }
        try:
            assert ends(child_does[how])
        finally:
            done.set()
            thread.join()
        assert len(list(cold_dir.iterdir())) == 1
        assert_close(feed(model, ids[:, 100:], cache), oracle(ids)[:, 100:])
