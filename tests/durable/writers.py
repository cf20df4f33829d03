"""Writers in processes of their own: killed by SIGKILL at a random point, or two at once; a script of its own.

    python writers.py DIRECTORY SEED RUNS

Each run forks a writer, which kills itself before, in the middle of or after a system call chosen by the seed, or is
killed by its parent after a random time. Then the directory is opened again. Prints a line of JSON for each run:

    reported   blocks of publications that had returned
    found      those of them that are there
    wrong      files or blocks that are there and not whole, or leftovers
    ended      how the writer ended: "killed" or "done"

The last line is of two writers that publish, evict and read in one directory at once: for each its exit code.

Imports: tests' durable_support.
"""

from __future__ import annotations

import json
import logging
import os
import random
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from durable_support import ONE_FILE_BYTES, chain, disk_bytes, files, hashes, holds, opened, publish, quarantined  # noqa: E402

from tieredkv.durable import BlockRecord  # noqa: E402
from tieredkv.durable.format import Refusal  # noqa: E402
from tieredkv.durable.survey import survey, wrong_rows  # noqa: E402
from tieredkv.errors import ColdTierError  # noqa: E402

CALLS = ("open", "ftruncate", "pwritev", "fsync", "rename", "mkdir", "close", "unlink")
CHAINS = [chain(f"{number}", 1 + number * 3 % 8) for number in range(12)]
SHARED_CAP_BYTES = 20 * ONE_FILE_BYTES


def kill_at(step: int, chance: random.Random) -> None:
    """Make one of the next system calls the last: the process dies before it, after it, or with half of it written."""
    left = [step]

    def watched(call: str) -> Callable[..., object]:
        real = getattr(os, call)

        def wrapper(*args: object, **kwargs: object) -> object:
            left[0] -= 1
            if left[0]:
                return real(*args, **kwargs)
            when = chance.choice(["before", "within", "after"])
            if when == "after":
                real(*args, **kwargs)
            elif when == "within" and call == "pwritev":
                descriptor, buffers, offset = args
                real(descriptor, [buffers[0][: len(buffers[0]) // 2]], offset)  # type: ignore[index]
            os.kill(os.getpid(), signal.SIGKILL)
            return None

        return wrapper

    for call in CALLS:
        setattr(os, call, watched(call))


def write(directory: Path, seed: int, report: int, cap: int | None) -> None:
    """Publish one chain after another and report each by its number once `publish` has returned."""
    chance = random.Random(seed)
    order = chance.sample(range(len(CHAINS)), len(CHAINS))
    if seed % 2:
        kill_at(chance.randint(1, 260), chance)
    store = opened(directory, cap=cap)
    for number in order:
        if publish(store, CHAINS[number]) == len(CHAINS[number]):
            os.write(report, bytes([number]))


def run(directory: Path, seed: int) -> dict[str, object]:
    """One writer's life, and what it left."""
    chance = random.Random(-seed)
    cap = 12 * ONE_FILE_BYTES if seed % 5 == 0 else None
    reading, report = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reading)
            write(directory, seed, report, cap)
        finally:
            os._exit(0)
    os.close(report)
    if not seed % 2:
        time.sleep(chance.random() * 0.06)
        os.kill(child, signal.SIGKILL)
    numbers = b""
    while select.select([reading], [], [], 60)[0] and (part := os.read(reading, 4096)):
        numbers += part
    os.close(reading)
    _, status = os.waitpid(child, 0)
    reported = [CHAINS[number] for number in numbers]
    return inspect(directory, reported, cap) | {
        "seed": seed,
        "capped": cap is not None,
        "ended": "killed" if os.WIFSIGNALED(status) else "done",
    }


def inspect(directory: Path, reported: list[list[BlockRecord]], cap: int | None) -> dict[str, object]:
    """Open the directory as the next process would."""
    wrong: list[str] = []
    store = opened(directory, cap=cap)
    for records in CHAINS:
        found = store.find(hashes(records))
        if not holds(store, records[:found]):
            wrong.append("a block has other bytes")
    found = sum(store.find(hashes(records)) for records in reported)
    for file in survey(directory):
        if isinstance(file.content, Refusal) or wrong_rows(file.content, file.seen.path):
            wrong.append(f"{file.seen.path} is not whole")
    wrong += [f"{left} is left over" for left in directory.glob("durable/*/tmp/*")]
    wrong += [f"{left} was set aside" for left in quarantined(directory)]
    if store.stats().failures:
        wrong.append("the disk is said to have failed")
    if cap is not None and sum(path.stat().st_size for path in files(directory)) > cap:
        wrong.append("the cap is exceeded")
    for records in CHAINS:  # life goes on
        if publish(store, records) != len(records) or store.find(hashes(records)) != len(records):
            wrong.append("a chain cannot be published any more")
    return {"reported": sum(map(len, reported)), "found": found, "wrong": wrong}


def share(directory: Path, me: int) -> int:
    """One of two writers below one cap; 0 when all went well."""
    cap = SHARED_CAP_BYTES
    store = opened(directory, cap=cap)
    for step in range(40):
        records = CHAINS[(step * (1 + me)) % len(CHAINS)]
        publish(store, records)
        with suppress(ColdTierError):  # the other one evicts what this one finds
            if not holds(store, records[: store.find(hashes(records))]):
                return 3
        if disk_bytes(directory) > cap:
            return 4
    stats = store.stats()
    return 5 if stats.failures or stats.set_aside or not stats.published else 0


def together(directory: Path) -> dict[str, object]:
    """Two writers at once."""
    children = []
    for me in range(2):
        child = os.fork()
        if not child:
            code = 6
            try:
                code = share(directory, me)
            finally:
                os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return {"codes": codes, "places": sorted({file.place for file in survey(directory)})}


def main() -> None:
    """The script."""
    logging.disable(logging.CRITICAL)
    directory, seed, runs = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    for number in range(seed, seed + runs):
        print(json.dumps(run(directory / str(number), number)), flush=True)
    print(json.dumps(together(directory / "shared")), flush=True)


if __name__ == "__main__":
    main()
