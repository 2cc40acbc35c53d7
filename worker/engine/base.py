"""What a worker and its engine say to each other: batches in, events out. No torch: both sides import it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from common.domain.jobs import ErrorClass, Phase
from common.domain.parameters import JobParameters

# RGB, of the shape (frames, height, width, 3).
Frames = NDArray[np.uint8]

# The VAE turns the first latent frame into one frame and every later one into four: no engine sends more at once.
MAX_CHUNK_FRAMES = 4


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What an engine child needs to know to load its model. threads 0: torch decides. synthetic_step_s in seconds.

    synthetic_markers: what the synthetic engine reads behind every prompt.
    """

    engine: str
    model: str
    model_path: Path | None = None
    max_batch: int = 4
    threads: int = 0
    synthetic_step_s: float = 0.05
    synthetic_markers: str = ""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a loaded engine is, as shown to clients. `plan` says where the weights are kept, and why."""

    engine: str
    model: str
    device: str
    max_batch: int
    plan: str
    versions: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Member:
    """One job inside a batch. `image` is an encoded picture (PNG, JPEG, WebP) for image-to-video."""

    job_id: str
    attempt: int
    parameters: JobParameters
    image: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Batch:
    """Jobs that share one pipeline call: all have the same batch_key."""

    batch_id: str
    members: tuple[Member, ...]

    @property
    def job_ids(self) -> tuple[str, ...]:
        """The members' ids, in order."""
        return tuple(member.job_id for member in self.members)


@dataclass(frozen=True, slots=True)
class PhaseStarted:
    """These jobs entered text, denoise or decode."""

    job_ids: tuple[str, ...]
    phase: Phase


@dataclass(frozen=True, slots=True)
class StepDone:
    """Step `step` (from 1) of `steps` ended for these jobs and took `seconds`."""

    job_ids: tuple[str, ...]
    step: int
    steps: int
    seconds: float


def _keep() -> None:
    """Release frames that nobody waits for."""


@dataclass(frozen=True, slots=True)
class FramesReady:
    """Frames number `index` (from 0) and following of a job, in order and without gaps.

    In the parent `frames` is a view on memory shared with the child: copy or encode it, then call `release`, from any
    thread and at the latest when the job ends. The view must not be read afterwards.
    """

    job_id: str
    index: int
    frames: Frames = field(compare=False, repr=False)
    release: Callable[[], None] = field(default=_keep, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class MemberDecoded:
    """All frames of a job were sent. timings_ms has text, denoise and decode; text and denoise are the batch's."""

    job_id: str
    frames_total: int
    timings_ms: Mapping[str, int]
    peak_memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class MemberFailed:
    """The attempt of this job failed; the others of its batch go on. `detail` holds no prompt."""

    job_id: str
    error: ErrorClass
    detail: str


@dataclass(frozen=True, slots=True)
class MemberCancelled:
    """The job was dropped because of a cancel."""

    job_id: str


@dataclass(frozen=True, slots=True)
class MemberInterrupted:
    """The job was stopped because the worker leaves; the attempt is not charged (ErrorClass.PREEMPTED)."""

    job_id: str


@dataclass(frozen=True, slots=True)
class Alive:
    """The engine made headway inside a step. Swallowed by EngineProcess, whose stall clock it resets."""


@dataclass(frozen=True, slots=True)
class BatchDone:
    """Every member had its outcome. Not healthy: the engine asks for a fresh child (it was stopped already)."""

    batch_id: str
    healthy: bool = True


Outcome = MemberDecoded | MemberFailed | MemberCancelled | MemberInterrupted
Event = PhaseStarted | StepDone | FramesReady | Outcome | Alive | BatchDone
Emit = Callable[[Event], None]


class Control(Protocol):
    """What an engine asks while it works, several times a second: may I go on?"""

    @property
    def deadline(self) -> float:
        """On time.monotonic(), which all processes of a machine share: jobs that are not done by then have failed."""

    def cancelled(self) -> frozenset[str]:
        """Ids of jobs to drop."""

    def interrupted(self) -> bool:
        """Whether the whole batch must stop now."""


class EngineBrokenError(RuntimeError):
    """The engine cannot go on in this process (for example after an illegal access on the device)."""


class Engine(Protocol):
    """A model in memory. One call at a time: the VAE and the scheduler hold state of the running call."""

    def load(self) -> None:
        """Bring the model into memory. Raises whatever explains why that is impossible."""

    def warmup(self) -> None:
        """Run the cheapest job once, so that the first client does not wait for lazy set-up."""

    def capabilities(self) -> Capabilities:
        """Describe the loaded engine."""

    def run(self, batch: Batch, emit: Emit, control: Control) -> bool:
        """Render a batch: exactly one Outcome for each member. False: this process should be replaced.

        Raises EngineBrokenError when this process must end at once.
        """

    def reset(self) -> None:
        """Forget everything of the last call, so that the next one gives what a fresh process would."""

    def close(self) -> None:
        """Free the model."""
