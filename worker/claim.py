"""Turns tickets into claimed attempts: one statement for the whole batch, and certainty when its reply is lost."""

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Engine, Row

from common.db.statements import CLAIM, CLAIMS_BY_TOKEN, TAKE_BACK
from common.domain.parameters import JobParameters
from common.domain.tickets import Ticket
from worker.attempts import Attempt


def make_tokens(tickets: Sequence[Ticket]) -> dict[uuid.UUID, uuid.UUID]:
    """A token for every job, made before the claim so that the claim can be recognised afterwards."""
    return {ticket.job_id: uuid.uuid4() for ticket in tickets}


def claim(
    engine: Engine, tokens: Mapping[uuid.UUID, uuid.UUID], worker_id: str, batch_id: uuid.UUID, lease_s: float
) -> list[Attempt]:
    """Claim these jobs; those that cannot be claimed (cancelled, taken, doubled) are left out.

    Calling again with the same tokens after a SQLAlchemyError is safe: a claim whose reply was lost is found by them.
    """
    rows = json.dumps([{"id": str(job_id), "token": str(token)} for job_id, token in tokens.items()])
    values = {"rows": rows, "worker_id": worker_id, "batch_id": str(batch_id), "lease_s": lease_s}
    with engine.connect() as connection:
        claimed = connection.execute(CLAIM, values).all()
        if not claimed:
            known = [str(token) for token in tokens.values()]
            claimed = connection.execute(CLAIMS_BY_TOKEN, {"tokens": known}).all()
    return [_attempt(row, len(claimed)) for row in claimed]


def give_back(engine: Engine, tickets: Sequence[Ticket]) -> None:
    """Undo the release of jobs that did not fit the batch; the dispatcher sends them again. Raises SQLAlchemyError."""
    if tickets:
        rows = json.dumps([{"id": str(t.job_id), "dispatch_seq": t.dispatch_seq} for t in tickets])
        with engine.connect() as connection:
            connection.execute(TAKE_BACK, {"rows": rows})


def _attempt(row: Row[Any], batch_size: int) -> Attempt:
    now = time.monotonic()
    return Attempt(
        job_id=row.id,
        tenant_id=row.tenant_id,
        version=row.version,
        attempt=row.attempt,
        token=row.token,
        parameters=JobParameters.from_dict(row.params),
        failures=row.failures,
        waited_s=float(row.waited_s),
        started_at=now,
        deadline=now + float(row.remaining_s),
        batch_size=batch_size,
        timings_ms={"queue": int(1000 * float(row.waited_s))},
    )
