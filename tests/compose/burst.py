"""Many submits at once, and a WebSocket for each job: a client that leaves the machine's cores to the stack."""

import asyncio
import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import uvloop
from websockets.asyncio.client import ClientConnection, connect
from websockets.typing import Subprotocol

ADDRESS = "127.0.0.1"
PROTOCOL = Subprotocol("latentmill.v1")
# All requests go out within this: under the second that is promised, so that a busy machine may be late.
SPREAD_S = 0.8
# As many handshakes at a time: more would only wait for each other.
HANDSHAKES = 64
HANDSHAKE_TIMEOUT_S = 30.0
ENDED = frozenset({"succeeded", "failed", "cancelled", "expired"})


@dataclass(frozen=True, slots=True)
class Answer:
    """One submit: when its request was written and its answer was complete, in seconds of the loop's clock."""

    key: str
    sent_at: float
    answered_at: float
    status: int
    body: bytes

    @property
    def seconds(self) -> float:
        return self.answered_at - self.sent_at

    @property
    def job_id(self) -> str:
        return str(json.loads(self.body)["id"])


class _Submit(asyncio.Protocol):
    """One request on a connection of its own, written as soon as it stands."""

    def __init__(self, key: str, request: bytes) -> None:
        self._key = key
        self._request = request
        self._received = bytearray()
        self._sent_at = 0.0
        self._answered_at = math.inf
        self.ended = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._sent_at = time.monotonic()
        # uvloop's transports are writable without saying so.
        cast("asyncio.WriteTransport", transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        self._answered_at = time.monotonic()
        self._received += data

    def connection_lost(self, _error: Exception | None) -> None:
        """The answer is whole, as asked by `Connection: close`."""
        self.ended.set()

    def answer(self) -> Answer:
        """What came, of status 0 when nothing did."""
        head, _, body = bytes(self._received).partition(b"\r\n\r\n")
        words = head.split(maxsplit=2)
        status = int(words[1]) if len(words) > 1 else 0
        return Answer(self._key, self._sent_at, self._answered_at, status, body)


def _request(port: int, key: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/jobs HTTP/1.1\r\nHost: {ADDRESS}:{port}\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + content


async def submit_all(port: int, keys: Sequence[str], bodies: Sequence[dict[str, Any]], within_s: float) -> list[Answer]:
    """Send all within SPREAD_S, the keys taking turns. An answer that does not come in time has the status 0."""
    loop = asyncio.get_running_loop()
    owners = [keys[number % len(keys)] for number in range(len(bodies))]
    requests = [(key, _request(port, key, body)) for key, body in zip(owners, bodies, strict=True)]

    async def submit(number: int, key: str, request: bytes) -> Answer:
        await asyncio.sleep(SPREAD_S * number / len(requests))
        _, protocol = await loop.create_connection(lambda: _Submit(key, request), ADDRESS, port)
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await protocol.ended.wait()
        return protocol.answer()

    return await asyncio.gather(*(submit(number, *request) for number, request in enumerate(requests)))


@dataclass(frozen=True, slots=True)
class Followed:
    """How a job ended, as its WebSocket told; `error` when it told no end."""

    job_id: str
    status: str
    ended_at: float
    error: str = ""


async def follow_all(port: int, answers: Sequence[Answer], within_s: float) -> list[Followed]:
    """Follow each job over a WebSocket of its own until it ends. A socket that breaks is not opened again."""
    gate = asyncio.Semaphore(HANDSHAKES)

    async def follow(answer: Answer) -> Followed:
        try:
            async with asyncio.timeout(within_s):
                return await _follow(f"ws://{ADDRESS}:{port}/v1/ws", answer, gate)
        except Exception as error:  # noqa: BLE001  whatever it was is counted and shown
            return Followed(answer.job_id, "", time.monotonic(), repr(error))

    return await asyncio.gather(*map(follow, answers))


async def _follow(address: str, answer: Answer, gate: asyncio.Semaphore) -> Followed:
    headers = {"Authorization": f"Bearer {answer.key}"}
    async with gate:
        socket = await connect(
            address,
            subprotocols=[PROTOCOL],
            additional_headers=headers,
            open_timeout=HANDSHAKE_TIMEOUT_S,
            ping_interval=None,
            compression=None,
            close_timeout=1,
        )
    try:
        return await _read_to_the_end(socket, answer.job_id)
    finally:
        await socket.close()


async def _read_to_the_end(socket: ClientConnection, job_id: str) -> Followed:
    await socket.send(json.dumps({"type": "subscribe", "job_ids": [job_id]}))
    async for message in socket:
        for job in _jobs_of(json.loads(message)):
            if job["status"] in ENDED:
                return Followed(job_id, str(job["status"]), time.monotonic())
    message = "the socket was closed before the job's end"
    raise ConnectionError(message)


def _jobs_of(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if message["type"] == "snapshot":
        yield from message["jobs"]
    elif message["type"] == "job.state":
        yield message["job"]
    elif message["type"] == "error":
        raise ConnectionError(str(message))


@dataclass(frozen=True, slots=True)
class Burst:
    """What a burst of submits came to."""

    answers: Sequence[Answer]
    followed: Sequence[Followed]

    @property
    def send_window_s(self) -> float:
        sent = [answer.sent_at for answer in self.answers]
        return max(sent) - min(sent)

    @property
    def done_after_s(self) -> float:
        return max(job.ended_at for job in self.followed) - min(answer.sent_at for answer in self.answers)


def run(port: int, keys: Sequence[str], bodies: Sequence[dict[str, Any]], answer_s: float, done_s: float) -> Burst:
    """Submit everything, then follow what was accepted."""

    async def both() -> Burst:
        answers = await submit_all(port, keys, bodies, answer_s)
        accepted = [answer for answer in answers if answer.status == 202]
        return Burst(answers, await follow_all(port, accepted, done_s))

    return uvloop.run(both())
