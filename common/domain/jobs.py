"""The states of a job, the moves between them, and what happens after a failed attempt."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class JobState(StrEnum):
    """The six states that clients see."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


# Everything that is not listed is refused by the trigger on jobs.state, so a faulty build cannot undo a finished job.
TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset(
        {
            JobState.RUNNING,  # claimed
            JobState.SUCCEEDED,  # a late result: the lease expired, but nobody else has claimed the job
            JobState.FAILED,  # total deadline
            JobState.CANCELLED,
            JobState.EXPIRED,  # queue deadline, never started
        }
    ),
    JobState.RUNNING: frozenset({JobState.QUEUED, JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED}),
    JobState.SUCCEEDED: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.CANCELLED: frozenset(),
    JobState.EXPIRED: frozenset(),
}
TERMINAL_STATES = frozenset(state for state, nexts in TRANSITIONS.items() if not nexts)


class Phase(StrEnum):
    """What a running job is doing, in this order."""

    TEXT = "text"
    DENOISE = "denoise"
    DECODE = "decode"
    ENCODE = "encode"
    UPLOAD = "upload"


class ErrorClass(StrEnum):
    """Why an attempt ended without a result. The class decides whether the job runs again."""

    INVALID_INPUT = "invalid_input"
    OOM = "oom"
    INFRASTRUCTURE = "infrastructure"
    CHILD_CRASH = "child_crash"
    WORKER_LOST = "worker_lost"
    PREEMPTED = "preempted"
    TIMEOUT = "timeout"
    NAN_OUTPUT = "nan_output"
    INTERNAL = "internal"


# Attempts of a class after which the job is given up. None: until the total deadline. Preemption is never charged.
ATTEMPT_BUDGET: dict[ErrorClass, int | None] = {
    ErrorClass.INVALID_INPUT: 1,
    ErrorClass.OOM: 2,
    ErrorClass.INFRASTRUCTURE: 20,
    ErrorClass.CHILD_CRASH: 3,
    ErrorClass.WORKER_LOST: 10,
    ErrorClass.PREEMPTED: None,
    ErrorClass.TIMEOUT: 2,
    ErrorClass.NAN_OUTPUT: 2,
    ErrorClass.INTERNAL: 3,
}

# The code a client reads once the budget of the class is spent.
FINAL_ERROR_CODE: dict[ErrorClass, str] = {
    ErrorClass.INVALID_INPUT: "invalid_input",
    ErrorClass.OOM: "gpu_out_of_memory",
    ErrorClass.INFRASTRUCTURE: "infrastructure",
    ErrorClass.CHILD_CRASH: "poisoned",
    ErrorClass.WORKER_LOST: "worker_lost",
    ErrorClass.PREEMPTED: "preempted",
    ErrorClass.TIMEOUT: "inference_timeout",
    ErrorClass.NAN_OUTPUT: "nan_output",
    ErrorClass.INTERNAL: "internal_error",
}

# What a client reads besides the code. What exactly happened is for the operator: it may name hosts and paths.
_PUBLIC_MESSAGE: dict[ErrorClass, str] = {
    ErrorClass.OOM: "the job did not fit into the memory of the GPU; a smaller size or fewer frames would",
    ErrorClass.INFRASTRUCTURE: "a part of the farm that the job needed was away",
    ErrorClass.CHILD_CRASH: "the engine crashed while it ran the job",
    ErrorClass.WORKER_LOST: "the worker that ran the job was lost",
    ErrorClass.PREEMPTED: "the worker that ran the job had to leave",
    ErrorClass.TIMEOUT: "the job took longer than an attempt may take",
    ErrorClass.NAN_OUTPUT: "the model produced no valid picture",
    ErrorClass.INTERNAL: "the engine failed",
}


def public_message(error: ErrorClass, detail: str) -> str:
    """What the client may read about a failed attempt: why its own input was refused, else a sentence on the class."""
    return detail if error is ErrorClass.INVALID_INPUT else _PUBLIC_MESSAGE[error]


BACKOFF_BASE_S = 5.0
BACKOFF_CAP_S = 300.0
# The first of these says nothing about the job or its surroundings: waiting would only cost the client time.
_IMMEDIATE_FIRST_RETRY = frozenset({ErrorClass.CHILD_CRASH, ErrorClass.WORKER_LOST, ErrorClass.PREEMPTED})


@dataclass(frozen=True, slots=True)
class Retry:
    """The job goes back to the queue and may be claimed again after `delay_s` seconds."""

    delay_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The job fails for good with this code."""

    code: str


# Crashes of the engine while the job ran alone that show that it is the job.
_PROOF_OF_POISON = 2
_CRASHED_ON = f"{ErrorClass.CHILD_CRASH}@"
_CRASHED_IN_BATCH = f"{ErrorClass.CHILD_CRASH}_in_batch"


def charged(failures: Mapping[str, int], error: ErrorClass, *, alone: bool, worker_id: str) -> dict[str, int]:
    """The failures of a job by class after one more, which happened on `worker_id`.

    A crash in a batch says nothing about any one member and is no failure of the class: all of them run again alone.
    Crashes alone are noted by worker, too.
    """
    names: list[str] = [error]
    if error is ErrorClass.CHILD_CRASH:
        names = [error, f"{_CRASHED_ON}{worker_id}"] if alone else [_CRASHED_IN_BATCH]
    return {**failures, **{name: failures.get(name, 0) + 1 for name in names}}


def is_poison(failures: Mapping[str, int], *, others_live: bool) -> bool:
    """Whether the job, and no worker, crashes the engine: it did so twice alone, on two workers where there are two."""
    workers = sum(name.startswith(_CRASHED_ON) for name in failures)
    return failures.get(ErrorClass.CHILD_CRASH, 0) >= _PROOF_OF_POISON and (workers > 1 or not others_live)


def after_failure(error: ErrorClass, failures_of_class: int, jitter: random.Random) -> Retry | GiveUp:
    """Decide about a job whose attempt just failed for the `failures_of_class`-th time (from 1) in this class.

    0 is for a failure that was not charged.
    """
    budget = ATTEMPT_BUDGET[error]
    if budget is not None and failures_of_class >= budget:
        return GiveUp(FINAL_ERROR_CODE[error])
    return Retry(backoff_s(error, failures_of_class, jitter))


def backoff_s(error: ErrorClass, failures_of_class: int, jitter: random.Random) -> float:
    """Full jitter: a uniform wait below an exponential bound, so that a burst of failures does not come back as one."""
    if error is ErrorClass.PREEMPTED or (error in _IMMEDIATE_FIRST_RETRY and failures_of_class <= 1):
        return 0.0
    bound = min(BACKOFF_CAP_S, BACKOFF_BASE_S * 2.0 ** min(failures_of_class - 1, 10))
    return jitter.uniform(0.0, bound)
