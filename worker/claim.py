"""Turns tickets into claimed attempts: one statement for the whole batch, and certainty when its reply is lost."""

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Engine, Row

from common.db.statements import CLAIM, CLAIMS_BY_TOKEN, DEFER, TAKE_BACK
from common.domain.parameters import JobParameters
from common.domain.tickets import Ticket
from worker.attempts import Attempt

# A job that another worker shall try is released again after this. It is soon enough to start within 2 s of a crash.
_DEFER_S = 0.5


@dataclass(frozen=True, slots=True)
class Intent:
    """A claim that may be tried several times. The tokens are made beforehand, so that it can be recognised later."""

    batch_id: uuid.UUID
    tokens: Mapping[Ticket, uuid.UUID]


def intend(tickets: Sequence[Ticket]) -> Intent:
    """A claim of these jobs that has not been tried yet."""
    return Intent(uuid.uuid4(), {ticket: uuid.uuid4() for ticket in tickets})


def claim(engine: Engine, intent: Intent, worker_id: str, lease_s: float) -> list[Attempt]:
    """Claim the jobs; those that cannot be claimed (cancelled, taken, doubled) are left out. Raises SQLAlchemyError."""
    rows = [
        {"id": str(ticket.job_id), "token": str(token), "batch_key": ticket.batch_key}
        for ticket, token in intent.tokens.items()
    ]
    values = {
        "rows": json.dumps(rows),
        "worker_id": worker_id,
        "batch_id": str(intent.batch_id),
        "lease_s": lease_s,
    }
    with engine.connect() as connection:
        claimed = connection.execute(CLAIM, values).all()
    return [_attempt(row, len(claimed)) for row in claimed]


def claimed_already(engine: Engine, intent: Intent) -> list[Attempt]:
    """What a try of this claim got although its reply was lost. Raises SQLAlchemyError."""
    with engine.connect() as connection:
        tokens = [str(token) for token in intent.tokens.values()]
        claimed = connection.execute(CLAIMS_BY_TOKEN, {"tokens": tokens}).all()
    return [_attempt(row, len(claimed)) for row in claimed]


def give_back(engine: Engine, tickets: Sequence[Ticket]) -> None:
    """Undo the release of jobs that did not fit the batch; the dispatcher sends them again. Raises SQLAlchemyError."""
    if tickets:
        with engine.connect() as connection:
            connection.execute(TAKE_BACK, {"rows": _releases(tickets)})


def defer(engine: Engine, tickets: Sequence[Ticket]) -> None:
    """Undo the release of jobs that this worker may not have now, and leave others a moment. Raises SQLAlchemyError.

    Nothing happens to jobs that were not claimed because they are no longer released, or not under this ticket.
    """
    if tickets:
        with engine.connect() as connection:
            connection.execute(DEFER, {"rows": _releases(tickets), "delay_s": _DEFER_S})


def _releases(tickets: Sequence[Ticket]) -> str:
    return json.dumps([{"id": str(t.job_id), "dispatch_seq": t.dispatch_seq} for t in tickets])


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
