"""Following jobs: a WebSocket that is opened again when it breaks, and GET whenever it cannot be had."""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Subprotocol

from latentmill.errors import ApiError, BadAnswerError, ConnectionFailedError, WaitTimeoutError
from latentmill.models import Document, Job, Progress
from latentmill.transport import RetryPolicy

PROTOCOL = Subprotocol("latentmill.v1")
_UNAUTHENTICATED, _FORBIDDEN = 4401, 4403
_CLOSED_AS = {_UNAUTHENTICATED: 401, _FORBIDDEN: 403}
# Longer than a restart of the whole server side takes; a job is not given up for that.
_PATIENCE_S = 60.0
# A server that says nothing for so long is asked again: its events travel by Redis, which may lose some.
_SILENCE_S = 30.0
_OPEN_TIMEOUT_S = 10.0
# Nothing is read after the last event, so the server's half of the closing handshake is not worth waiting for.
_CLOSE_TIMEOUT_S = 0.5
_LARGEST_FRAME_BYTES = 16 * 2**20  # a snapshot of 1000 jobs is about 2 MB


@dataclass(frozen=True, slots=True)
class Event:
    """What changed. `type` is snapshot, job.state or job.progress, `raw` the message, `jobs` the jobs after it."""

    type: str
    jobs: tuple[Job, ...]
    raw: Document


@dataclass(frozen=True, slots=True)
class Source:
    """Where jobs are followed: the socket's address and headers, and how one job is read without it."""

    address: str
    headers: Document
    get: Callable[[str], Job]
    retry: RetryPolicy


class _SocketLostError(Exception):
    """The socket is gone or was never there. Another one may do."""


class Board:
    """The latest known view of each followed job. Events that are older than it are dropped."""

    def __init__(self, job_ids: Iterable[str]) -> None:
        self._jobs: dict[str, Job | None] = dict.fromkeys(job_ids)

    def pending(self) -> list[str]:
        """Ids of the jobs not known to be finished."""
        return [job_id for job_id, job in self._jobs.items() if job is None or not job.is_terminal]

    def read(self, raw: Document) -> Event | None:
        """Take in a message of the server; None when it tells nothing new, or is of a later protocol."""
        match raw.get("type"):
            case "snapshot":
                jobs = [Job.from_json(job) for job in raw.get("jobs", ())]
            case "job.state":
                jobs = [Job.from_json(raw.get("job"))]
            case "job.progress":
                jobs = self._advance(raw)
            case _:
                return None
        fresh = tuple(job for job in jobs if self._is_fresh(job))
        self._jobs.update({job.id: job for job in fresh})
        return Event(str(raw["type"]), fresh, raw) if fresh else None

    def differs(self, job: Job) -> bool:
        """Whether this view of the job says something new."""
        return self._is_fresh(job) and job != self._jobs[job.id]

    def _is_fresh(self, job: Job) -> bool:
        known = self._jobs.get(job.id)
        return job.id in self._jobs and (known is None or job.seq >= known.seq)

    def _advance(self, raw: Document) -> list[Job]:
        job = self._jobs.get(str(raw.get("job_id")))
        attempt = int(raw.get("attempt") or 0)
        # Progress and states travel apart: a step of an attempt that is over must not revive the job's view.
        if job is None or job.is_terminal or attempt < job.attempt + (job.status == "queued"):
            return []
        progress, phase = Progress.from_json(raw), raw.get("phase")
        return [replace(job, status="running", queue=None, attempt=attempt, phase=phase, progress=progress)]


def follow(source: Source, job_ids: Iterable[str], timeout_s: float | None = None) -> Iterator[Event]:
    """Yield what happens to the jobs, a snapshot first, until all are finished.

    Raises ApiError when the server refuses (an unknown id: 404), ConnectionFailedError when it cannot be reached at
    first or for a minute later on, WaitTimeoutError after `timeout_s` seconds.
    """
    board = Board(job_ids)
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    reached, failures = False, 0
    down_since: float | None = None
    while board.pending():
        try:
            for event in _stream(source, board, deadline):
                reached, down_since, failures = True, None, 0
                yield event
        except _SocketLostError:
            failures += 1
        try:
            yield from _look(source, board)
            reached, down_since = True, None
        except (ConnectionFailedError, ApiError) as error:
            down_since = down_since or time.monotonic()
            if not reached or _is_final(error, down_since):
                raise
        if board.pending():
            time.sleep(min(source.retry.pause_s(max(1, failures)), _left_s(deadline)))


def _is_final(error: ConnectionFailedError | ApiError, down_since: float) -> bool:
    if isinstance(error, ApiError) and not error.is_server_fault:
        return True
    return time.monotonic() - down_since > _PATIENCE_S


def _left_s(deadline: float | None) -> float:
    left = _SILENCE_S if deadline is None else deadline - time.monotonic()
    if left <= 0:
        message = "the job did not finish in the time given; it goes on"
        raise WaitTimeoutError(message)
    return left


def _look(source: Source, board: Board) -> Iterator[Event]:
    """Ask for each pending job once, and tell what is new in the words of the socket."""
    for job_id in board.pending():
        job = source.get(job_id)
        if not board.differs(job):
            continue
        told = {"type": "job.state", "job_id": job.id, "seq": job.seq, "status": job.status, "job": job.raw}
        if event := board.read(told):
            yield event


def _stream(source: Source, board: Board, deadline: float | None) -> Iterator[Event]:
    with _open(source, deadline) as socket:
        _subscribe(socket, board)
        while board.pending():
            try:
                message = socket.recv(timeout=min(_SILENCE_S, _left_s(deadline)))
            except TimeoutError:
                _subscribe(socket, board)
                continue
            except ConnectionClosed as closed:
                raise _why_closed(closed) from closed
            if event := _read(message, board):
                yield event


def _open(source: Source, deadline: float | None) -> ClientConnection:
    try:
        return connect(
            source.address,
            subprotocols=[PROTOCOL],
            additional_headers=source.headers,
            open_timeout=min(_OPEN_TIMEOUT_S, _left_s(deadline)),
            close_timeout=_CLOSE_TIMEOUT_S,
            max_size=_LARGEST_FRAME_BYTES,
        )
    except (OSError, InvalidHandshake) as error:  # refused, timed out, or answered by something that knows no socket
        raise _SocketLostError(str(error)) from error


def _subscribe(socket: ClientConnection, board: Board) -> None:
    try:
        socket.send(json.dumps({"type": "subscribe", "job_ids": board.pending()}))
    except ConnectionClosed as closed:
        raise _why_closed(closed) from closed


def _why_closed(closed: ConnectionClosed) -> Exception:
    code = closed.rcvd.code if closed.rcvd else None
    if code in _CLOSED_AS:
        reason = closed.rcvd.reason if closed.rcvd else ""
        return ApiError(_CLOSED_AS[code], reason or "unauthenticated", "the server does not accept this API key")
    return _SocketLostError(str(closed))


def _read(message: str | bytes, board: Board) -> Event | None:
    raw = _parse(message)
    if raw.get("type") != "error":
        return board.read(raw)
    text = str(raw.get("message") or "the server reported an error")
    if job_id := raw.get("job_id"):
        raise ApiError(404, str(raw.get("code") or "not_found"), f"{text}: {job_id}")
    # The server is in trouble or does not want this client: GET gets the same answer with its status.
    raise _SocketLostError(text)


def _parse(message: str | bytes) -> dict[str, Any]:
    try:
        raw = json.loads(message)
    except ValueError:
        raw = None
    if not isinstance(raw, dict):
        text = "the WebSocket sent something that is not a JSON object"
        raise BadAnswerError(text)
    return raw
