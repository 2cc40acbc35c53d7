"""Ends attempts in Postgres: with a result that passes the fence, or back to the queue, or for good."""

import json
import random
import time
from collections.abc import Callable
from typing import Any, TypeVar

import structlog
from sqlalchemy import Connection, Row
from sqlalchemy.exc import InterfaceError, InternalError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from common import telemetry
from common.db.statements import COMPLETE, END_ATTEMPT, FENCE, OTHER_WORKERS
from common.domain.jobs import (
    FINAL_ERROR_CODE,
    ErrorClass,
    GiveUp,
    JobState,
    after_failure,
    charged,
    is_poison,
    public_message,
)
from common.events import JobChanged
from worker.attempts import Attempt
from worker.connections import Connections

# Postgres or the bucket is away: try again with growing waits, soon enough to be done right after an outage.
_RETRY_FIRST_S = 0.5
_RETRY_CAP_S = 5.0
# These failures may be the fault of the job itself: it runs again without mates.
_AGAIN_ALONE = frozenset({ErrorClass.CHILD_CRASH, ErrorClass.NAN_OUTPUT, ErrorClass.TIMEOUT})
# What Postgres answers with while it is away, starts, or fails over. Anything else would fail again.
_POSTGRES_AWAY = (InterfaceError, InternalError, OperationalError, PoolTimeoutError)

_jitter = random.Random()  # noqa: S311  spreads retries, guards nothing
log = structlog.get_logger()
T = TypeVar("T")


class GivenUpError(RuntimeError):
    """Trying again makes no sense: the worker leaves, nobody wants the result any more, or its deadline has passed."""


def until_done(
    connections: Connections, attempt: Attempt, action: Callable[[], T], failures: tuple[type[Exception], ...]
) -> T:
    """Repeat an action on a dependency until it succeeds. Raises GivenUpError when it no longer matters."""
    delay = _RETRY_FIRST_S
    while True:
        try:
            return action()
        except failures as error:
            log.warning("will_try_again", job_id=attempt.wire_id, action=action.__name__, error=type(error).__name__)
            if attempt.unwanted or time.monotonic() > attempt.deadline or connections.closing.wait(delay):
                raise GivenUpError(action.__name__) from error
            delay = min(2 * delay, _RETRY_CAP_S)


def complete(connections: Connections, attempt: Attempt, stored: dict[str, Any], result: dict[str, Any]) -> bool:
    """Store the result. False when the fence refused it: cancelled, or another attempt has claimed the job."""
    values = {
        **attempt.fence(),
        **stored,
        "result": json.dumps(result),
        "timings": json.dumps(attempt.timings_ms),
        "batch_size": attempt.batch_size,
        "gpu_seconds": attempt.gpu_seconds,
    }

    def complete_in_postgres() -> bool:
        with connections.database.connect() as connection:
            done = connection.execute(COMPLETE, values).first()
            if done is not None:
                _announce(connections, attempt, done.version)
                return True
            # No row: refused, or done by an earlier try of ours whose reply was lost.
            now = connection.execute(FENCE, {"id": str(attempt.job_id)}).first()
            return now is not None and now.state == JobState.SUCCEEDED and now.token == attempt.token

    accepted = until_done(connections, attempt, complete_in_postgres, _POSTGRES_AWAY)
    if accepted:
        telemetry.finished.labels(attempt.parameters.model, JobState.SUCCEEDED).inc()
        log.info("job_succeeded", job_id=attempt.wire_id, attempt=attempt.attempt, timings_ms=attempt.timings_ms)
    else:
        telemetry.stale_completions.labels(attempt.parameters.model).inc()
        log.warning("result_refused", job_id=attempt.wire_id, attempt=attempt.attempt)
    return accepted


def fail(
    connections: Connections, attempt: Attempt, error: ErrorClass, detail: str, *, spare_if_others: bool = False
) -> None:
    """The attempt failed: the budget of the class decides whether the job runs again.

    spare_if_others: the fault is this worker's, so the job is not charged while another one can do it. An attempt that
    ran into the total deadline ends its job.
    """
    if error is ErrorClass.TIMEOUT and time.monotonic() >= attempt.deadline:
        expire(connections, attempt)
        return
    telemetry.attempts_failed.labels(attempt.parameters.model, error).inc()
    log.warning("attempt_failed", job_id=attempt.wire_id, attempt=attempt.attempt, error_class=error, detail=detail)
    known = detail.replace("\0", "")[:2000]  # Postgres takes no NUL in a text

    def decide(connection: Connection) -> dict[str, Any]:
        others_live = bool(connection.execute(OTHER_WORKERS, _myself(connections)).scalar_one())
        ending = _ending(attempt, outcome=error) | {
            "error_class": error,
            "error_message": public_message(error, known),
            "detail": known,
            "alone": error in _AGAIN_ALONE,
        }
        if spare_if_others and others_live:
            return ending
        return ending | _charge(connections, attempt, error, others_live=others_live)

    _end(connections, attempt, decide)


def _charge(connections: Connections, attempt: Attempt, error: ErrorClass, *, others_live: bool) -> dict[str, Any]:
    failures = charged(attempt.failures, error, alone=attempt.alone, worker_id=connections.worker_id)
    verdict = after_failure(error, failures.get(error, 0), _jitter)
    if error is ErrorClass.CHILD_CRASH and is_poison(failures, others_live=others_live):
        verdict = GiveUp(FINAL_ERROR_CODE[error])
    noted = {"failures": json.dumps(failures)}
    if isinstance(verdict, GiveUp):
        return {**noted, "state": JobState.FAILED, "error_code": verdict.code}
    return {**noted, "delay_s": verdict.delay_s}


def release(connections: Connections, attempt: Attempt, outcome: str, *, delay_s: float = 0.0) -> None:
    """The attempt stops without a fault of its own and without charge; the job waits `delay_s` at least.

    A job that was cancelled becomes cancelled; any other waits in the queue again.
    """
    _end(connections, attempt, lambda _: _ending(attempt, outcome) | {"delay_s": delay_s})


def expire(connections: Connections, attempt: Attempt) -> None:
    """The total deadline of the job has passed: it fails for good."""
    log.warning("deadline_exceeded", job_id=attempt.wire_id, attempt=attempt.attempt)
    ending = _ending(attempt, outcome="deadline_exceeded") | {
        "state": JobState.FAILED,
        "error_code": "deadline_exceeded",
        "error_message": "the job was not done by its deadline",
    }
    _end(connections, attempt, lambda _: ending)


def _ending(attempt: Attempt, outcome: str) -> dict[str, Any]:
    return {
        "state": JobState.QUEUED,
        "delay_s": 0.0,
        "failures": json.dumps(dict(attempt.failures)),
        "error_class": None,
        "error_code": None,
        "error_message": None,
        "detail": None,
        "outcome": outcome,
        "alone": False,
    }


def _myself(connections: Connections) -> dict[str, Any]:
    return {"model": connections.settings.model, "worker_id": connections.worker_id}


def _end(connections: Connections, attempt: Attempt, decide: Callable[[Connection], dict[str, Any]]) -> None:
    guard = {**attempt.fence(), "expired_only": False, "gpu_seconds": attempt.gpu_seconds}

    def end_in_postgres() -> Row[Any] | None:
        with connections.database.connect() as connection:
            return connection.execute(END_ATTEMPT, guard | decide(connection)).first()

    try:
        ended = until_done(connections, attempt, end_in_postgres, _POSTGRES_AWAY)
    except GivenUpError:
        log.warning("attempt_left_to_its_lease", job_id=attempt.wire_id, attempt=attempt.attempt)
        return
    finally:
        connections.active.remove(attempt)
    if ended is not None:
        if ended.state != JobState.QUEUED:
            telemetry.finished.labels(attempt.parameters.model, ended.state).inc()
        _announce(connections, attempt, ended.version)


def _announce(connections: Connections, attempt: Attempt, version: int) -> None:
    connections.events.send(JobChanged(str(attempt.job_id), str(attempt.tenant_id), version))
