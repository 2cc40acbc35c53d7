"""Stopping a batch from inside, and keeping count of the members that still wait for their outcome."""

import time
from collections.abc import Iterable
from enum import Enum, auto

from common.domain.jobs import ErrorClass
from worker.engine.base import Alive, Control, Emit, Member, MemberCancelled, MemberFailed, MemberInterrupted, Outcome


class StopReason(Enum):
    """Why a batch ends before its last frame."""

    CANCELLED = auto()
    INTERRUPTED = auto()
    DEADLINE = auto()


class StopBatch(Exception):  # noqa: N818 - not an error: it leaves a pipeline call the way StopIteration leaves a loop
    """Unwinds a pipeline call whose remaining members are all to be stopped for the same reason."""

    def __init__(self, reason: StopReason) -> None:
        super().__init__(reason.name.lower())
        self.reason = reason


def stopped(reason: StopReason, job_id: str) -> Outcome:
    """The outcome of a member that was stopped."""
    match reason:
        case StopReason.CANCELLED:
            return MemberCancelled(job_id)
        case StopReason.INTERRUPTED:
            return MemberInterrupted(job_id)
        case StopReason.DEADLINE:
            return MemberFailed(job_id, ErrorClass.TIMEOUT, "the time limit of the attempt passed")


class Part:
    """Members that share one pipeline call. `waiting` holds those without an outcome, in the batch's order."""

    def __init__(self, members: Iterable[Member], emit: Emit, control: Control) -> None:
        self.waiting = {member.job_id: member for member in members}
        self.emit = emit
        self._control = control

    @property
    def job_ids(self) -> tuple[str, ...]:
        """Ids of the members that wait."""
        return tuple(self.waiting)

    def settle(self, outcome: Outcome) -> None:
        """Record and send the outcome of a member that waits."""
        del self.waiting[outcome.job_id]
        self.emit(outcome)

    def settle_all(self, reason: StopReason) -> None:
        """Every member that waits was stopped for this reason."""
        for job_id in self.job_ids:
            self.settle(stopped(reason, job_id))

    def fail(self, job_id: str, error: ErrorClass, detail: str) -> None:
        """Shorthand for settle(MemberFailed)."""
        self.settle(MemberFailed(job_id, error, detail))

    def drop_cancelled(self) -> None:
        """Settle the members that were cancelled; their rows of the call are computed on, and thrown away."""
        for job_id in self._control.cancelled() & self.waiting.keys():
            self.settle(MemberCancelled(job_id))

    def check(self, job_id: str | None = None) -> None:
        """Raise StopBatch when nothing is left to do (for one member, or for all). Cheap: called for every block."""
        if self._control.interrupted():
            raise StopBatch(StopReason.INTERRUPTED)
        if self._control.cancelled().issuperset(self.waiting if job_id is None else (job_id,)):
            raise StopBatch(StopReason.CANCELLED)
        if time.monotonic() >= self._control.deadline:
            raise StopBatch(StopReason.DEADLINE)
        self.emit(Alive())
