"""Ends the jobs that ran out of time."""

import structlog
from sqlalchemy import TextClause
from sqlalchemy.ext.asyncio import AsyncEngine

from common import telemetry
from common.db.statements import EXPIRE_QUEUED, FAIL_OVERDUE
from common.events import AsyncEvents, JobChanged

log = structlog.get_logger()


async def expire_jobs(engine: AsyncEngine, events: AsyncEvents, backstop_s: float) -> None:
    """Expire what nobody started in time, and fail what is past its total deadline.

    A running job's worker ends it first; this is the backstop, `backstop_s` seconds later.
    """
    await _end(engine, events, EXPIRE_QUEUED, {})
    await _end(engine, events, FAIL_OVERDUE, {"backstop_s": backstop_s})


async def _end(engine: AsyncEngine, events: AsyncEvents, statement: TextClause, values: dict[str, float]) -> None:
    async with engine.connect() as connection:
        ended = (await connection.execute(statement, values)).all()
    for job in ended:
        log.info("job_ended", job_id=str(job.id), state=job.state)
        telemetry.finished.labels(job.model, job.state).inc()
    await events.send_many([JobChanged(str(job.id), str(job.tenant_id), job.version) for job in ended])
