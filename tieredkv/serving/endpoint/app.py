"""An OpenAI-compatible endpoint for an `Engine`: transformers' serving app, with the engine behind its seam.

Needs the packages of the extra `serve`; `need_packages` says so where they are not there. `build` puts the parts
together, and nothing here listens: see `server`.

Imports: everything to its left, engine and settings; the rest of this package when the packages are known to be there.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
from typing import TYPE_CHECKING, Any

import transformers

from tieredkv.errors import ConfigError, TieredKVError
from tieredkv.serving.engine import Engine
from tieredkv.serving.settings import EngineSettings

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.types import ASGIApp

    from tieredkv.serving.metrics import EngineMetrics

PACKAGES = ("fastapi", "openai", "prometheus_client", "pydantic", "uvicorn")
ROUTES = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/models", "/health"})
"""What is served of transformers' app; its other routes load models by name, or bypass the engine."""


@dataclasses.dataclass(frozen=True)
class EndpointSettings:
    """Choices of an endpoint.

    Args:
        name: what clients call the model.
        api_keys: who may ask; empty for everybody. Prefixes are shared within one key only.
        most_body_bytes: most bytes of a request's body.
        default_tokens: most new tokens of a request that says nothing of it.

    Raises:
        ConfigError: a value that cannot be served.
    """

    name: str
    api_keys: tuple[str, ...] = ()
    most_body_bytes: int = 4 * 2**20
    default_tokens: int = 1024

    def __post_init__(self) -> None:
        if not self.name or min(self.most_body_bytes, self.default_tokens) < 1 or not all(self.api_keys):
            raise ConfigError(
                "An endpoint cannot be like that.",
                wanted="a name, limits of at least 1, and API keys that are not empty",
                got=f"name={self.name!r}, most_body_bytes={self.most_body_bytes},"
                f" default_tokens={self.default_tokens}, {len(self.api_keys)} keys",
                change="leave them at their defaults",
            )


def need_packages() -> None:
    """Find out that the endpoint can be built here.

    Raises:
        ConfigError: a package is not installed, or transformers has no serving app.
    """
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            "Serving needs more packages.",
            wanted=", ".join(PACKAGES),
            got="no " + ", ".join(missing),
            change="pip install 'tieredkv[serve]'",
        )
    if importlib.util.find_spec("transformers.cli.serving") is None:
        raise _other_app("no transformers.cli.serving")


def build(engine: Engine, model: Any, tokenizer: Any, settings: EndpointSettings, metrics: EngineMetrics) -> ASGIApp:
    """The endpoint as an ASGI app.

    Args:
        engine: started by the caller, who closes it too.
        model, tokenizer: those of the engine.
        settings: choices.
        metrics: what `/metrics` gives.

    Raises:
        ConfigError: the packages are not there, or transformers' serving app is not the one we know.
    """
    need_packages()
    from tieredkv.serving.endpoint.gate import Gate

    app = _transformers_app(engine, model, tokenizer, settings)
    _answer_errors(app)

    from fastapi import Response

    def show_metrics() -> Response:
        return Response(metrics.text(), media_type=metrics.content_type)

    app.add_api_route("/metrics", show_metrics, methods=["GET"])
    return Gate(app, settings.api_keys, settings.most_body_bytes)


def _transformers_app(engine: Engine, model: Any, tokenizer: Any, settings: EndpointSettings) -> FastAPI:
    try:
        from transformers.cli.serving.server import build_server

        from tieredkv.serving.endpoint.handlers import ChatHandler, TextHandler
        from tieredkv.serving.endpoint.manager import EngineState, OneModel
    except (ImportError, AttributeError) as error:
        raise _other_app(f"{type(error).__name__}: {error}") from error
    limit, vocabulary = engine.settings.max_model_len, model.config.get_text_config(decoder=True).vocab_size
    state = EngineState(engine, settings.default_tokens)
    models = OneModel(model, tokenizer, settings.name, limit)
    parts: dict[str, Any] = {
        "model_manager": models,
        "chat_handler": ChatHandler(models, state, limit, vocabulary),
        "completion_handler": TextHandler(models, state, limit, vocabulary),
        "generation_state": state,
    }
    # Handlers of routes that are not served: which ones there are depends on the version.
    wanted = inspect.signature(build_server).parameters
    parts |= {name: None for name in wanted if name.endswith("_handler") and name not in parts}
    if set(parts) - set(wanted):
        raise _other_app(f"build_server({', '.join(wanted)})")
    app: FastAPI = build_server(**parts)
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) in ROUTES]
    return app


def _answer_errors(app: FastAPI) -> None:
    """Errors in OpenAI's form, ours with their own words."""
    from fastapi import Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse
    from starlette.exceptions import HTTPException

    from tieredkv.serving.endpoint.errors import body_of, error_body, fault_body, status_of

    async def ours(request: Request, error: Exception) -> JSONResponse:
        if not isinstance(error, TieredKVError):
            raise error
        return JSONResponse(body_of(error), status_of(error))

    async def http(request: Request, error: Exception) -> JSONResponse:
        if not isinstance(error, HTTPException):
            raise error
        status = 400 if error.status_code == 422 else error.status_code
        return JSONResponse(error_body(status, str(error.detail)), status)

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        message = "The body is no JSON object. To change: send one, with content-type: application/json"
        return JSONResponse(error_body(400, message, "invalid_json"), 400)

    async def fault(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse(fault_body(), 500)  # the gate, which sees it too, writes the log

    app.add_exception_handler(Exception, fault)
    app.add_exception_handler(TieredKVError, ours)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, invalid)


def _other_app(got: str) -> ConfigError:
    return ConfigError(
        "transformers' serving app is not the one that the endpoint is built on.",
        wanted="transformers 5.17 to 5.24",
        got=f"transformers {transformers.__version__}: {got}",
        change="install one of these versions",
    )


def engine_settings_for(model: Any, settings: EngineSettings) -> EngineSettings:
    """The settings with a length that the model's positions allow."""
    most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    limit = settings.max_model_len
    if most is None or (limit is not None and limit <= most):
        return settings
    return dataclasses.replace(settings, max_model_len=most)
