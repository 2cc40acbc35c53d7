"""Checks the invariants I1 to I10 of docs/explanation/lifecycle.md from the clients' log, the job store and the bucket."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.domain.jobs import ATTEMPT_BUDGET, TRANSITIONS, JobState
from tests.faults.clients import TERMINAL, Sighting
from tests.faults.farm import Farm, until, uuid_of

# What END_ATTEMPT and its kin write as outcome of an attempt that was not charged to the job.
_UNCHARGED = frozenset({"succeeded", "preempted", "cancelled", "mate_overdue", "deadline_exceeded"})


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything that is known of some jobs once they have ended. Keyed by the ids that clients know."""

    rows: Mapping[str, Any]
    attempts: Mapping[str, list[Any]]
    seen: Mapping[str, list[Sighting]]
    cancelled: frozenset[str]
    videos: frozenset[str]
    measured: Mapping[str, tuple[int, str] | None]

    @property
    def attempts_run(self) -> int:
        """How often a worker has claimed one of the jobs."""
        return sum(map(len, self.attempts.values()))


def gather(farm: Farm, job_ids: Sequence[str]) -> Evidence:
    """Read all there is about the jobs."""
    ids = [uuid_of(job_id) for job_id in job_ids]
    rows = farm.sql("SELECT * FROM jobs WHERE id = ANY(%s::uuid[])", ids)
    attempts: dict[str, list[Any]] = {job_id: [] for job_id in job_ids}
    for attempt in farm.sql("SELECT * FROM attempts WHERE job_id = ANY(%s::uuid[]) ORDER BY job_id, attempt", ids):
        attempts[_wire(attempt.job_id)].append(attempt)
    by_id = {_wire(row.id): row for row in rows}
    stored = [row.object_key for row in rows if row.state == JobState.SUCCEEDED and row.object_removed_at is None]
    return Evidence(
        rows=by_id,
        attempts=attempts,
        seen={job_id: list(farm.log.seen[job_id]) for job_id in job_ids},
        cancelled=frozenset(farm.log.cancelled).intersection(job_ids),
        videos=frozenset(farm.bucket.videos()),
        measured={key: farm.bucket.measure(key) for key in stored},
    )


def await_ends(farm: Farm, job_ids: Sequence[str], within_s: float) -> None:
    """Wait until the jobs have ended. Returns when time is up as well: I1 then says what is left."""
    if job_ids:
        try:
            farm.await_states(job_ids, *TERMINAL, within_s=within_s)
        except AssertionError:
            return


def violations(evidence: Evidence, invariants: Sequence[str]) -> list[str]:
    """What contradicts these invariants, in words; empty when all hold."""
    return [f"{name}: {what}" for name in invariants if name in CHECKS for what in CHECKS[name](evidence)]


def _wire(job_id: Any) -> str:
    return f"job_{job_id.hex}"


def _accepted_jobs_end(evidence: Evidence) -> Iterator[str]:
    for job_id in evidence.attempts:
        row = evidence.rows.get(job_id)
        if row is None:
            yield f"{job_id} was answered 202 and has no row"
        elif row.state not in TERMINAL:
            yield f"{job_id} is still {row.state} (attempt {row.attempt}, run_at {row.run_at}, {row.failures})"


def _no_state_is_left_against_the_graph(evidence: Evidence) -> Iterator[str]:
    """A version is one state for everybody, and versions in order are a path of the state graph."""
    for job_id, seen in evidence.seen.items():
        path: dict[int, str] = {}
        for sighting in seen:
            if path.setdefault(sighting.seq, sighting.status) != sighting.status:
                yield f"{job_id} version {sighting.seq} was {path[sighting.seq]} and {sighting.status}"
        row = evidence.rows.get(job_id)
        if row is not None:
            path[row.version] = row.state
        for (earlier, before), (later, after) in itertools.pairwise(sorted(path.items())):
            if not _leads_to(JobState(before), JobState(after), later - earlier):
                yield f"{job_id} was seen {before} (version {earlier}) and then {after} (version {later})"


def _leads_to(before: JobState, after: JobState, versions: int) -> bool:
    """Whether so many changes may lead from one state to the other; a cancel request is a change without a move."""
    states = {before}
    for _ in range(versions):
        states = {move for state in states for move in TRANSITIONS[state]} | (states - _ENDS)
        if not states:
            return False
    return after in states


_ENDS = {state for state in JobState if not TRANSITIONS[state]}


def _nobody_sees_time_run_backwards(evidence: Evidence) -> Iterator[str]:
    """The answers that one client gets one after the other never go back to an older version."""
    for job_id, seen in evidence.seen.items():
        for source, group in itertools.groupby(sorted(seen, key=lambda sighting: sighting.source), lambda s: s.source):
            versions = [sighting.seq for sighting in group]
            if versions != sorted(versions):
                yield f"{job_id} went back for one client ({source}): versions {versions}"


def _terminal_states_stay(evidence: Evidence) -> Iterator[str]:
    yield from _no_state_is_left_against_the_graph(evidence)
    yield from _nobody_sees_time_run_backwards(evidence)


def _one_attempt_wins(evidence: Evidence) -> Iterator[str]:
    for job_id, row in evidence.rows.items():
        attempts = evidence.attempts[job_id]
        numbers = [attempt.attempt for attempt in attempts]
        if numbers != list(range(1, row.attempt + 1)):
            yield f"{job_id} counts {row.attempt} attempts, and has those numbered {numbers}"
            continue
        winners = [attempt.attempt for attempt in attempts if attempt.outcome == JobState.SUCCEEDED]
        if winners != ([row.attempt] if row.state == JobState.SUCCEEDED else []):
            yield f"{job_id} is {row.state} at attempt {row.attempt}, and attempts {winners} succeeded"
        if attempts and row.token != attempts[-1].token:
            yield f"{job_id} has another token than its last attempt"
        if row.state in TERMINAL and any(attempt.ended_at is None for attempt in attempts):
            yield f"{job_id} is {row.state} with an open attempt"
        if row.state == JobState.SUCCEEDED and row.result["attempt"] != row.attempt:
            yield f"{job_id} holds the result of attempt {row.result['attempt']}, not {row.attempt}"
        yield from _overlaps(job_id, attempts)


def _overlaps(job_id: str, attempts: Sequence[Any]) -> Iterator[str]:
    """A lease is live until its attempt has ended; the next claim comes after that."""
    for earlier, later in itertools.pairwise(attempts):
        if earlier.ended_at is None or earlier.ended_at > later.started_at:
            yield f"{job_id} had attempts {earlier.attempt} and {later.attempt} at the same time"


def _succeeded_means_stored(evidence: Evidence) -> Iterator[str]:
    for job_id, row in evidence.rows.items():
        if row.state == JobState.SUCCEEDED and row.object_removed_at is None:
            found = evidence.measured.get(row.object_key)
            if found != (row.object_bytes, row.object_sha256):
                yield f"{job_id} says {row.object_bytes} bytes {row.object_sha256}, the bucket has {found}"


def _cancelled_never_succeeds(evidence: Evidence) -> Iterator[str]:
    for job_id in evidence.cancelled:
        row = evidence.rows.get(job_id)
        if row is not None and row.state not in {JobState.CANCELLED}:
            yield f"{job_id} was cancelled for its client and is {row.state}"


def _attempts_stay_within_budget(evidence: Evidence) -> Iterator[str]:
    budgets = {error.value: budget for error, budget in ATTEMPT_BUDGET.items()}
    for job_id, attempts in evidence.attempts.items():
        for outcome, count in Counter(attempt.outcome for attempt in attempts).items():
            budget = budgets.get(outcome)
            if budget is not None and count > budget:
                yield f"{job_id} had {count} attempts that ended as {outcome}, {budget} are allowed"
        charged = [attempt for attempt in attempts if attempt.outcome not in _UNCHARGED]
        # The first retry may be immediate; a loop would show as many starts within a second.
        starts = [attempt.started_at for attempt in charged]
        if any((later - first).total_seconds() < 1 for first, later in zip(starts, starts[4:], strict=False)):
            yield f"{job_id} was tried five times within a second"


CHECKS: Mapping[str, Callable[[Evidence], Iterator[str]]] = {
    "I1": _accepted_jobs_end,
    "I2": _terminal_states_stay,
    "I3": _one_attempt_wins,
    "I4": _succeeded_means_stored,
    "I6": _cancelled_never_succeeds,
    "I7": _attempts_stay_within_budget,
}


def orphans(farm: Farm) -> list[str]:
    """Objects in the bucket that no row owns (I8)."""
    videos = farm.bucket.videos()
    owned = {row.object_key for row in farm.sql("SELECT object_key FROM jobs WHERE object_key IS NOT NULL")}
    return sorted(set(videos) - owned)


def await_collection(farm: Farm, within_s: float) -> int:
    """Wait until no orphan is left; how many there were. Raises AssertionError with those that stay."""
    before = orphans(farm)
    until(lambda: orphans(farm), lambda left: not left, within_s, "a bucket without orphans")
    return len(before)
