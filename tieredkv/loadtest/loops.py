"""When requests are sent: at times of their own, or when another has ended.

Imports: clock, records, shapes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence

from tieredkv.loadtest.clock import Clock
from tieredkv.loadtest.records import Record
from tieredkv.loadtest.shapes import Ask

Send = Callable[[Ask, float | None], Awaitable[Record]]
"""(what to ask, when it was planned: the clock's seconds, or None for now) -> what became of it."""


async def open_loop(asks: Sequence[Ask], send: Send, clock: Clock) -> list[Record]:
    """Send each at its time, whatever became of the others."""
    start, tasks = clock.now(), []
    async with asyncio.TaskGroup() as group:
        for ask in asks:
            planned = start + ask.at_seconds
            if (early := planned - clock.now()) > 0:
                await clock.sleep(early)
            tasks.append(group.create_task(_record(send, ask, planned)))
    return [task.result() for task in tasks]


async def closed_loop(asks: Sequence[Ask], send: Send, concurrency: int) -> list[Record]:
    """Keep so many going until all have been sent; in the order of sending."""
    waiting, found = iter(asks), []
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_one_after_the_other(waiting, send)) for _ in range(min(concurrency, len(asks)))]
    for task in tasks:
        found += task.result()
    return sorted(found, key=lambda record: record.ask.number)


async def _record(send: Send, ask: Ask, planned_seconds: float | None) -> Record:
    return await send(ask, planned_seconds)


async def _one_after_the_other(waiting: Iterator[Ask], send: Send) -> list[Record]:
    return [await send(ask, None) for ask in waiting]
