"""Runs one claimed batch in the engine child and turns its events into progress, files and outcomes."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from uuid import UUID

import structlog

from common import telemetry
from common.domain.jobs import ErrorClass, Phase
from worker.attempts import Attempt
from worker.breaker import Breaker
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
from worker.pace import Pace, shape

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a batch needs of its worker.

    on_decode: called when the device is nearly free. left_s: the seconds that the batch may still take.
    """

    connections: Connections
    lane: DeliveryLane
    pace: Pace
    breaker: Breaker
    on_decode: Callable[[], None]
    left_s: Callable[[], float]


class BatchRun:
    """The attempts of one batch that have no outcome yet."""

    def __init__(self, around: Surroundings, attempts: Sequence[Attempt]) -> None:
        self._around = around
        self._connections = around.connections
        self._lane = around.lane
        self._open = {attempt.wire_id: attempt for attempt in attempts}
        self._asked = [attempt.parameters for attempt in attempts]
        self._failed: set[str] = set()
        self._decoded = 0
        self._step_seconds = 0.0
        self._limit_s = around.pace.attempt_limit_s(self._asked)
        self._began = self._counted = time.monotonic()

    def run(self, engine: EngineProcess, batch_id: UUID) -> None:
        """Run to the end. Every attempt has an outcome afterwards, or is on its way through the delivery lane.

        Raises EngineError when the child was lost; the attempts are dealt with, the caller starts a new child.
        """
        members = tuple(Member(a.wire_id, a.attempt, a.parameters) for a in self._open.values())
        deadline = min(self._own_limit(attempt) for attempt in self._open.values())
        stall_s = self._around.pace.stall_limit_s(shape(self._asked), self._connections.settings.stall_s)
        try:
            for event in engine.run(Batch(str(batch_id), members), stall_s=stall_s, deadline=deadline):
                self._count_time()
                self._handle(event)
                if isinstance(event, StepDone) and self._eta_s(event) > self._around.left_s():
                    engine.interrupt()  # the worker leaves, and the denoising alone would take longer than it may
        except EngineError as error:
            self._count_time()
            self._abandon(error)
            raise
        finally:
            if self._failed:
                self._around.breaker.failed(self._failed)

    def _count_time(self) -> None:
        """Charge the time since the last call to those it was spent on: the member that is decoded, else all.

        At every event and not at the end alone: a batch may take hours, and a rate is read every minute.
        """
        now = time.monotonic()
        seconds, self._counted = now - self._counted, now
        telemetry.engine_busy.labels(self._asked[0].model).inc(seconds)
        open_ones = list(self._open.values())
        payers = [attempt for attempt in open_ones if attempt.phase is Phase.DECODE] or open_ones
        for attempt in payers:
            attempt.gpu_seconds += seconds / len(payers)

    def _eta_s(self, done: StepDone) -> float:
        return self._step_seconds / done.step * (done.steps - done.step)

    def _handle(self, event: Event) -> None:
        match event:
            case PhaseStarted():
                self._note_phase(event)
            case StepDone():
                self._note_step(event)
            case FramesReady(job_id):
                self._take_frames(job_id, event)
            case MemberDecoded():
                self._pass_on(event)
            case MemberFailed() | MemberCancelled() | MemberInterrupted():
                self._end_without_result(event)
            case BatchDone():
                self._fail_forgotten()
                if self._decoded == len(self._asked):
                    self._around.pace.note_batch(self._asked, time.monotonic() - self._began)

    def _note_phase(self, event: PhaseStarted) -> None:
        if event.phase is Phase.DECODE:
            self._around.on_decode()
        for attempt in self._among(event.job_ids):
            attempt.phase = event.phase
            show_progress(self._connections, attempt)

    def _note_step(self, event: StepDone) -> None:
        self._step_seconds += event.seconds
        self._around.pace.note_step(shape(self._asked), event.seconds)
        eta_s = round(self._eta_s(event), 2)
        for attempt in self._among(event.job_ids):
            attempt.step = event.step
            show_progress(self._connections, attempt, eta_s)

    def _pass_on(self, event: MemberDecoded) -> None:
        attempt = self._open.pop(event.job_id)
        self._decoded += 1
        attempt.timings_ms.update(event.timings_ms)
        attempt.phase = Phase.ENCODE
        show_progress(self._connections, attempt)
        self._lane.finish(attempt)

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
                if error is not ErrorClass.INVALID_INPUT and time.monotonic() < attempt.deadline:
                    self._failed.add(event.job_id)
                fail(self._connections, attempt, error, detail)
            case MemberCancelled():
                release(self._connections, attempt, "cancelled")
            case MemberInterrupted():
                release(self._connections, attempt, "preempted")

    def _own_limit(self, attempt: Attempt) -> float:
        return min(attempt.deadline, self._began + self._limit_s)

    def _fail_forgotten(self) -> None:
        self._drop(ErrorClass.INTERNAL, "the engine gave no outcome for the job")

    def _abandon(self, error: EngineError) -> None:
        reason, error_class = _lost_because(error)
        telemetry.engine_restarts.labels(reason).inc()
        log.error("engine_lost", reason=reason, detail=str(error))
        self._drop(error_class, f"the engine was lost while the job ran ({reason})")

    def _drop(self, error: ErrorClass, detail: str) -> None:
        for attempt in self._open.values():
            self._failed.add(attempt.wire_id)
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
