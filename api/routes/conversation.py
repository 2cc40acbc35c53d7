"""One WebSocket: who is at the other end, what it asks, what it is told."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import assert_never

import structlog
from sqlalchemy.exc import SQLAlchemyError
from starlette.websockets import WebSocket, WebSocketDisconnect

from api.auth import Principal, bearer_key
from api.cancel import cancel_job
from api.problems import refusal
from api.render import to_json
from api.resources import Resources
from api.routes.callers import FORBIDDEN, UNAUTHENTICATED, expel, watch_key
from api.schemas import Cancel, Ping, SocketMessage, Subscribe, Unsubscribe, read_socket_message
from api.stream import DISCONNECTED, GOING_AWAY, TRY_LATER, Bucket, Stream
from common.domain.errors import (
    DATABASE_UNAVAILABLE,
    INSUFFICIENT_SCOPE,
    INVALID_PARAMETER,
    NOT_FOUND,
    LatentmillError,
)
from common.domain.ids import parse_job_id

PROTOCOL = "latentmill.v1"
HEARTBEAT_S = 20  # the server's ping interval; a proxy gives a silent connection 60 s
# A browser cannot set a header, so it offers its key as a second subprotocol. It is never selected, hence never echoed.
_BEARER_PROTOCOL = "latentmill.bearer."
BAD_MESSAGE, TOO_MANY_MESSAGES = 4400, 4429
# Jobs one socket follows by id; with `all` there is no such bound.
_MAX_FOLLOWED = 1000
# A program that follows every job by a message of its own sends dozens at once; a person, one now and then.
MESSAGES_PER_S, MESSAGE_BURST = 10.0, 50.0

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Caller:
    """One socket's other end."""

    resources: Resources
    key: str | None
    stream: Stream
    allowance: Bucket = field(default_factory=lambda: Bucket(MESSAGES_PER_S, MESSAGE_BURST))


async def serve_socket(websocket: WebSocket, resources: Resources, offered: Sequence[str]) -> None:
    """Serve an accepted socket until either end leaves. Whatever happens here, no job is cancelled by it."""
    try:
        key = _key(websocket, offered)
        principal = await _authenticate(websocket, resources, offered, key)
        if principal is None:
            return
        stream = await _open(websocket, resources, principal)
        if stream is None:
            return
        try:
            await _converse(websocket, _Caller(resources, key, stream))
        finally:
            resources.hub.leave(stream)
    except WebSocketDisconnect:
        pass


async def _authenticate(
    websocket: WebSocket, resources: Resources, offered: Sequence[str], key: str | None
) -> Principal | None:
    # Accepted first and closed then: the only refusal whose reason a browser's script gets to see.
    if offered and PROTOCOL not in offered:
        error = refusal(INVALID_PARAMETER, f"offer the subprotocol {PROTOCOL}")
        await _refuse(websocket, error, BAD_MESSAGE)
        return None
    try:
        principal = await resources.keys.authenticate(key)
        principal.require("jobs:read")
    except LatentmillError as error:
        code = FORBIDDEN if error.kind is INSUFFICIENT_SCOPE else UNAUTHENTICATED
        await _refuse(websocket, error, code)
    except SQLAlchemyError:
        await _refuse(websocket, refusal(DATABASE_UNAVAILABLE, "try again in a moment"), TRY_LATER)
    else:
        return principal
    return None


def _key(websocket: WebSocket, offered: Sequence[str]) -> str | None:
    for protocol in offered:
        if protocol.startswith(_BEARER_PROTOCOL):
            return protocol.removeprefix(_BEARER_PROTOCOL)
    return bearer_key(websocket.headers.get("authorization"))


async def _open(websocket: WebSocket, resources: Resources, principal: Principal) -> Stream | None:
    try:
        return resources.hub.open(principal.tenant_id)
    except LatentmillError as error:
        await _refuse(websocket, error, GOING_AWAY if resources.hub.closed else TRY_LATER)
        return None


async def _refuse(websocket: WebSocket, error: LatentmillError, close_code: int) -> None:
    await websocket.send_text(to_json(_error_fields(error) | {"type": "error"}))
    await websocket.close(close_code, error.kind.code)


async def _converse(websocket: WebSocket, caller: _Caller) -> None:
    stream = caller.stream
    stream.tell("ready", protocol=PROTOCOL, heartbeat_s=HEARTBEAT_S)
    beside = [
        asyncio.create_task(_receive(websocket, caller)),
        asyncio.create_task(watch_key(caller.resources.keys, caller.key, stream)),
    ]
    try:
        while (frame := await stream.next()) is not None:
            await websocket.send_text(frame.text)
        if stream.close_code != DISCONNECTED:
            await websocket.close(stream.close_code or GOING_AWAY)
    except WebSocketDisconnect:
        pass
    finally:
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)


async def _receive(websocket: WebSocket, caller: _Caller) -> None:
    """Answer messages until the client leaves or breaks the protocol; then let the sender end."""
    stream = caller.stream
    try:
        while stream.close_code is None:
            message = await websocket.receive()
            if message["type"] == "websocket.disconnect":
                stream.disconnect()
            elif caller.allowance.take(time.monotonic()):
                await _answer(message.get("text"), caller)
            else:
                stream.tell("error", code="rate_limited", message=f"at most {MESSAGES_PER_S:g} messages a second")
                stream.close(TOO_MANY_MESSAGES)
    except Exception:  # the edge of this task: its socket must not stay open unheard
        log.exception("socket_failed")
        stream.close(1011)


async def _answer(text: str | None, caller: _Caller) -> None:
    stream = caller.stream
    try:
        message = read_socket_message(text or "")  # a binary frame has no text
    except LatentmillError as error:
        stream.tell("error", **_error_fields(error))
        stream.close(BAD_MESSAGE)
        return
    try:
        principal = await _still_allowed(caller)
        if principal is not None:
            await _act(message, caller.resources, principal, stream)
    except LatentmillError as error:
        job = {"job_id": message.job_id} if isinstance(message, Cancel) else {}
        stream.tell("error", **_error_fields(error), **job)
    except SQLAlchemyError:
        stream.tell("error", **_error_fields(refusal(DATABASE_UNAVAILABLE, "try again in a moment")))


async def _still_allowed(caller: _Caller) -> Principal | None:
    """Who is asking, or None after the end of his stream: the key may have been revoked since it was opened."""
    try:
        return await caller.resources.keys.authenticate(caller.key)
    except LatentmillError as error:
        expel(caller.stream, error)
        return None


async def _act(message: SocketMessage, resources: Resources, principal: Principal, stream: Stream) -> None:
    match message:
        case Subscribe():
            await _subscribe(message, resources, stream)
        case Unsubscribe():
            resources.hub.unfollow(stream, [job_id for text in message.job_ids if (job_id := parse_job_id(text))])
        case Cancel():
            await _cancel(message, resources, principal, stream)
        case Ping():
            stream.tell("pong")
        case _:
            assert_never(message)


async def _subscribe(message: Subscribe, resources: Resources, stream: Stream) -> None:
    if message.all:
        await resources.hub.follow_all(stream)
        return
    if len(stream.live) + len(message.job_ids) > _MAX_FOLLOWED:
        raise refusal(INVALID_PARAMETER, f"one socket follows at most {_MAX_FOLLOWED} jobs by id")
    parsed = {text: parse_job_id(text) for text in message.job_ids}
    unknown = await resources.hub.follow(stream, [job_id for job_id in parsed.values() if job_id])
    for text in [text for text, job_id in parsed.items() if job_id is None or job_id in unknown]:
        stream.tell("error", code=NOT_FOUND.code, message="there is no such job", job_id=text)


async def _cancel(message: Cancel, resources: Resources, principal: Principal, stream: Stream) -> None:
    principal.require("jobs:write")
    job_id = parse_job_id(message.job_id)
    if job_id is None:
        raise refusal(NOT_FOUND, "there is no such job")
    r = resources
    cancelled = await cancel_job(r.engine, r.reads, r.announcer, principal.tenant_id, job_id)
    if job_id not in stream.live:
        stream.tell_snapshot([cancelled.view])  # not followed, or ended before: this is the answer
    r.hub.on_view(cancelled.view)  # followers do not have to wait for Redis


def _error_fields(error: LatentmillError) -> dict[str, str]:
    return {"code": error.kind.code, "message": error.detail}
