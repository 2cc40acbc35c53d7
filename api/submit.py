"""Group commit: requests put their jobs on a list, and one INSERT takes all that wait.

Two flushers each take what gathered while the other's flush was under way, so a lone request waits for nobody and a
crowd shares one commit and one write to the broker. A job is safe once it is in Postgres; its ticket may fail.
"""

import asyncio
import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import structlog
from sqlalchemy.exc import DataError, IntegrityError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from api.announce import Announcer
from api.fetch import loggable
from api.problems import refusal
from common import telemetry
from common.broker.publisher import Publisher
from common.db.statements import DEFAULT_WINDOW, INSERT_JOBS, TAKE_BACK
from common.domain.errors import OVERLOADED
from common.domain.jobs import JobState
from common.domain.parameters import JobParameters
from common.domain.tickets import Ticket

_FLUSHERS = 2  # one gathers while the other waits for Postgres; a third won nothing
_MAX_FLUSH = 256
# Sixteen flushes. At a few milliseconds each a submit that is taken waits well under a second; the memory is bounded.
_MAX_WAITING = 4096

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class NewJob:
    """A checked job. The deadlines are seconds from now."""

    id: UUID
    tenant_id: UUID
    parameters: JobParameters
    priority: int
    metadata: dict[str, str]
    queue_deadline_s: float
    deadline_s: float

    @property
    def batch_key(self) -> str:
        """Equal for jobs that may share a pipeline call."""
        return self.parameters.batch_key(self.id)


@dataclass(frozen=True, slots=True)
class Accepted:
    """A job that is safely stored.

    `position` 1 is next, `jobs_per_s` is the recent pace of its model, `served` says whether a worker takes its jobs.
    """

    job: NewJob
    version: int
    created_at: datetime
    position: int
    jobs_per_s: float | None
    served: bool

    def as_row(self) -> dict[str, Any]:
        """The same columns that a read of the new job gives."""
        return {
            **dict.fromkeys(_EMPTY_COLUMNS),
            "id": self.job.id,
            "model": self.job.parameters.model,
            "state": JobState.QUEUED.value,
            "priority": self.job.priority,
            "params": self.job.parameters.as_dict(),
            "metadata": self.job.metadata,
            "version": self.version,
            "attempt": 0,
            "created_at": self.created_at,
            "position": self.position,
            "jobs_per_s": self.jobs_per_s,
            "served": self.served,
            "expires_in_s": self.job.queue_deadline_s,
        }


_EMPTY_COLUMNS = (
    "cancel_requested_at", "error_code", "error_class", "error_message", "object_key", "object_sha256", "object_bytes",
    "result", "timings", "batch_size", "started_at", "finished_at", "phase", "step",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Waiting:
    job: NewJob
    answer: asyncio.Future[Accepted]


class Submitter:
    """Takes jobs for as long as `run` runs."""

    def __init__(
        self, engine: AsyncEngine, publisher: Publisher, announcer: Announcer, publish_timeout_s: float
    ) -> None:
        self._engine = engine
        self._publisher = publisher
        self._announcer = announcer
        self._publish_timeout_s = publish_timeout_s
        self._waiting: deque[_Waiting] = deque()
        self._wake = asyncio.Event()

    async def submit(self, job: NewJob) -> Accepted:
        """Store the job. Raises LatentmillError (overloaded) or SQLAlchemy's errors."""
        if len(self._waiting) >= _MAX_WAITING:
            raise refusal(OVERLOADED, f"{len(self._waiting)} submits wait already")
        waiting = _Waiting(job, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._wake.set()
        return await waiting.answer

    async def run(self) -> None:
        """Flush what gathers, until cancelled."""
        async with asyncio.TaskGroup() as flushers:
            for _ in range(_FLUSHERS):
                flushers.create_task(self._flush_forever())

    async def _flush_forever(self) -> None:
        while True:
            await self._wake.wait()
            batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), _MAX_FLUSH))]
            if not self._waiting:
                self._wake.clear()
            if batch:
                await self._answer(batch)

    async def _answer(self, batch: list[_Waiting]) -> None:
        """Flush and answer everybody in the batch, with an error if need be."""
        holds_bad_row = False
        try:
            await self._flush(batch)
        except (DataError, IntegrityError) as error:
            holds_bad_row = len(batch) > 1
            if not holds_bad_row:
                _fail(batch, error)
        except SQLAlchemyError as error:
            _fail(batch, error)
        except Exception as error:  # the loop's edge: later submits must find a flusher
            log.exception("flush_failed", jobs=len(batch))
            _fail(batch, error)
        if holds_bad_row:  # not inside the handler: what fails here would be logged together with the row
            await self._flush_halves(batch)

    async def _flush_halves(self, batch: list[_Waiting]) -> None:
        """Postgres refused a row, hence the statement: halve until the bad row is alone and its mates are stored."""
        middle = len(batch) // 2
        await self._answer(batch[:middle])
        await self._answer(batch[middle:])

    async def _flush(self, batch: list[_Waiting]) -> None:
        rows = await self._insert([waiting.job for waiting in batch])
        telemetry.submit_flush.observe(len(batch))
        jobs = [waiting.job for waiting in batch]
        await self._publish([job for job in jobs if rows[job.id].released], rows)
        for waiting in batch:
            row = rows[waiting.job.id]
            if not waiting.answer.done():
                place = (row.position, row.jobs_per_s, row.served)
                waiting.answer.set_result(Accepted(waiting.job, row.version, row.created_at, *place))
            telemetry.submitted.labels(waiting.job.parameters.model).inc()
            self._announcer.changed(waiting.job.id, waiting.job.tenant_id, row.version)

    async def _insert(self, jobs: Sequence[NewJob]) -> dict[UUID, Any]:
        values = {"rows": json.dumps([_as_values(job) for job in jobs]), "default_window": DEFAULT_WINDOW}
        async with self._engine.connect() as connection:
            return {row.id: row for row in await connection.execute(INSERT_JOBS, values)}

    async def _publish(self, jobs: list[NewJob], rows: dict[UUID, Any]) -> None:
        """Send the tickets of released jobs, and leave those that the broker did not take to the dispatcher."""
        if not jobs:
            return
        tickets = [Ticket(job.id, rows[job.id].dispatch_seq, job.parameters.model, job.batch_key) for job in jobs]
        taken = await self._publisher.publish(tickets, self._publish_timeout_s)
        missing = [ticket for ticket, ok in zip(tickets, taken, strict=True) if not ok]
        if missing:
            await self._take_back(missing)

    async def _take_back(self, tickets: list[Ticket]) -> None:
        rows = [{"id": str(ticket.job_id), "dispatch_seq": ticket.dispatch_seq} for ticket in tickets]
        try:
            async with self._engine.connect() as connection:
                await connection.execute(TAKE_BACK, {"rows": json.dumps(rows)})
        except SQLAlchemyError as error:
            # The jobs are stored all the same; the dispatcher's scan for lost tickets finds them.
            log.warning("tickets_not_taken_back", jobs=len(rows), **loggable(error))


def _as_values(job: NewJob) -> dict[str, Any]:
    return {
        "id": str(job.id),
        "tenant_id": str(job.tenant_id),
        "model": job.parameters.model,
        "priority": job.priority,
        "params": job.parameters.as_dict(),
        "batch_key": job.batch_key,
        "metadata": job.metadata,
        "queue_deadline_s": job.queue_deadline_s,
        "deadline_s": job.deadline_s,
    }


def _fail(batch: list[_Waiting], error: Exception) -> None:
    for waiting in batch:
        if not waiting.answer.done():
            waiting.answer.set_exception(error)
