"""What the job store and the bucket hold, past the api."""

import csv
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

from common.domain.ids import format_job_id, parse_job_id
from tests.compose.programs import LIST_VIDEOS
from tests.compose.stack import HOSTNAME_CHARS, ComposeStack


def query(stack: ComposeStack, statement: str, job_ids: Iterable[str] = ()) -> list[dict[str, str]]:
    """The rows of a SELECT, in which :'ids' stands for the jobs' UUIDs. An empty text is NULL."""
    ids = "{" + ",".join(str(parse_job_id(job_id)) for job_id in job_ids) + "}"
    psql = ["psql", "--username=latentmill", "--csv", f"--set=ids={ids}", "--file=-"]
    return list(csv.DictReader(stack.compose("exec", "-T", "postgres", *psql, stdin=statement).splitlines()))


def leader(stack: ComposeStack) -> str:
    """The hostname of the dispatcher that leads."""
    (row,) = query(stack, "SELECT holder FROM leaders WHERE role = 'dispatcher'")
    return row["holder"][:HOSTNAME_CHARS]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One row of attempts; `host` is the short id of the worker's container."""

    host: str
    outcome: str


@dataclass(frozen=True, slots=True)
class StoredJob:
    """A job as the store has it, and the keys of its videos in the bucket."""

    state: str
    object_key: str
    attempts: Sequence[Attempt]
    objects: frozenset[str]

    @property
    def outcomes(self) -> list[str]:
        return [attempt.outcome for attempt in self.attempts]

    def is_done_once(self) -> bool:
        """Whether one attempt succeeded, its video is the job's, and no attempt left another one.

        A worker that was killed between its upload and the commit leaves one: nothing else may.
        """
        allowed = {number for number, outcome in enumerate(self.outcomes, 1) if outcome in {"succeeded", "worker_lost"}}
        return (
            self.state == "succeeded"
            and self.outcomes.count("succeeded") == 1
            and self.object_key in self.objects
            and {_attempt_of(key) for key in self.objects} <= allowed
        )


def stored(stack: ComposeStack, job_ids: Iterable[str]) -> Mapping[str, StoredJob]:
    """The jobs with these ids, by id."""
    job_ids = list(job_ids)
    attempts: defaultdict[str, list[Attempt]] = defaultdict(list)
    for row in query(stack, "SELECT * FROM attempts WHERE job_id = ANY(:'ids') ORDER BY job_id, attempt", job_ids):
        attempts[row["job_id"]].append(Attempt(row["worker_id"][:HOSTNAME_CHARS], row["outcome"]))
    objects = _objects(stack)
    return {
        format_job_id(UUID(row["id"])): StoredJob(
            row["state"], row["object_key"], attempts[row["id"]], frozenset(objects[row["id"]])
        )
        for row in query(stack, "SELECT * FROM jobs WHERE id = ANY(:'ids')", job_ids)
    }


def running_hosts(stack: ComposeStack, job_ids: Iterable[str], *, step: int = 1) -> set[str]:
    """The containers that have got at least so far with one of these jobs, and are still at it."""
    statement = "SELECT * FROM attempts WHERE job_id = ANY(:'ids') AND ended_at IS NULL"
    return {row["worker_id"][:HOSTNAME_CHARS] for row in query(stack, statement, job_ids) if int(row["step"]) >= step}


def states(stack: ComposeStack, job_ids: Iterable[str]) -> list[str]:
    return [row["state"] for row in query(stack, "SELECT state FROM jobs WHERE id = ANY(:'ids')", job_ids)]


def _objects(stack: ComposeStack) -> Mapping[str, set[str]]:
    """The keys of all videos, by the job's UUID."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for key in json.loads(stack.python("api", LIST_VIDEOS)):
        found[key.split("/", 2)[1]].add(key)
    return found


def _attempt_of(key: str) -> int:
    """Of videos/JOB/ATTEMPT-HASH.mp4."""
    return int(key.rpartition("/")[2].partition("-")[0])
