"""A finished video on the disk and the note beside it, with all that is needed to deliver it in another process's life.

The note holds no prompt. It is written whole or not at all, and a video without one is not finished.
"""

import dataclasses
import hashlib
import json
import math
import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

from common.domain.jobs import Phase
from common.domain.parameters import JobParameters
from worker.attempts import Attempt
from worker.encode import EncodedVideo

_VERSION = 1
_PROMPTS = ("prompt", "negative_prompt")
_KEPT_OF_ATTEMPT = ("version", "attempt", "waited_s", "batch_size", "gpu_seconds")


class BadNoteError(ValueError):
    """The note or its video is incomplete, changed, or of a later version."""


@dataclass(frozen=True, slots=True)
class Spooled:
    """A video that waits for its delivery. `result` is what the job shows of it."""

    attempt: Attempt
    video: EncodedVideo
    result: dict[str, Any]


def note_of(video: Path) -> Path:
    """Where the note of a video lies."""
    return video.with_suffix(".json")


def write_note(entry: Spooled) -> None:
    """Make the video one that outlives this process. Raises OSError."""
    path = note_of(entry.video.path)
    partial = path.with_suffix(".json.part")
    _sync(entry.video.path)
    with partial.open("w", encoding="utf-8") as file:
        json.dump(_as_note(entry), file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def remove(video: Path) -> None:
    """Remove a video and its note. Raises OSError."""
    note_of(video).unlink(missing_ok=True)
    video.unlink(missing_ok=True)


def read_note(path: Path) -> Spooled:
    """Read a note and check its video. The attempt's deadline is not known yet. Raises BadNoteError and OSError."""
    try:
        note = json.loads(path.read_text("utf-8"))
        if note["v"] != _VERSION:
            msg = f"version {note['v']} of a note"
            raise BadNoteError(msg)
        video = EncodedVideo(path.with_suffix(".mp4"), **note["video"])
        entry = Spooled(_attempt(note), video, dict(note["result"]))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        msg = f"not a note: {type(error).__name__}"
        raise BadNoteError(msg) from error
    _check(entry.video)
    return entry


def _as_note(entry: Spooled) -> dict[str, Any]:
    attempt, video = entry.attempt, dataclasses.asdict(entry.video)
    del video["path"]
    parameters = {name: value for name, value in attempt.parameters.as_dict().items() if name not in _PROMPTS}
    return {
        "v": _VERSION,
        "job_id": str(attempt.job_id),
        "tenant_id": str(attempt.tenant_id),
        "token": str(attempt.token),
        **{name: getattr(attempt, name) for name in _KEPT_OF_ATTEMPT},
        "parameters": parameters,
        "failures": dict(attempt.failures),
        "timings_ms": attempt.timings_ms,
        "video": video,
        "result": entry.result,
    }


def _attempt(note: dict[str, Any]) -> Attempt:
    return Attempt(
        job_id=UUID(note["job_id"]),
        tenant_id=UUID(note["tenant_id"]),
        token=UUID(note["token"]),
        **{name: note[name] for name in _KEPT_OF_ATTEMPT},
        parameters=JobParameters.from_dict(note["parameters"] | dict.fromkeys(_PROMPTS, "")),
        failures=dict(note["failures"]),
        timings_ms=dict(note["timings_ms"]),
        started_at=time.monotonic(),
        deadline=math.inf,
        phase=Phase.UPLOAD,
        step=int(note["parameters"]["num_inference_steps"]),
        finished=True,
    )


def _check(video: EncodedVideo) -> None:
    if not stat.S_ISREG(video.path.lstat().st_mode):
        msg = "the video is no plain file"
        raise BadNoteError(msg)
    with video.path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != video.sha256:
        msg = "the video is not the one that was finished"
        raise BadNoteError(msg)


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
