"""Apis that die or restart, and clients that leave, do not read, or are too many (F48 to F51, F54, F56, F62)."""

import json
import resource
import socket
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
from websockets.sync.client import ClientConnection, connect

from common.domain.jobs import JobState
from tests.faults.broker_faults import Storm, reruns
from tests.faults.clients import SMALL
from tests.faults.clocks import shifted_clock
from tests.faults.farm import APIS, Farm, until
from tests.faults.fault import fault, require
from tests.faults.worker_faults import part_of


@fault("F48", "api SIGKILLed between COMMIT and publish", "I1 I2 I3 I4 I5")
def api_killed_before_the_publish(farm: Farm) -> None:
    _kill_api_at(farm, "api.after_commit")


@fault("F48b", "api SIGKILLed between publish and answer", "I1 I2 I3 I4 I5")
def api_killed_before_the_answer(farm: Farm) -> None:
    _kill_api_at(farm, "api.before_answer")


def _kill_api_at(farm: Farm, point: str) -> None:
    """The client gets no 202 and asks again with its key: one job, which runs."""
    marker, key = f"marked {uuid.uuid4()}", f"key-{uuid.uuid4()}"
    with farm.points.armed(point) as standing, ThreadPoolExecutor(1) as pool:
        # Past nginx, which would ask the other api by itself.
        first = pool.submit(farm.caller(farm.client.key, "api-1").post, marker, key)
        part = part_of(farm, standing())
        farm.kill(part)
        require(isinstance(first.exception(timeout=30), httpx.TransportError), "the submit was answered")
    farm.start_part(part)
    again = farm.client.post(marker, idempotency_key=key)
    rows = farm.sql("SELECT id FROM jobs WHERE params ->> 'prompt' = %s", marker)
    require(len(rows) == 1, f"{len(rows)} rows for one submit ({again.status_code})")
    farm.await_done([again.json()["id"]], within_s=40)


@fault("F49", "both apis restarted one after the other under 200 WebSockets", within_s=90)
def apis_restarted(farm: Farm) -> str:
    count = 500 if farm.thorough else 100
    job = farm.client.submit("slow [slow=1.2]")
    followers = [_Follower(farm, job) for _ in range(count)]
    for api in APIS:
        farm.stack.stop_part(api)
        farm.start_part(api)
    farm.await_done([job])
    ends = [follower.join(30) for follower in followers]
    require(all(end == "succeeded" for end in ends), f"{ends.count(None)} of {count} followers missed the end")
    codes = {code for follower in followers for code in follower.closed}
    require(codes <= {1012}, f"sockets were closed with {codes}")
    returns = sum(len(follower.closed) for follower in followers)
    return f"{count} sockets, closed with {codes}, {returns} times connected again, no end missed"


class _Follower:
    """Follows one job on a WebSocket, connecting again whenever it is closed, until the job has ended."""

    def __init__(self, farm: Farm, job: str) -> None:
        self._farm, self._job = farm, job
        self.closed: list[int] = []
        self._end: str | None = None
        self._connected = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._connected.wait(10)

    def join(self, seconds: float) -> str | None:
        self._thread.join(seconds)
        return self._end

    def _run(self) -> None:
        while self._end is None:
            try:
                with open_socket(self._farm) as connection:
                    connection.send(json.dumps({"type": "subscribe", "job_ids": [self._job]}))
                    self._connected.set()
                    self._read(connection)
                    if self._end is None and connection.close_code is not None:
                        self.closed.append(connection.close_code)
            except Exception:  # noqa: BLE001 - whatever a restart does to a handshake
                time.sleep(0.3)

    def _read(self, connection: ClientConnection) -> None:
        for frame in connection:
            event = json.loads(frame)
            for job in event.get("jobs", [event["job"]] if "job" in event else []):
                if job["status"] in {"succeeded", "failed", "cancelled", "expired"}:
                    self._end = job["status"]
                    return


@fault("F50", "clients that leave in the middle of a submit, and after sending it")
def clients_leave(farm: Farm) -> str:
    marker = f"left {uuid.uuid4()}"
    body = json.dumps({**SMALL, "prompt": marker}).encode()
    for sent in (len(body) // 2, len(body)):
        for _ in range(10):
            _send_part(farm, body, sent)
    rows = until(
        lambda: farm.sql("SELECT id, state FROM jobs WHERE params ->> 'prompt' = %s", marker),
        lambda found: all(row.state == JobState.SUCCEEDED for row in found),
        40,
        "the end of the jobs whose clients left",
    )
    time.sleep(1)
    require(len(rows) <= 10, f"{len(rows)} rows for ten whole bodies")
    job = farm.client.submit("after")
    farm.await_done([job])
    return f"10 half bodies made no job, 10 whole ones {len(rows)}, all run"


@fault("F51", "sockets that never read", "I1 I2 I3 I10")
def sockets_never_read(farm: Farm) -> str:
    count = 1000 if farm.thorough else 200
    before = [_memory(farm, api) for api in APIS]
    sockets = [_deaf_socket(farm) for _ in range(count)]
    try:
        jobs = farm.client.submit_many(f"quick {n} [slow=0.02]" for n in range(100))
        farm.await_done(jobs)
        grown = [_memory(farm, api) - was for api, was in zip(APIS, before, strict=True)]
    finally:
        for deaf in sockets:
            deaf.close()
    most = max(grown) / 1e6
    require(most < 600, f"an api grew by {most:.0f} MB")
    return f"{count} sockets, an api grew by at most {most:.0f} MB"


@fault("F54", "clocks an hour ahead at a worker, an hour back at an api and both dispatchers", within_s=90)
def clocks_are_wrong(farm: Farm) -> str:
    with shifted_clock(3600) as ahead, shifted_clock(-3600) as back:
        for part, environment in (
            ("worker-1", ahead), ("api-1", back), ("dispatcher", back), ("dispatcher-2", back),
        ):  # fmt: skip
            farm.stack.stop_part(part)
            farm.start_part(part, **environment)
        with farm.only("worker-1"):
            jobs = farm.client.submit_many(f"n {n} [slow=0.1]" for n in range(6))
            jobs.append(farm.caller(farm.client.key, "api-1").submit("by the slow api"))
            farm.await_done(jobs)
        seen = [farm.client.get(job) for job in jobs]
        for part in ("worker-1", "api-1", "dispatcher", "dispatcher-2"):
            farm.stack.stop_part(part)
    negative = [job["timings_ms"] for job in seen if min(job["timings_ms"].values()) < 0]
    require(not negative, f"negative durations: {negative}")
    require(reruns(farm, jobs) == 0, "a job ran twice")
    return f"{len(jobs)} jobs, no re-run, no negative duration"


@fault("F56", "random cancels against completions", within_s=120)
def cancel_storm(farm: Farm) -> str:
    count = 1000 if farm.thorough else 150
    jobs = []
    with ThreadPoolExecutor(8) as pool:
        jobs = list(pool.map(lambda n: farm.client.submit(f"quick {n} [slow=0.01]"), range(count)))
        aimed = [job for job in jobs if farm.dice.random() < 0.6]
        farm.dice.shuffle(aimed)
        answers = list(pool.map(lambda job: farm.client.cancel(job).status_code, aimed))
    require(set(answers) <= {200, 202, 409}, f"cancels were answered {set(answers)}")
    farm.await_states(jobs, "succeeded", "cancelled", within_s=120)
    states = farm.states(jobs)
    return f"{count} jobs, {len(aimed)} cancels, {answers.count(409)} too late, {states.get('cancelled', 0)} cancelled"


@fault("F62", "an api and a worker out of file descriptors (prlimit)", within_s=90)
def no_descriptors(farm: Farm) -> str:
    open_now = {part: len(list(Path(f"/proc/{farm.pid(part)}/fd").iterdir())) for part in ("api-1", "worker-1")}
    for part, count in open_now.items():
        farm.limit(part, resource.RLIMIT_NOFILE, max(8, count - 2))
    with Storm(farm, 0.1) as storm:
        time.sleep(8)
    for part in open_now:
        if farm.stack.pid(part) is not None:
            farm.limit(part, resource.RLIMIT_NOFILE, -1)
    answered = storm.statuses.count(202)
    require(answered > len(storm.statuses) * 0.9, f"only {answered} of {len(storm.statuses)} submits were taken")
    farm.await_done(storm.taken, within_s=90)
    return f"{answered} of {len(storm.statuses)} submits taken, slowest {storm.slowest():.2f} s"


def open_socket(farm: Farm) -> ClientConnection:
    """A WebSocket through nginx."""
    address = f"ws{farm.stack.public_url.removeprefix('http')}/v1/ws"
    headers = {"Authorization": f"Bearer {farm.client.key}"}
    return connect(address, additional_headers=headers, proxy=None, compression=None, max_size=None, open_timeout=20)


def _deaf_socket(farm: Farm) -> socket.socket:
    """A socket that subscribes to everything, past nginx, with a small receive buffer that nobody empties."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.settimeout(10)
    api = farm.dice.choice(APIS)
    raw.connect(("127.0.0.1", farm.stack.port(api)))
    raw.sendall(
        b"GET /v1/ws HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nAuthorization: Bearer "
        + farm.client.key.encode()
        + b"\r\n\r\n"
    )
    raw.recv(12)
    text = b'{"type":"subscribe","all":true}'
    raw.sendall(bytes([0x81, 0x80 | len(text), 0, 0, 0, 0]) + text)
    return raw


def _send_part(farm: Farm, body: bytes, size: int) -> None:
    """Send the head of a submit and a part of its body, then reset the connection."""
    with socket.create_connection(("127.0.0.1", farm.stack.port("api-1")), timeout=5) as raw:
        head = f"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {farm.client.key}\r\nContent-Length: {len(body)}\r\n\r\n"
        raw.sendall(head.encode() + body[:size])


def _memory(farm: Farm, part: str) -> int:
    memory: Any = psutil.Process(farm.pid(part)).memory_info()
    return int(memory.rss)
