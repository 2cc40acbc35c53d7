"""Finds what got lost: jobs whose worker is gone, and releases whose ticket is."""

import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

import structlog
from sqlalchemy import Row
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from common import telemetry
from common.broker.publisher import Publisher
from common.db.readings import OLD_RELEASES
from common.db.statements import END_ATTEMPT, EXPIRED_LEASES
from common.domain.jobs import ErrorClass, GiveUp, JobState, after_failure, public_message
from common.events import AsyncEvents, JobChanged
from dispatcher.release import take_back

log = structlog.get_logger()


async def reap_leases(engine: AsyncEngine, events: AsyncEvents, jitter: random.Random) -> None:
    """Queue (or fail) every running job whose lease has run out. The token stays: a late result is still welcome."""
    changed: list[JobChanged] = []
    async with engine.connect() as connection:
        for lost in (await connection.execute(EXPIRED_LEASES)).all():
            ended = await _end_lost_attempt(connection, lost, jitter)
            if ended is None:
                continue  # the worker renewed its lease just now
            telemetry.lease_expiries.labels(lost.model).inc()
            log.warning("lease_expired", job_id=str(lost.id), attempt=lost.attempt, worker=lost.worker_id)
            if ended.state != JobState.QUEUED:
                telemetry.finished.labels(lost.model, ended.state).inc()
            changed.append(JobChanged(str(lost.id), str(ended.tenant_id), ended.version))
    await events.send_many(changed)


async def _end_lost_attempt(connection: AsyncConnection, lost: Row[Any], jitter: random.Random) -> Row[Any] | None:
    error = ErrorClass.WORKER_LOST
    failures = {**lost.failures, error: lost.failures.get(error, 0) + 1}
    verdict = after_failure(error, failures[error], jitter)
    given_up = isinstance(verdict, GiveUp)
    values = {
        "id": str(lost.id),
        "attempt": lost.attempt,
        "token": str(lost.token),
        "state": JobState.FAILED if given_up else JobState.QUEUED,
        "delay_s": 0.0 if isinstance(verdict, GiveUp) else verdict.delay_s,
        "failures": json.dumps(failures),
        "error_class": error,
        "error_code": verdict.code if isinstance(verdict, GiveUp) else None,
        "error_message": public_message(error, ""),
        "detail": "the lease was not renewed",
        "outcome": error,
        "alone": False,
        "expired_only": True,
    }
    return (await connection.execute(END_ATTEMPT, values)).first()


@dataclass(slots=True)
class LostTickets:
    """Takes releases back whose ticket is missing, so that they are sent again.

    Tickets are missing when the broker, asked twice within `recheck_s`, held fewer of the model than are out. The
    oldest releases are taken back then, as far as they are older than `older_than_s`. A ticket that was only held by
    a worker is doubled that way, and a doubled ticket is a claim that finds nothing.
    """

    older_than_s: float
    recheck_s: float
    _short_since: dict[str, float] = field(default_factory=dict)

    async def scan(self, engine: AsyncEngine, publisher: Publisher, models: list[str]) -> None:
        """Look at every model once."""
        async with engine.connect() as connection:
            for model in models:
                await self._scan_model(connection, publisher, model)

    async def _scan_model(self, connection: AsyncConnection, publisher: Publisher, model: str) -> None:
        old = (await connection.execute(OLD_RELEASES, {"model": model, "older_than_s": self.older_than_s})).all()
        depth = await publisher.depth(model) if old else None
        released = old[0].released if old else 0
        now = time.monotonic()
        if depth is None or depth >= released:
            self._short_since.pop(model, None)
        elif now - self._short_since.setdefault(model, now) >= self.recheck_s / 2:
            missing = [(str(row.id), row.dispatch_seq) for row in old[: released - depth]]
            count = await take_back(connection, missing)
            telemetry.tickets_lost.labels(model).inc(count)
            log.warning("tickets_lost", model=model, jobs=count)
            self._short_since.pop(model, None)
