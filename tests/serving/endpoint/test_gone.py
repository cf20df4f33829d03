"""A client that goes: its request is cancelled and its blocks are free within one step, and others go on.

The engine runs on the test's own thread, a step at a time, so that nothing depends on when things happen.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from tieredkv.serving import Finish, RequestHandle

from .conftest import Served, needs_packages

pytestmark = [needs_packages, pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")]


class Connection:
    """One request over ASGI, whose client can go.

    Args:
        served: the endpoint.
        body: of /v1/completions.
    """

    def __init__(self, served: Served, body: dict[str, Any]) -> None:
        self._content, self._gone, self._given = json.dumps(body).encode(), asyncio.Event(), False
        self.sent: list[Any] = []
        headers = [(b"content-type", b"application/json"), (b"host", b"testserver")]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": "/v1/completions",
            "raw_path": b"/v1/completions",
            "query_string": b"",
            "headers": headers,
            "client": ("testclient", 1),
            "server": ("testserver", 80),
        }
        self.task = asyncio.create_task(served.app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if not self._given:
            self._given = True
            return {"type": "http.request", "body": self._content, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)

    def go(self) -> None:
        """The client goes."""
        self._gone.set()

    @property
    def text(self) -> str:
        """What it was sent so far."""
        lines = b"".join(message.get("body", b"") for message in self.sent).decode().split("\n\n")
        objects = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        return "".join(each["choices"][0]["text"] for each in objects)


async def until(holds: Callable[[], Any]) -> None:
    """Let the event loop run until something holds."""
    for _ in range(10_000):
        if holds():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came about")


def handle_of(served: Served) -> RequestHandle:
    """The newest request's."""
    return served.engine._arrivals[-1].handle


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("steps", [0, 1, 5])
def test_a_client_that_goes_frees_its_blocks_within_a_step(
    serve: Callable[..., Served], stream: bool, steps: int
) -> None:
    async def scenario() -> None:
        served = serve(start=False)
        options = {"max_tokens": 30, "temperature": 0, "ignore_eos": True, "stream": stream}
        stays = Connection(served, {"prompt": "s" * 40, **options, "stream": True})
        await until(lambda: served.engine._arrivals)
        staying = handle_of(served)
        goes = Connection(served, {"prompt": "g" * 40, **options})
        await until(lambda: len(served.engine._arrivals) == 2)
        going = handle_of(served)
        for _ in range(steps):
            served.engine.step()
            await asyncio.sleep(0)
        goes.go()
        await until(lambda: going.is_cancelled)
        blocks = served.engine._runner.blocks
        served.engine.step()
        assert going.finish is Finish.CANCELLED
        assert len(blocks.holders) == 2  # the one that stays, and what is published
        assert [request.handle for request in served.engine._runner.everyone()] == [staying]
        await until(goes.task.done)
        while served.engine.step():
            pass
        await until(stays.task.done)
        assert stays.text == served.alone("s" * 40, 30)
        assert served.engine.stats().finished == {"cancelled": 1, "length": 1}
        served.assert_at_rest()
        for connection in (stays, goes):
            connection.task.result()

    asyncio.run(scenario())


def test_a_client_that_goes_before_its_body_is_there_begins_nothing(serve: Callable[..., Served]) -> None:
    async def scenario() -> None:
        served = serve(start=False)
        connection = Connection(served, {"prompt": "a"})
        connection._given = True
        connection.go()
        await until(connection.task.done)
        connection.task.result()
        assert not connection.sent and not served.engine._arrivals

    asyncio.run(scenario())


def test_a_task_that_is_cut_off_cancels_its_request(serve: Callable[..., Served]) -> None:
    """What uvicorn does with what is left when the time to drain is over."""

    async def scenario() -> None:
        served = serve(start=False)
        connections = [Connection(served, {"prompt": "a", "stream": stream}) for stream in (True, False)]
        await until(lambda: len(served.engine._arrivals) == 2)
        handles = [request.handle for request in served.engine._arrivals]
        for connection in connections:
            connection.task.cancel()
            await until(connection.task.done)
        assert all(handle.is_cancelled for handle in handles)
        served.engine.step()
        assert {handle.finish for handle in handles} == {Finish.CANCELLED}
        served.assert_at_rest()

    asyncio.run(scenario())
