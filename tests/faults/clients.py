"""Clients of the farm under test: what they submitted, and every state that any of them saw."""

import itertools
import json
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import httpx
import websockets
from websockets.sync.client import connect

from common.domain.jobs import TERMINAL_STATES

MODEL = "wan2.2-ti2v-5b"
SMALL: dict[str, Any] = {"model": MODEL, "size": "128x128", "num_frames": 5, "num_inference_steps": 10}
TERMINAL = frozenset(state.value for state in TERMINAL_STATES)
_POLL_S = 0.4
_RECONNECT_S = 0.3


@dataclass(frozen=True, slots=True)
class Sighting:
    """A client read version `seq` of a job in this state; `source` names the stream of answers it came in."""

    source: str
    seq: int
    status: str


@dataclass(slots=True)
class ClientLog:
    """What all clients did and saw. Threads append; the oracle reads when they are quiet."""

    accepted: dict[str, float] = field(default_factory=dict)  # job id to time.monotonic() of its 202
    refused: list[tuple[int, str]] = field(default_factory=list)  # status and code of every other answer
    cancelled: set[str] = field(default_factory=set)  # ids whose cancel was answered with 200 or 202
    seen: dict[str, list[Sighting]] = field(default_factory=lambda: defaultdict(list))

    def note(self, source: str, job: dict[str, Any]) -> None:
        """A client saw this job body."""
        self.seen[job["id"]].append(Sighting(source, job["seq"], job["status"]))

    def since(self, moment: float) -> list[str]:
        """Ids that were answered 202 from then on."""
        return [job_id for job_id, at in tuple(self.accepted.items()) if at >= moment]


class Caller:
    """One client program with a key of its tenant. Nothing is tried again unless the test does so."""

    def __init__(self, base_url: str, key: str, log: ClientLog, timeout_s: float = 30.0) -> None:
        headers = {"Authorization": f"Bearer {key}"}
        limits = httpx.Limits(max_connections=400, max_keepalive_connections=100)
        self.key = key
        self.http = httpx.Client(base_url=base_url, headers=headers, timeout=timeout_s, limits=limits, trust_env=False)
        self._log = log

    def post(self, prompt: str, idempotency_key: str | None = None, **fields: Any) -> httpx.Response:
        """Submit once; the answer, whatever it is. Raises httpx.TransportError when none came."""
        headers = {"Idempotency-Key": idempotency_key} if idempotency_key else {}
        answer = self.http.post("/v1/jobs", json={**SMALL, "prompt": prompt, **fields}, headers=headers)
        if answer.status_code == httpx.codes.ACCEPTED:
            job = answer.json()
            self._log.accepted.setdefault(job["id"], time.monotonic())
            self._log.note(f"submit {job['id']}", job)
        else:
            self._log.refused.append((answer.status_code, _code(answer)))
        return answer

    def submit(self, prompt: str, **fields: Any) -> str:
        """Submit; the job's id. Raises AssertionError for any answer but 202."""
        answer = self.post(prompt, **fields)
        assert answer.status_code == httpx.codes.ACCEPTED, f"submit got {answer.status_code}: {answer.text[:200]}"
        return str(answer.json()["id"])

    def submit_many(self, prompts: Iterable[str], **fields: Any) -> list[str]:
        """Submit one after the other; the ids."""
        return [self.submit(prompt, **fields) for prompt in prompts]

    def get(self, job_id: str) -> dict[str, Any]:
        """The job as it is now."""
        answer = self.http.get(f"/v1/jobs/{job_id}")
        answer.raise_for_status()
        job: dict[str, Any] = answer.json()
        self._log.note(f"get {threading.get_ident()}", job)
        return job

    def cancel(self, job_id: str) -> httpx.Response:
        """Ask for a cancel; the answer."""
        answer = self.http.post(f"/v1/jobs/{job_id}/cancel")
        if answer.is_success:
            self._log.cancelled.add(job_id)
        return answer

    def close(self) -> None:
        """Close the connections."""
        self.http.close()


def _code(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:80]


class Watchers:
    """Two clients that follow everything of a tenant for as long as the farm runs.

    One polls, turning from one api to the other, so that it would notice if they told different stories. One has a
    WebSocket, which is told every version.
    """

    def __init__(self, apis: list[str], public_url: str, key: str, log: ClientLog) -> None:
        self._apis = apis
        self._address = f"ws{public_url.removeprefix('http')}/v1/ws"
        self._headers = {"Authorization": f"Bearer {key}"}
        self._log = log
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=run, name=run.__name__, daemon=True) for run in (self._poll, self._listen)
        ]

    def start(self) -> None:
        """Watch from now on."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Watch no more."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(timeout=10)

    def _poll(self) -> None:
        with httpx.Client(headers=self._headers, timeout=5, trust_env=False) as http:
            for api in itertools.cycle(self._apis):
                if self._stopping.wait(_POLL_S):
                    return
                try:
                    answer = http.get(f"{api}/v1/jobs", params={"limit": 50})
                except httpx.HTTPError:
                    continue
                if answer.is_success:
                    for job in answer.json()["data"]:
                        self._log.note("poll", job)

    def _listen(self) -> None:
        for number in itertools.count():
            if self._stopping.wait(_RECONNECT_S if number else 0):
                return
            try:
                with connect(self._address, additional_headers=self._headers, proxy=None, max_size=None) as socket:
                    socket.send(json.dumps({"type": "subscribe", "all": True}))
                    while not self._stopping.is_set():
                        self._take(f"socket {number}", socket.recv)
            except (OSError, websockets.WebSocketException):
                continue

    def _take(self, source: str, receive: Any) -> None:
        try:
            event = json.loads(receive(timeout=0.5))
        except TimeoutError:
            return
        for job in event.get("jobs", [event["job"]] if "job" in event else []):
            self._log.note(source, job)
