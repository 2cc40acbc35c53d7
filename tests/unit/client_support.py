"""A small server on the loopback that behaves as the wire contract says, and does what a test scripted."""

import asyncio
import hashlib
import socket
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from latentmill import RetryPolicy

QUICK = RetryPolicy(attempts=3, base_s=0.01, cap_s=0.02)
KEY = "lm_test"
VIDEO = bytes(range(256)) * 1000
RESTART = 1012


def job(number: int = 1, status: str = "queued", **fields: Any) -> dict[str, Any]:
    """A job document with the keys that the tests look at."""
    progress = {"step": 0, "steps": 3, "percent": 0, "eta_s": None}
    identity = {"id": f"job_{number:032x}", "object": "job", "status": status, "seq": 1, "attempt": 0, "phase": None}
    return {**identity, "model": "tiny", "progress": progress, "queue": None, "result": None, "error": None, **fields}


def state(document: dict[str, Any]) -> dict[str, Any]:
    """The job.state message of a job document."""
    told = {key: document[key] for key in ("seq", "status")}
    return {"type": "job.state", "job_id": document["id"], **told, "job": document}


def step(document: dict[str, Any], done: int, attempt: int = 1) -> dict[str, Any]:
    """The job.progress message of one denoising step of three."""
    where = {"phase": "denoise", "step": done, "steps": 3, "percent": done * 33, "eta_s": 3.0 - done}
    return {"type": "job.progress", "job_id": document["id"], "attempt": attempt, **where}


@dataclass
class Farm:
    """What the server has and does. `scripts` holds, for each socket in turn, messages and at last a close code."""

    url: str = ""
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    scripts: deque[list[Any]] = field(default_factory=deque)
    refusals: deque[Response] = field(default_factory=deque)  # answered, first come, before anything else
    requests: list[Request] = field(default_factory=list)
    bodies: list[Any] = field(default_factory=list)
    subscriptions: list[Any] = field(default_factory=list)
    has_sockets: bool = True
    video: bytes = VIDEO
    media_cuts: deque[int] = field(default_factory=deque)  # each response ends after so many bytes
    media_refusals: deque[int] = field(default_factory=deque)

    def add(self, document: dict[str, Any]) -> str:
        self.jobs[document["id"]] = document
        return str(document["id"])

    def result(self, **fields: Any) -> dict[str, Any]:
        digest = hashlib.sha256(VIDEO).hexdigest()
        return {"url": f"{self.url}/v/a.mp4?e=1&s=x", "sha256": digest, "bytes": len(VIDEO), **fields}

    def paths(self) -> list[str]:
        return [f"{request.method} {request.url.path}" for request in self.requests]

    async def answer(self, request: Request) -> Response:
        self.requests.append(request)
        if self.refusals:
            return self.refusals.popleft()
        if request.headers.get("authorization") != f"Bearer {KEY}":
            return problem(401, "invalid_api_key", "no such key")
        if request.url.path == "/v1/jobs":
            return await self._submit(request) if request.method == "POST" else self._list(request)
        return self._job(request)

    def _job(self, request: Request) -> Response:
        known = self.jobs.get(request.path_params["id"])
        if known is None:
            return problem(404, "not_found", "there is no such job")
        if request.method == "POST":
            if known["status"] == "succeeded":
                return problem(409, "job_terminal", "the job is finished")
            known["cancel_requested"] = True
            return JSONResponse(known, 202)
        return JSONResponse(known)

    async def _submit(self, request: Request) -> Response:
        self.bodies.append(await request.json())
        return JSONResponse(self.jobs[self.add(job())], 202)

    def _list(self, request: Request) -> Response:
        start, limit = int(request.query_params.get("cursor", 0)), int(request.query_params["limit"])
        rest = list(self.jobs.values())[start:]
        cursor = str(start + limit) if len(rest) > limit else None
        return JSONResponse({"object": "list", "data": rest[:limit], "next_cursor": cursor})

    async def media(self, request: Request) -> Response:
        self.requests.append(request)
        if self.media_refusals:
            return Response("refused", self.media_refusals.popleft())
        asked = request.headers.get("range", "bytes=0-")
        start = int(asked.removeprefix("bytes=").removesuffix("-"))
        body = self.video[start:]
        headers = {"content-length": str(len(body))}
        if "range" in request.headers:
            headers["content-range"] = f"bytes {start}-{len(self.video) - 1}/{len(self.video)}"
        sent = body[: self.media_cuts.popleft()] if self.media_cuts else body
        return StreamingResponse(iter([sent]), 206 if "range" in request.headers else 200, headers)

    async def socket(self, websocket: WebSocket) -> None:
        if not self.has_sockets:
            await websocket.send_denial_response(Response("no sockets here", 404))
            return
        await websocket.accept("latentmill.v1")
        if websocket.headers.get("authorization") != f"Bearer {KEY}":
            await websocket.close(4401, "invalid_api_key")
            return
        await websocket.send_json({"type": "ready", "protocol": "latentmill.v1", "heartbeat_s": 20})
        self.subscriptions.append(await websocket.receive_json())
        for act in self.scripts.popleft():
            if isinstance(act, int):
                await websocket.close(act)
                return
            await websocket.send_json(act)
        await websocket.receive()


def problem(status: int, code: str, detail: str, errors: list[Any] | None = None, **headers: str) -> Response:
    """An error as the API answers it."""
    body: dict[str, Any] = {"type": f"urn:latentmill:error:{code}", "title": code, "status": status, "detail": detail}
    if errors:
        body["errors"] = errors
    shown = {name.replace("_", "-"): value for name, value in headers.items()}
    return JSONResponse({**body, "error": {"code": code}}, status, {"x-request-id": "req-7", **shown})


@dataclass
class Site:
    """The one server of a module, and the farm that it shows to the running test."""

    url: str
    farm: Farm = field(default_factory=Farm)

    def fresh(self) -> Farm:
        self.farm = Farm(self.url)
        return self.farm

    async def answer(self, request: Request) -> Response:
        return await self.farm.answer(request)

    async def media(self, request: Request) -> Response:
        return await self.farm.media(request)

    async def socket(self, websocket: WebSocket) -> None:
        await self.farm.socket(websocket)


@contextmanager
def served() -> Iterator[Site]:
    """A server that listens until the block ends."""
    with socket.create_server(("127.0.0.1", 0)) as listener:  # queues connections from here on: nothing to wait for
        site = Site(f"http://127.0.0.1:{listener.getsockname()[1]}")
        routes = [
            Route("/v1/jobs", site.answer, methods=["GET", "POST"]),
            Route("/v1/jobs/{id}", site.answer),
            Route("/v1/jobs/{id}/cancel", site.answer, methods=["POST"]),
            Route("/v/a.mp4", site.media),
            WebSocketRoute("/v1/ws", site.socket),
        ]
        server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), log_level="critical", lifespan="off"))
        thread = threading.Thread(target=asyncio.run, args=(server.serve([listener]),), daemon=True)
        thread.start()
        try:
            yield site
        finally:
            server.force_exit = server.should_exit = True
            thread.join(5)


def unused_url() -> str:
    """An address where nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"
