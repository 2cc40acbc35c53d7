"""Live progress: GET /v1/jobs/{id}/events (SSE) and the WebSocket /v1/ws."""

import asyncio
from collections.abc import AsyncIterator
from http import HTTPStatus

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket

from api.problems import refusal
from api.resources import Resources, resources_of
from api.routes.callers import caller, request_key, watch_key
from api.routes.conversation import PROTOCOL, serve_socket
from api.routes.jobs import asked_job
from api.stream import Frame, Stream
from common import telemetry
from common.domain.errors import NOT_FOUND

# Under the 60 s after which proxies take a silent stream for dead.
_HEARTBEAT_S = 15.0
# Clients come back after a second; a resume costs one indexed read.
_OPENING = "retry: 1000\n\n"
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",  # nginx would gather events into 4 KiB
}

router = APIRouter(tags=["progress"])


@router.get(
    "/v1/jobs/{job_id}/events",
    summary="Follow a job (server-sent events)",
    responses={
        200: {"content": {"text/event-stream": {}}, "description": "snapshot, then job.state and job.progress"},
        204: {"description": "Last-Event-ID is the job's last version: do not come back"},
    },
)
async def follow_job(request: Request, job_id: str) -> Response:
    """The stream ends when the job does. Leaving it does not cancel the job."""
    principal = await caller(request, "jobs:read")
    resources, followed = resources_of(request), asked_job(job_id)
    view = await resources.reads.job(principal.tenant_id, followed)
    if view is None:
        raise refusal(NOT_FOUND, "there is no such job")
    known = _last_event_id(request)
    if view.terminal and view.version == known:
        return Response(status_code=HTTPStatus.NO_CONTENT)
    stream = resources.hub.open(principal.tenant_id)
    try:
        await resources.hub.follow(stream, [followed], known)
    except BaseException:
        resources.hub.leave(stream)
        raise
    return _EventStream(resources, stream, request_key(request))


@router.websocket("/v1/ws")
async def socket(websocket: WebSocket) -> None:
    """Subscribe, cancel, ping; see docs/reference for the messages."""
    offered = websocket.scope.get("subprotocols", [])
    await websocket.accept(subprotocol=PROTOCOL if PROTOCOL in offered else None)
    with telemetry.sockets.labels("websocket").track_inprogress():
        await serve_socket(websocket, resources_of(websocket), offered)


def _last_event_id(request: Request) -> int | None:
    text = request.headers.get("last-event-id", "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None


class _EventStream(StreamingResponse):
    """The answer that follows a job. Its stream is left also when the reader goes before the first event."""

    def __init__(self, resources: Resources, stream: Stream, key: str | None) -> None:
        super().__init__(_events(stream), headers=_HEADERS, media_type="text/event-stream")
        self._resources = resources
        self._stream = stream
        self._key = key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the job ends, the reader leaves or the key is revoked."""
        watching = asyncio.create_task(watch_key(self._resources.keys, self._key, self._stream))
        try:
            with telemetry.sockets.labels("sse").track_inprogress():
                await super().__call__(scope, receive, send)
        finally:
            watching.cancel()
            self._resources.hub.leave(self._stream)


async def _events(stream: Stream) -> AsyncIterator[str]:
    yield _OPENING
    while True:
        try:
            async with asyncio.timeout(_HEARTBEAT_S):
                frame = await stream.next()
        except TimeoutError:
            yield ": heartbeat\n\n"
            continue
        if frame is None:
            return
        yield _as_event(frame)
        if frame.last:
            return


def _as_event(frame: Frame) -> str:
    number = f"id: {frame.seq}\n" if frame.seq is not None else ""
    return f"event: {frame.kind}\n{number}data: {frame.text}\n\n"
