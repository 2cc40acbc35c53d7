"""The application: routes, what runs beside them, and how errors become answers."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import structlog
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from sqlalchemy.exc import InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.fetch import loggable
from api.problems import MEDIA_TYPE, problem, problem_body, refusal
from api.resources import build, running
from api.routes import health, jobs, models, progress
from common.domain.errors import (
    DATABASE_UNAVAILABLE,
    INTERNAL,
    INVALID_PARAMETER,
    METHOD_NOT_ALLOWED,
    NOT_FOUND,
    ErrorKind,
    LatentmillError,
)
from common.settings import ApiSettings

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_KINDS = {404: NOT_FOUND, 405: METHOD_NOT_ALLOWED}
_FIRST_SERVER_ERROR = 500
_REQUEST_S = 10.0  # as docs/explanation/lifecycle.md has it; the body has been gathered by nginx before
_PROBLEM = {"type": "object", "example": problem_body(NOT_FOUND, "there is no such job", "/v1/jobs/job_0")}

# A redirect would go to whatever host the caller named, and the pages of documentation load scripts from elsewhere.
_SERVED: dict[str, Any] = {"redirect_slashes": False, "docs_url": None, "redoc_url": None}

log = structlog.get_logger()


def create_app(settings: ApiSettings) -> FastAPI:
    """The app. It connects to nothing before its lifespan starts."""
    resources = build(settings)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with running(resources):
            yield

    app = FastAPI(title="latentmill", version="0.1.0", lifespan=lifespan, **_SERVED)
    app.state.resources = resources
    for routes in (jobs, models, progress, health):
        app.include_router(routes.router)
    _answer_errors(app)
    app.add_middleware(RequestEdge)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]  # FastAPI's documented way
    return app


class RequestEdge:
    """Gives every request an id, in the logs and in the answer, and turns what nobody caught into a plain 500."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request or socket."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        asked = Headers(scope=scope).get("x-request-id", "")
        request_id = asked if _REQUEST_ID.fullmatch(asked) else uuid4().hex
        with structlog.contextvars.bound_contextvars(request_id=request_id):
            await self._serve(scope, receive, _Answer(send, request_id))

    async def _serve(self, scope: Scope, receive: Receive, answer: "_Answer") -> None:
        try:
            async with asyncio.timeout(_patience_s(scope)):
                await self._app(scope, receive, answer)
        except Exception as error:  # the edge: logged with its trace, which the client does not get
            if answer.started or scope["type"] != "http":
                raise
            failure = refusal(DATABASE_UNAVAILABLE, "no answer in time")
            if not isinstance(error, TimeoutError):
                log.exception("request_failed", path=scope["path"])
                failure = refusal(INTERNAL, "the failure is in the server's log")
            await problem(failure, scope["path"])(scope, receive, answer)


@dataclass(slots=True)
class _Answer:
    """Passes an answer on, with the request's id among its headers."""

    send: Send
    request_id: str
    started: bool = False

    async def __call__(self, message: Message) -> None:
        if message["type"] in ("http.response.start", "websocket.accept"):
            self.started = True
            MutableHeaders(scope=message)["x-request-id"] = self.request_id
        await self.send(message)


def _patience_s(scope: Scope) -> float | None:
    """Streams last as long as their jobs; anything else that takes so long waits for a Postgres that hangs."""
    return None if scope["type"] == "websocket" or scope["path"].endswith("/events") else _REQUEST_S


def _answer_errors(app: FastAPI) -> None:
    app.add_exception_handler(LatentmillError, _refused)
    app.add_exception_handler(HTTPException, _http_error)
    for lost in (OperationalError, InterfaceError, PoolTimeoutError):
        app.add_exception_handler(lost, _database_lost)
    app.add_exception_handler(SQLAlchemyError, _database_refused)


# Starlette types every handler's error as Exception, and calls each with the class it was added for.
async def _refused(request: Request, error: Any) -> Response:  # noqa: ANN401
    return problem(error, request.url.path)


async def _http_error(request: Request, error: Any) -> Response:  # noqa: ANN401
    fallback = INTERNAL if error.status_code >= _FIRST_SERVER_ERROR else INVALID_PARAMETER
    kind: ErrorKind = _KINDS.get(error.status_code, fallback)
    return problem(refusal(kind, f"{request.method} {request.url.path}"), request.url.path, error.headers)


async def _database_lost(request: Request, error: Any) -> Response:  # noqa: ANN401
    log.warning("database_unavailable", **loggable(error))
    return problem(refusal(DATABASE_UNAVAILABLE, "try again in a moment"), request.url.path)


async def _database_refused(request: Request, error: Any) -> Response:  # noqa: ANN401
    log.error("database_refused", path=request.url.path, **loggable(error))
    return problem(refusal(INTERNAL, "the failure is in the server's log"), request.url.path)


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's document, with the key that every route but the health checks needs."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes, description=__doc__)
        schemes = document.setdefault("components", {}).setdefault("securitySchemes", {})
        schemes["key"] = {"type": "http", "scheme": "bearer", "description": "An API key: lm_..."}
        document["security"] = [{"key": []}]
        for operation in (operation for path in document["paths"].values() for operation in path.values()):
            # FastAPI announces its own 422, which is never sent.
            operation["responses"].pop("422", None)
            operation["responses"]["4XX"] = {"description": "A problem", "content": {MEDIA_TYPE: {"schema": _PROBLEM}}}
        app.openapi_schema = document
    return app.openapi_schema
