"""Renews the leases of everything this worker runs, and learns that way what was cancelled or taken over."""

import json
import threading
import time
from collections.abc import Callable, Collection

import redis
import structlog
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from common.db.statements import HEARTBEAT
from common.db.upkeep import WORKER_GONE, WORKER_PRESENT
from common.events import EventSender
from worker.attempts import ActiveAttempts, Attempt

# Without a heartbeat for so long the worker keeps computing, for a late result is welcome, but takes no new work.
_TRUST_S = 30.0
_HINT_RETRY_S = 5.0

log = structlog.get_logger()


def _row(attempt: Attempt) -> dict[str, object]:
    return {**attempt.fence(), "phase": attempt.phase, "step": attempt.step, "finished": attempt.finished}


class Heartbeat:
    """Two threads: one beats, one listens for cancel hints and makes the next beat come at once."""

    def __init__(
        self,
        engine: Engine,
        active: ActiveAttempts,
        presence: dict[str, object],
        stop_jobs: Callable[[Collection[str]], None],
        *,
        lease_s: float,
        every_s: float,
    ) -> None:
        self._engine = engine
        self._active = active
        self._presence = presence
        self._stop_jobs = stop_jobs
        self._lease_s = lease_s
        self._every_s = every_s
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._accepting = True
        self._last_success = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    @property
    def alive(self) -> bool:
        """Whether the beat goes on. It never ends by itself; when it did, every lease would run out."""
        return self._thread.is_alive()

    @property
    def trusted(self) -> bool:
        """Whether the last heartbeat is recent enough to take new work."""
        return time.monotonic() - self._last_success < _TRUST_S

    def start(self) -> None:
        """Beat from now on."""
        self._beat()
        self._thread.start()

    def beat_soon(self) -> None:
        """Beat now rather than at the next turn."""
        self._wake.set()

    def accept(self, *, accepting: bool) -> None:
        """Tell the dispatcher whether this worker takes new jobs."""
        if accepting is not self._accepting:
            self._accepting = accepting
            self.beat_soon()

    def stop(self) -> None:
        """End the beat and the worker's entry."""
        self._stopping.set()
        self._wake.set()
        self._thread.join(timeout=self._every_s)
        try:
            with self._engine.connect() as connection:
                connection.execute(WORKER_GONE, {"id": self._presence["id"]})
        except SQLAlchemyError:
            log.warning("worker_entry_left", worker=self._presence["id"])

    def listen_for_cancels(self, events: EventSender) -> None:
        """Beat at once whenever somebody cancels something. Without Redis a cancel waits for the next beat."""
        threading.Thread(target=self._listen, args=(events,), name="cancel-hints", daemon=True).start()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._wake.wait(self._every_s)
            self._wake.clear()
            try:
                self._beat()
            except Exception:  # the edge of the thread: without it the leases of all jobs would run out
                log.exception("heartbeat_broken")

    def _beat(self) -> None:
        try:
            with self._engine.connect() as connection:
                connection.execute(WORKER_PRESENT, {**self._presence, "accepting": self._accepting})
                running = self._active.snapshot()
                rows = [_row(attempt) for attempt in running]
                values = {"rows": json.dumps(rows), "lease_s": self._lease_s}
                mine = {row.id: row.cancel for row in connection.execute(HEARTBEAT, values)} if rows else {}
        except SQLAlchemyError as error:
            log.warning("heartbeat_failed", error=type(error).__name__)
            return
        self._last_success = time.monotonic()
        # Cancelled, or another attempt owns the job by now: either way nobody wants this result.
        unwanted = [attempt for attempt in running if mine.get(attempt.job_id, True)]
        for attempt in unwanted:
            attempt.unwanted = True
        computing = [attempt.wire_id for attempt in unwanted if attempt.in_engine]
        if computing:
            self._stop_jobs(computing)

    def _listen(self, events: EventSender) -> None:
        while not self._stopping.is_set():
            try:
                for _ in events.cancels():
                    self.beat_soon()
            except redis.RedisError:
                self._stopping.wait(_HINT_RETRY_S)
