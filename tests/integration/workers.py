"""Worker processes with the synthetic engine against the real servers."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

from tests.conftest import REPOSITORY
from tests.integration.conftest import MODEL, Store

# Nobody listens there: such a worker claims from Postgres, and such a bucket is away.
NO_BROKER = {"LATENTMILL_AMQP_URL": "amqp://nobody:nothing@127.0.0.1:1/%2F"}
NO_BUCKET = {"LATENTMILL_S3_ENDPOINT": "http://127.0.0.1:1"}
_COMMON = {
    "LATENTMILL_ENGINE": "synthetic",
    "LATENTMILL_MODEL": MODEL,
    "LATENTMILL_SYNTHETIC_STEP_S": "0.01",
    "LATENTMILL_DIRECT_CLAIM_AFTER_S": "0.1",
    "LATENTMILL_LEASE_S": "8",
    "LATENTMILL_HEARTBEAT_S": "0.5",
    "LATENTMILL_SPOOL_FREE_BYTES": "0",
}
T = TypeVar("T")


class Workers:
    """Starts workers for one test. Their logs lie in its folder."""

    def __init__(self, environment: Mapping[str, str], folder: Path, store: Store) -> None:
        self.spool = folder / "spool"
        self._environment = environment
        self._folder = folder
        self._store = store
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *more: Mapping[str, str]) -> None:
        """Start one, without a broker, and wait until it takes jobs or has a result to deliver."""
        own = {"LATENTMILL_WORKER_ID": name, "LATENTMILL_SPOOL_DIR": str(self.spool)}
        settings = {**os.environ, **self._environment, **_COMMON, **NO_BROKER, **own}
        for changes in more:
            settings |= changes
        self._store.sql("DELETE FROM workers WHERE id = :id", id=name)
        with (self._folder / f"{name}.log").open("ab") as log:
            command = [sys.executable, "-m", "worker"]
            self._running[name] = subprocess.Popen(command, env=settings, cwd=REPOSITORY, stderr=log, stdout=log)
        until(lambda: self._store.sql("SELECT 1 FROM workers WHERE id = :id", id=name), bool)

    def signal(self, name: str, number: int = signal.SIGTERM) -> None:
        self._running[name].send_signal(number)

    def ended(self, name: str) -> int:
        """Wait for its end; the exit code."""
        return self._running.pop(name).wait(timeout=30)

    def kill(self, name: str) -> None:
        self.signal(name, signal.SIGKILL)
        self.ended(name)

    def leave(self, name: str) -> int:
        """Have it leave at once, whatever it does."""
        self.signal(name)
        until(lambda: "draining" in self.log(name), bool)
        self.signal(name)
        return self.ended(name)

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text()

    def said(self, name: str, event: str) -> list[dict[str, Any]]:
        """The log lines of this event."""
        lines = [line for line in self.log(name).splitlines() if f'"{event}"' in line]
        return [json.loads(line) for line in lines]

    def kill_all(self) -> None:
        for worker in self._running.values():
            worker.kill()
            worker.wait()


@contextmanager
def workers_of(environment: Mapping[str, str], folder: Path, store: Store) -> Iterator[Workers]:
    workers = Workers(environment, folder, store)
    try:
        yield workers
    finally:
        workers.kill_all()


def until(read: Callable[[], T], holds: Callable[[T], bool], within_s: float = 30.0) -> T:
    """Read until the condition holds; the last reading."""
    deadline = time.monotonic() + within_s
    while not holds(value := read()):
        assert time.monotonic() < deadline, f"still {value!r} after {within_s} s"
        time.sleep(0.05)
    return value


def submit(store: Store, *prompts: str, **options: Any) -> list[UUID]:
    """Jobs with these prompts, released without a ticket."""
    jobs = [row.id for row in store.submit(len(prompts), **options)]
    for job_id, prompt in zip(jobs, prompts, strict=True):
        store.sql(
            "UPDATE jobs SET params = params || jsonb_build_object('prompt', CAST(:prompt AS text)) WHERE id = :id",
            prompt=prompt,
            id=job_id,
        )
    return jobs


def outcomes(store: Store, job_id: UUID) -> list[str | None]:
    """How its attempts ended, in order."""
    rows = store.sql("SELECT outcome FROM attempts WHERE job_id = :id ORDER BY attempt", id=job_id)
    return [row.outcome for row in rows]


def wait_for_end(store: Store, *jobs: UUID, within_s: float = 30.0) -> list[str]:
    """Wait until none of them is queued or running; their states."""
    return until(
        lambda: [store.row(job_id).state for job_id in jobs],
        lambda states: not {"queued", "running"} & set(states),
        within_s,
    )
