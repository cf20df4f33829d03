"""Errors as an OpenAI client expects them: a status, and a JSON object that says what to change.

Imports: errors.
"""

from __future__ import annotations

from typing import Any

from tieredkv.errors import BudgetError, ClosedError, ConfigError, TieredKVError

GONE = 499
"""The status of a request whose client has gone, which nobody reads."""


class RefusedError(ConfigError):
    """A request that is not served, with its HTTP status.

    Args:
        status: HTTP status.
        code: for programs, as OpenAI spells them where it has one.
        param: the field that is at fault.
    """

    def __init__(
        self,
        what: str,
        *,
        wanted: object,
        got: object,
        change: str,
        status: int = 400,
        code: str = "invalid_value",
        param: str | None = None,
    ) -> None:
        self.status, self.code, self.param = status, code, param
        super().__init__(what, wanted=wanted, got=got, change=change)


def status_of(error: TieredKVError) -> int:
    """The HTTP status: 400 for what the caller can change, 503 for an engine that has stopped, else 500."""
    if isinstance(error, RefusedError):
        return error.status
    if isinstance(error, ClosedError):
        return 503
    return 400 if isinstance(error, BudgetError | ValueError) else 500


def body_of(error: TieredKVError) -> dict[str, Any]:
    """The JSON object."""
    code = "context_length_exceeded" if isinstance(error, BudgetError) else None
    code, param = (error.code, error.param) if isinstance(error, RefusedError) else (code, None)
    return error_body(status_of(error), str(error), code, param)


def fault_body() -> dict[str, Any]:
    """The JSON object for what is no error of ours."""
    return error_body(500, "The server has a fault; its log says where.", "internal_error")


def error_body(status: int, message: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """A JSON object in OpenAI's form."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
