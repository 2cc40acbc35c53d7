"""A job as clients see it, built from its row. Pure functions; the models document the body for OpenAPI."""

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Literal
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field

from common.db.readings import DEEPEST_POSITION
from common.domain.ids import format_job_id
from common.domain.jobs import TERMINAL_STATES, JobState
from common.events import JobProgress
from common.urls import SignedUrl

Row = Mapping[Any, Any]
Sign = Callable[[str], SignedUrl]
_STAGES = ("queue", "text", "denoise", "decode", "encode", "upload")
UNSERVED = "no worker serves this model now"
MAY_EXPIRE = "it may expire before its start"
_CLIP = ("width", "height", "fps", "num_frames", "duration_s", "engine")


class _Documented(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Progress(_Documented):
    """How far the current attempt is."""

    step: int = Field(description="Denoising steps done.")
    steps: int = Field(description="Denoising steps in all.")
    percent: int = Field(description="Share of the steps done, 0 to 100.")
    eta_s: float | None = Field(description="Seconds of denoising left, once that can be said.")


class Queue(_Documented):
    """Where a queued job stands among the jobs of its model."""

    position: int = Field(description=f"1 is next. Exact below {DEEPEST_POSITION:,}, where it stops.")
    ahead: int = Field(description="Jobs before this one.")
    est_start_s: float | None = Field(
        description="Seconds until the start at the recent pace; null without one, and at the deepest position."
    )
    note: str | None = Field(description="What speaks against a start, for people; null when nothing does.")


class Batch(_Documented):
    """The pipeline call that made the video."""

    size: int = Field(description="Jobs in the call.")


class Result(_Documented):
    """The finished video."""

    url: str = Field(description="Signed address of the MP4, made when the job is read.")
    expires_at: str = Field(description="When the address stops working, RFC 3339.")
    sha256: str = Field(description="Of the file, hexadecimal.")
    bytes: int = Field(description="Size of the file.")
    width: int | None = Field(description="Pixels.")
    height: int | None = Field(description="Pixels.")
    fps: float | None = Field(description="Frames a second.")
    num_frames: int | None = Field(description="Frames.")
    duration_s: float | None = Field(description="Seconds.")
    engine: str | None = Field(description="What made the frames.")


class JobError(_Documented):
    """Why there is no video."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)
    code: str
    message: str
    class_: str | None = Field(alias="class", description="Class of the last attempt's error; null when none failed.")


class Links(_Documented):
    """Addresses of this job, relative to the API."""

    self: str
    cancel: str
    events: str


class Job(_Documented):
    """A job and what is known about it now."""

    id: str = Field(description="job_ and 32 hexadecimal digits.")
    object: Literal["job"]
    status: JobState
    phase: str | None = Field(description="What a running job does: text, denoise, decode, encode or upload.")
    model: str
    priority: int = Field(description="0 to 9, higher first.")
    attempt: int = Field(description="How often a worker has started it.")
    cancel_requested: bool
    seq: int = Field(description="Version of the job, raised by every change of its state.")
    progress: Progress
    queue: Queue | None
    timings_ms: dict[str, float] = Field(description="Milliseconds by stage, those known.")
    batch: Batch | None
    params: dict[str, Any] = Field(description="Everything that determines the video, defaults filled in.")
    result: Result | None
    error: JobError | None
    links: Links
    metadata: dict[str, str]
    created_at: str = Field(description="RFC 3339.")
    started_at: str | None = Field(description="First start, RFC 3339.")
    finished_at: str | None = Field(description="RFC 3339.")


class JobList(_Documented):
    """One page of jobs, newest first."""

    object: Literal["list"]
    data: list[Job]
    next_cursor: str | None = Field(description="`cursor` of the next page; null on the last.")


def render_job(row: Row, last: JobProgress | None, sign: Sign) -> dict[str, Any]:
    """The body of a job. `last` is its latest progress, if any is known; `sign` makes the address of an object."""
    job_id = format_job_id(row["id"])
    if last is not None and (last.attempt != row["attempt"] or row["state"] != JobState.RUNNING):
        last = None
    return {
        "id": job_id,
        "object": "job",
        "status": row["state"],
        "phase": last.phase if last else row["phase"],
        "model": row["model"],
        "priority": row["priority"],
        "attempt": row["attempt"],
        "cancel_requested": row["cancel_requested_at"] is not None,
        "seq": row["version"],
        "progress": _progress(row, last),
        "queue": _queue(row),
        "timings_ms": _timings(row),
        "batch": {"size": row["batch_size"]} if row["batch_size"] else None,
        "params": row["params"],
        "result": _result(row, sign),
        "error": _error(row),
        "links": links(job_id),
        "metadata": row["metadata"],
        "created_at": rfc3339(row["created_at"]),
        "started_at": rfc3339(row["started_at"]) if row["started_at"] else None,
        "finished_at": rfc3339(row["finished_at"]) if row["finished_at"] else None,
    }


def links(job_id: str) -> dict[str, str]:
    """Where to read, cancel and follow a job."""
    here = f"/v1/jobs/{job_id}"
    return {"self": here, "cancel": f"{here}/cancel", "events": f"{here}/events"}


def progress_event(progress: JobProgress, job_id: UUID) -> dict[str, Any]:
    """What clients are told about a step."""
    return {
        "type": "job.progress",
        "job_id": format_job_id(job_id),
        "attempt": progress.attempt,
        "phase": progress.phase,
        "step": progress.step,
        "steps": progress.steps,
        "percent": percent(progress.step, progress.steps),
        "eta_s": progress.eta_s,
    }


def percent(step: int, steps: int) -> int:
    """Whole percent of the steps, never over 100."""
    return min(100, 100 * step // max(steps, 1))


def rfc3339(moment: datetime) -> str:
    """The moment in UTC, to the millisecond."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def to_json(body: Any) -> str:  # noqa: ANN401  whatever JSON can hold
    """Compact JSON; text stays UTF-8, which keeps prompts in other scripts a third of their escaped size."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"))


def _progress(row: Row, last: JobProgress | None) -> dict[str, Any]:
    steps = row["params"]["num_inference_steps"]
    if last is not None:
        return {"step": last.step, "steps": last.steps, "percent": percent(last.step, last.steps), "eta_s": last.eta_s}
    step = steps if row["state"] == JobState.SUCCEEDED else row["step"] or 0
    return {"step": step, "steps": steps, "percent": percent(step, steps), "eta_s": None}


def _queue(row: Row) -> dict[str, Any] | None:
    if row["state"] != JobState.QUEUED or row["position"] is None:
        return None
    position, pace = min(row["position"], DEEPEST_POSITION), row["jobs_per_s"]
    wait_s = round((position - 1) / pace, 1) if pace else None
    known = wait_s if position < DEEPEST_POSITION else None  # the wait is longer than what can be said
    return {"position": position, "ahead": position - 1, "est_start_s": known, "note": _queue_note(row, wait_s)}


def _queue_note(row: Row, wait_s: float | None) -> str | None:
    if not row["served"]:
        return UNSERVED
    # A job that was started once does not expire any more.
    may_expire = row["attempt"] == 0 and wait_s is not None and wait_s > row["expires_in_s"]
    return MAY_EXPIRE if may_expire else None


def _timings(row: Row) -> dict[str, float]:
    known = row["timings"] or {}
    timings = {stage: known[stage] for stage in _STAGES if known.get(stage) is not None}
    if "queue" not in timings and row["started_at"] is not None:
        waited = (row["started_at"] - row["created_at"]).total_seconds()
        timings = {"queue": round(1000 * waited), **timings}
    return timings


def _result(row: Row, sign: Sign) -> dict[str, Any] | None:
    if row["state"] != JobState.SUCCEEDED:
        return None
    signed = sign(row["object_key"])
    clip = {**row["params"], **(row["result"] or {})}
    return {
        "url": signed.url,
        "expires_at": rfc3339(datetime.fromtimestamp(signed.expires_at, UTC)),
        "sha256": row["object_sha256"],
        "bytes": row["object_bytes"],
        **{name: clip.get(name) for name in _CLIP},
    }


def _error(row: Row) -> dict[str, Any] | None:
    if row["state"] not in TERMINAL_STATES or row["state"] == JobState.SUCCEEDED:
        return None
    code = row["error_code"] or row["state"]
    return {"code": code, "message": row["error_message"] or f"the job was {row['state']}", "class": row["error_class"]}
