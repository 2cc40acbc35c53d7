"""Runs one claimed batch in the engine child and turns its events into progress, files and outcomes."""

import time
from collections.abc import Callable, Sequence
from uuid import UUID

import structlog

from common import telemetry
from common.domain.jobs import ErrorClass, Phase
from worker.attempts import Attempt
from worker.conclude import fail, release
from worker.connections import Connections, show_progress
from worker.deliver import DeliveryLane
from worker.engine.base import (
    Batch,
    BatchDone,
    Event,
    FramesReady,
    Member,
    MemberCancelled,
    MemberDecoded,
    MemberFailed,
    MemberInterrupted,
    PhaseStarted,
    StepDone,
)
from worker.engine.process import ChildCrashedError, EngineError, EngineProcess, EngineStalledError, EngineTimeoutError

# Wan2.2 takes 67 minutes for 720p on the slowest GPU that was measured; nothing legitimate takes longer than this.
_ATTEMPT_CAP_S = 3 * 3600.0

log = structlog.get_logger()


class BatchRun:
    """The attempts of one batch that have no outcome yet."""

    def __init__(self, connections: Connections, lane: DeliveryLane, attempts: Sequence[Attempt]) -> None:
        self._connections = connections
        self._lane = lane
        self._open = {attempt.wire_id: attempt for attempt in attempts}
        self._step_seconds = 0.0

    def run(self, engine: EngineProcess, batch_id: UUID, on_decode: Callable[[], None]) -> None:
        """Run to the end. Every attempt has an outcome afterwards, or is on its way through the delivery lane.

        `on_decode` is called once, when the device is nearly free. Raises EngineError when the child was lost; the
        attempts are dealt with, the caller starts a new child.
        """
        members = tuple(Member(a.wire_id, a.attempt, a.parameters) for a in self._open.values())
        limit = min(a.deadline for a in self._open.values())
        deadline = min(limit, time.monotonic() + _ATTEMPT_CAP_S)
        busy = telemetry.engine_busy.labels(members[0].parameters.model)
        counted = time.monotonic()
        try:
            for event in engine.run(
                Batch(str(batch_id), members), stall_s=self._connections.settings.stall_s, deadline=deadline
            ):
                # At every event and not at the end alone: a batch may take hours, and a rate is read every minute.
                busy.inc(time.monotonic() - counted)
                counted = time.monotonic()
                if isinstance(event, PhaseStarted) and event.phase is Phase.DECODE:
                    on_decode()
                self._handle(event)
        except EngineError as error:
            self._abandon(error)
            raise

    def _handle(self, event: Event) -> None:
        match event:
            case PhaseStarted(job_ids, phase):
                for attempt in self._among(job_ids):
                    attempt.phase = phase
                    show_progress(self._connections, attempt)
            case StepDone(job_ids, step, steps, seconds):
                self._step_seconds += seconds
                eta_s = round(self._step_seconds / step * (steps - step), 2)
                for attempt in self._among(job_ids):
                    attempt.step = step
                    show_progress(self._connections, attempt, eta_s)
            case FramesReady(job_id):
                self._take_frames(job_id, event)
            case MemberDecoded(job_id, _, timings_ms):
                attempt = self._open.pop(job_id)
                attempt.timings_ms.update(timings_ms)
                attempt.phase = Phase.ENCODE
                show_progress(self._connections, attempt)
                self._lane.finish(attempt)
            case MemberFailed() | MemberCancelled() | MemberInterrupted():
                self._end_without_result(event)
            case BatchDone():
                self._fail_forgotten()

    def _among(self, job_ids: Sequence[str]) -> list[Attempt]:
        return [self._open[job_id] for job_id in job_ids if job_id in self._open]

    def _take_frames(self, job_id: str, event: FramesReady) -> None:
        attempt = self._open.get(job_id)
        if attempt is None:
            event.release()
        else:
            self._lane.write(attempt, event)

    def _end_without_result(self, event: MemberFailed | MemberCancelled | MemberInterrupted) -> None:
        attempt = self._open.pop(event.job_id)
        self._lane.discard(attempt)
        match event:
            case MemberFailed(_, ErrorClass.TIMEOUT, _) if time.monotonic() < self._own_limit(attempt):
                # The batch runs against the earliest deadline of its members, and that was another's.
                release(self._connections, attempt, "mate_overdue")
            case MemberFailed(_, error, detail):
                fail(self._connections, attempt, error, detail)
            case MemberCancelled():
                release(self._connections, attempt, "cancelled")
            case MemberInterrupted():
                release(self._connections, attempt, "preempted")

    def _own_limit(self, attempt: Attempt) -> float:
        return min(attempt.deadline, attempt.started_at + _ATTEMPT_CAP_S)

    def _fail_forgotten(self) -> None:
        self._drop(ErrorClass.INTERNAL, "the engine gave no outcome for the job")

    def _abandon(self, error: EngineError) -> None:
        reason, error_class = _lost_because(error)
        telemetry.engine_restarts.labels(reason).inc()
        log.error("engine_lost", reason=reason, detail=str(error))
        self._drop(error_class, f"the engine was lost while the job ran ({reason})")

    def _drop(self, error: ErrorClass, detail: str) -> None:
        for attempt in self._open.values():
            self._lane.discard(attempt)
            fail(self._connections, attempt, error, detail)
        self._open.clear()


def _lost_because(error: EngineError) -> tuple[str, ErrorClass]:
    match error:
        case EngineStalledError():
            return "stalled", ErrorClass.TIMEOUT
        case EngineTimeoutError():
            return "overran its deadline", ErrorClass.TIMEOUT
        case ChildCrashedError():
            return "crashed", ErrorClass.CHILD_CRASH
        case _:
            return "unusable", ErrorClass.INTERNAL
