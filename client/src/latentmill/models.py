"""Jobs as the API tells them. Keys that a later server adds are ignored, absent ones get a neutral value."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypedDict

from latentmill.errors import BadAnswerError

Document = Mapping[str, Any]

SUCCEEDED = "succeeded"
TERMINAL_STATUSES = frozenset({SUCCEEDED, "failed", "cancelled", "expired"})


class JobOptions(TypedDict, total=False):
    """What may be asked for besides the prompt. What is absent or None gets the model's default.

    `size` is "WIDTHxHEIGHT" in pixels, `num_frames` and `seconds` exclude each other, `priority` is 0 to 9 and higher
    goes first, `queue_deadline_s` is the longest wait for a start in seconds.
    """

    model: str | None
    negative_prompt: str | None
    size: str | None
    num_frames: int | None
    seconds: float | None
    fps: int | None
    num_inference_steps: int | None
    guidance_scale: float | None
    guidance_scale_2: float | None
    flow_shift: float | None
    seed: int | None
    deterministic: bool | None
    priority: int | None
    queue_deadline_s: float | None
    metadata: Mapping[str, str] | None


@dataclass(frozen=True, slots=True)
class Progress:
    """Denoising steps done and in all, their share in percent, and the seconds left once that can be said."""

    step: int = 0
    steps: int = 0
    percent: float = 0
    eta_s: float | None = None

    @classmethod
    def from_json(cls, raw: Document) -> "Progress":
        """Read `progress` of a job, or the same keys of a job.progress event."""
        return cls(
            int(raw.get("step") or 0), int(raw.get("steps") or 0), float(raw.get("percent") or 0), raw.get("eta_s")
        )


@dataclass(frozen=True, slots=True)
class QueuePlace:
    """Where a queued job stands; position 1 is next. `note` says what speaks against a start, if anything does."""

    position: int
    ahead: int
    est_start_s: float | None
    note: str | None = None

    @classmethod
    def from_json(cls, raw: Document) -> "QueuePlace":
        """Read `queue` of a job."""
        return cls(int(raw.get("position") or 0), int(raw.get("ahead") or 0), raw.get("est_start_s"), raw.get("note"))


@dataclass(frozen=True, slots=True)
class Result:
    """The finished video. `url` is signed and works until `expires_at`; ask for the job again for a fresh one."""

    url: str
    sha256: str
    bytes: int
    expires_at: datetime | None = None
    width: int | None = None
    height: int | None = None
    fps: float | None = None
    num_frames: int | None = None
    duration_s: float | None = None
    engine: str | None = None

    @classmethod
    def from_json(cls, raw: Document) -> "Result":
        """Read `result` of a succeeded job."""
        clip = {key: raw.get(key) for key in ("width", "height", "fps", "num_frames", "duration_s", "engine")}
        expires_at = _moment(raw.get("expires_at"))
        return cls(str(raw["url"]), str(raw["sha256"]), int(raw["bytes"]), expires_at, **clip)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a job has no video."""

    code: str
    message: str
    error_class: str | None = None

    @classmethod
    def from_json(cls, raw: Document) -> "Failure":
        """Read `error` of a job."""
        return cls(str(raw.get("code") or "unknown"), str(raw.get("message") or ""), raw.get("class"))


@dataclass(frozen=True, slots=True)
class Job:
    """A job as it was when the server told it. `raw` is the whole document, `timings_ms` has the stages known so far.

    `seq` grows with every change of state; of two views of a job the one with the lower `seq` is the older.
    """

    id: str
    status: str
    seq: int = 0
    attempt: int = 0
    model: str = ""
    phase: str | None = None
    priority: int = 0
    cancel_requested: bool = False
    progress: Progress = Progress()
    queue: QueuePlace | None = None
    result: Result | None = None
    error: Failure | None = None
    batch_size: int | None = None
    timings_ms: Document = field(default_factory=dict)
    params: Document = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    created_at: datetime | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    raw: Document = field(default_factory=dict, compare=False, repr=False)

    @property
    def is_terminal(self) -> bool:
        """Whether nothing will change any more."""
        return self.status in TERMINAL_STATUSES

    @classmethod
    def from_json(cls, raw: object) -> "Job":
        """Read a job document. Raises BadAnswerError when it is none."""
        if not isinstance(raw, dict):
            message = "the server's answer is not a job"
            raise BadAnswerError(message)
        try:
            return cls(**_identity(raw), **_parts(raw), raw=raw)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            message = f"the server's answer is not a job that this version can read: {error!r}"
            raise BadAnswerError(message) from error


def _identity(raw: Document) -> dict[str, Any]:
    return {
        "id": str(raw["id"]),
        "status": str(raw["status"]),
        "seq": int(raw.get("seq") or 0),
        "attempt": int(raw.get("attempt") or 0),
        "model": str(raw.get("model") or ""),
        "phase": raw.get("phase"),
        "priority": int(raw.get("priority") or 0),
        "cancel_requested": bool(raw.get("cancel_requested")),
        "batch_size": (raw.get("batch") or {}).get("size"),
        "timings_ms": raw.get("timings_ms") or {},
        "params": raw.get("params") or {},
        "metadata": raw.get("metadata") or {},
    }


def _parts(raw: Document) -> dict[str, Any]:
    queue, result, error = raw.get("queue"), raw.get("result"), raw.get("error")
    return {
        "progress": Progress.from_json(raw.get("progress") or {}),
        "queue": QueuePlace.from_json(queue) if queue else None,
        "result": Result.from_json(result) if result else None,
        "error": Failure.from_json(error) if error else None,
        **{key: _moment(raw.get(key)) for key in ("created_at", "started_at", "finished_at")},
    }


def _moment(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None
