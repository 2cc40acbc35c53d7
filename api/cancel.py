"""Cancelling, the same for POST and for the socket."""

from dataclasses import dataclass
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncEngine

from api.announce import Announcer
from api.fetch import fetch
from api.problems import refusal
from api.reads import JobReads, JobView
from common import telemetry
from common.db.statements import CANCEL
from common.domain.errors import JOB_TERMINAL, NOT_FOUND
from common.domain.jobs import JobState


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The job after the call; `already` when it had been cancelled before."""

    view: JobView
    already: bool


async def cancel_job(
    engine: AsyncEngine, reads: JobReads, announcer: Announcer, tenant_id: UUID, job_id: UUID
) -> Cancelled:
    """End a queued job, ask a running one to stop. Raises LatentmillError (not_found, job_terminal)."""
    rows = await fetch(engine, CANCEL, {"id": str(job_id), "tenant_id": str(tenant_id)})
    for row in rows:
        announcer.changed(job_id, tenant_id, row.version)
        announcer.cancel(job_id)
        if row.state == JobState.CANCELLED:  # it was queued, and no worker will ever count it
            telemetry.finished.labels(row.model, row.state).inc()
    view = await reads.job(tenant_id, job_id)
    if view is None:
        raise refusal(NOT_FOUND, "there is no such job")
    if not rows and view.state != JobState.CANCELLED:
        raise refusal(JOB_TERMINAL, f"the job has already {view.state}")
    return Cancelled(view, already=not rows)
