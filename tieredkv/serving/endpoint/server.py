"""Listens for the endpoint: takes the port before the model is loaded, and stops in order on a signal.

Imports: errors; uvicorn.
"""

from __future__ import annotations

import errno
import logging
import signal
import socket
from collections.abc import Callable
from typing import Any

from tieredkv.errors import ConfigError

BACKLOG = 2048


def take_port(host: str, port: int) -> socket.socket:
    """A socket that is bound and does not listen yet.

    Args:
        host: an address or name of this machine.
        port: 0 for any that is free.

    Raises:
        ConfigError: somebody else has it, or it cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        taken = socket.socket(family, kind, protocol)
    except (OSError, OverflowError) as error:
        raise _no_port(host, port, error) from error
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(address)
    except OSError as error:
        taken.close()
        raise _no_port(host, port, error) from error
    return taken


def _no_port(host: str, port: int, error: Exception) -> ConfigError:
    in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
    return ConfigError(
        "The port is in use." if in_use else "The address cannot be listened at.",
        wanted=f"{host}:{port}",
        got=str(error),
        change="another --port, or stop who has it" if in_use else "another --host or --port",
    )


def serve(app: Any, taken: socket.socket, drain_seconds: float, ready: Callable[[], None]) -> None:
    """Answer until SIGTERM or SIGINT; then take no more requests, and finish those there are. On the main thread.

    Args:
        app: an ASGI app.
        taken: from `take_port`; closed afterwards.
        drain_seconds: what is not finished after so long is cancelled.
        ready: called when connections are taken.
    """
    import uvicorn

    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="on",
        ws="none",
        timeout_graceful_shutdown=max(int(drain_seconds), 1),
    )
    server = uvicorn.Server(config)
    # uvicorn raises the signal that stopped it once more when it is done, for whoever was there before it.
    before = {each: signal.signal(each, server.handle_exit) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        taken.listen(BACKLOG)
        ready()
        server.run(sockets=[taken])
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        taken.close()
