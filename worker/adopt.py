"""At a worker's start: the finished videos in its spool are delivered, as far as anybody still waits for them."""

import json
import time
from collections.abc import Callable

import structlog
from sqlalchemy import Row
from sqlalchemy.exc import SQLAlchemyError

from common import telemetry
from common.db.statements import SPOOLED
from common.domain.jobs import JobState
from worker.conclude import release
from worker.connections import Connections
from worker.deliver import DeliveryLane
from worker.spooled import BadNoteError, Spooled, read_note, remove

_AGAIN_S = 1.0

log = structlog.get_logger()


def adopt_spool(connections: Connections, lane: DeliveryLane, leaving: Callable[[float], bool]) -> None:
    """Ask Postgres about every video in the spool; from then on the heartbeat renews the leases of those still wanted.

    Waits for Postgres, however long it is away. `leaving` waits so many seconds and says whether the worker must leave;
    then everything stays where it is.
    """
    entries = _read_all(connections)
    found = _ask(connections, entries, leaving) if entries else {}
    if found is None:
        return
    for entry in entries:
        _adopt(connections, lane, entry, found.get(str(entry.attempt.job_id)))


def _read_all(connections: Connections) -> list[Spooled]:
    entries = []
    for note in sorted(connections.spool.glob("*.json")):
        try:
            entries.append(read_note(note))
        except (BadNoteError, OSError) as error:
            log.warning("spool_entry_unusable", note=note.name, error=str(error))
            remove(note.with_suffix(".mp4"))
    return entries


def _ask(
    connections: Connections, entries: list[Spooled], leaving: Callable[[float], bool]
) -> dict[str, Row[tuple[object, ...]]] | None:
    rows = json.dumps([entry.attempt.fence() for entry in entries])
    while not leaving(0.0):
        try:
            with connections.database.connect() as connection:
                return {str(row.id): row for row in connection.execute(SPOOLED, {"rows": rows})}
        except SQLAlchemyError as error:
            log.warning("spool_waits_for_postgres", entries=len(entries), error=type(error).__name__)
            leaving(_AGAIN_S)
    return None


def _adopt(connections: Connections, lane: DeliveryLane, entry: Spooled, job: Row[tuple[object, ...]] | None) -> None:
    attempt = entry.attempt
    if job is not None and job.state in {JobState.QUEUED, JobState.RUNNING} and not job.cancel and job.remaining_s > 0:
        attempt.deadline = time.monotonic() + float(job.remaining_s)
        connections.active.add([attempt])
        log.info("spooled_result_adopted", job_id=attempt.wire_id, attempt=attempt.attempt, state=job.state)
        lane.deliver(entry)
        return
    if job is None or job.state != JobState.SUCCEEDED:  # else it was stored, and only the file was left
        telemetry.stale_completions.labels(attempt.parameters.model).inc()
    log.warning("spooled_result_dropped", job_id=attempt.wire_id, state=None if job is None else job.state)
    if job is not None and job.cancel:
        release(connections, attempt, "cancelled")
    if job is not None and job.state == JobState.SUCCEEDED:
        remove(entry.video.path)
    else:
        lane.drop(entry)
