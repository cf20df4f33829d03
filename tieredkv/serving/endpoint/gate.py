"""The outermost layer of the endpoint: who may ask, how much may be sent, and who has gone.

Imports: this package's client, errors; starlette.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import traceback
from collections.abc import Sequence

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tieredkv.serving.endpoint.client import CLIENT, Client
from tieredkv.serving.endpoint.errors import error_body, fault_body

logger = logging.getLogger("tieredkv")


class Gate:
    """Lets a request through to the app with its whole body, and cancels what it began when its client goes.

    What goes wrong inside is logged without its message, in which there might be a prompt.

    Args:
        app: what answers.
        api_keys: who may ask under /v1; empty for everybody. Each key has a salt of its own.
        most_body_bytes: most bytes of a body.
    """

    def __init__(self, app: ASGIApp, api_keys: Sequence[str], most_body_bytes: int) -> None:
        self._app, self._most_body_bytes = app, most_body_bytes
        self._salts = {key: hashlib.sha256(b"tieredkv api key " + key.encode()).hexdigest() for key in api_keys}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        salt = self._salt(scope)
        if salt is None:
            change = "send Authorization: Bearer KEY"
            await _refuse(scope, receive, send, 401, f"The API key is missing or wrong. To change: {change}", "api_key")
            return
        try:
            body = await self._body(scope, receive)
        except ClientDisconnect:
            return  # nobody is there to be told
        if body is None:
            message = f"The body is larger than {self._most_body_bytes} bytes. To change: send less"
            await _refuse(scope, receive, send, 413, message, "body_too_large")
            return
        await self._serve(scope, receive, send, body, Client(salt))

    def _salt(self, scope: Scope) -> str | None:
        """The salt of whoever asks; None for nobody we know."""
        if not self._salts or not scope["path"].startswith("/v1/"):
            return ""
        given = dict(scope["headers"]).get(b"authorization", b"")
        found = [salt for key, salt in self._salts.items() if hmac.compare_digest(given, b"Bearer " + key.encode())]
        return found[0] if found else None

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        """The whole body, or None when it is too large.

        Raises:
            ClientDisconnect: the client went before it had sent all of it.
        """
        said = dict(scope["headers"]).get(b"content-length", b"0")
        if said.isdigit() and int(said) > self._most_body_bytes:
            return None
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            body += message.get("body", b"")
            if len(body) > self._most_body_bytes:
                return None
            if not message.get("more_body", False):
                return bytes(body)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, body: bytes, client: Client) -> None:
        gone, has_begun, given = asyncio.Event(), False, False

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            client.leave()
            gone.set()

        async def again() -> Message:
            nonlocal given
            if not given:
                given = True
                return {"type": "http.request", "body": body, "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def noting(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        CLIENT.set(client)
        watcher = asyncio.create_task(watch())
        try:
            await self._app(scope, again, noting)
        except Exception as error:
            # Anything: whatever it is, the client is told that it was not its fault, and the log where it was.
            where = "".join(traceback.format_tb(error.__traceback__))
            logger.error("tieredkv: a request failed with %s\n%s", type(error).__name__, where)
            if not has_begun:
                await JSONResponse(fault_body(), 500)(scope, again, send)
        finally:
            watcher.cancel()
            client.leave()  # of no effect on what has ended


async def _refuse(scope: Scope, receive: Receive, send: Send, status: int, message: str, code: str) -> None:
    await JSONResponse(error_body(status, message, code), status)(scope, receive, send)
