"""What the engine tests share: batches, a control to steer them by, and a recorder of events."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil

from common.domain.parameters import JobParameters
from worker.engine.base import (
    Batch,
    Engine,
    Event,
    Frames,
    FramesReady,
    Member,
    MemberCancelled,
    MemberDecoded,
    MemberFailed,
    MemberInterrupted,
    Outcome,
    StepDone,
)

RED_CIRCLE = "a red circle moving right on a blue background"
GREEN_SQUARE = "a green square moving up on a white background"


def parameters(prompt: str = RED_CIRCLE, **changes: Any) -> JobParameters:
    """Parameters of a tiny T2V job of four steps, not checked against a profile."""
    fields: dict[str, Any] = {
        "model": "tiny-wan2.2-t2v",
        "prompt": prompt,
        "negative_prompt": "blurry",
        "width": 64,
        "height": 64,
        "num_frames": 9,
        "fps": 8,
        "num_inference_steps": 4,
        "guidance_scale": 4.0,
        "guidance_scale_2": 3.0,
        "flow_shift": 5.0,
        "seed": 7,
    }
    return JobParameters(**(fields | changes))


def batch(*jobs: JobParameters | Member) -> Batch:
    """A batch of jobs j0, j1, ..."""
    members = (job if isinstance(job, Member) else Member(f"j{number}", 1, job) for number, job in enumerate(jobs))
    return Batch("batch", tuple(members))


@dataclass
class Recorder:
    """Collects events and frames. As a Control it cancels or interrupts once `when` holds for an event."""

    cancel: frozenset[str] = frozenset()
    interrupt: bool = False
    when: Callable[[Event], bool] = lambda _event: True
    deadline: float = math.inf
    events: list[Event] = field(default_factory=list)
    chunks: dict[str, list[Frames]] = field(default_factory=dict)
    _steered: bool = False

    def emit(self, event: Event) -> None:
        """Take an event from an engine or an EngineProcess."""
        self.events.append(event)
        self._steered = self._steered or self.when(event)
        if isinstance(event, FramesReady):
            assert event.index == sum(map(len, self.chunks.get(event.job_id, [])))
            self.chunks.setdefault(event.job_id, []).append(event.frames.copy())
            event.release()

    def cancelled(self) -> frozenset[str]:
        """Implement Control."""
        return self.cancel if self._steered else frozenset()

    def interrupted(self) -> bool:
        """Implement Control."""
        return self.interrupt and self._steered

    def frames(self, job_id: str = "j0") -> Frames:
        """All frames of a job."""
        return np.concatenate(self.chunks[job_id])

    def outcomes(self) -> dict[str, Outcome]:
        """The outcome of every job; fails when one has two."""
        kinds = MemberDecoded | MemberFailed | MemberCancelled | MemberInterrupted
        found = [event for event in self.events if isinstance(event, kinds)]
        assert len({outcome.job_id for outcome in found}) == len(found)
        return {outcome.job_id: outcome for outcome in found}

    def steps(self) -> list[StepDone]:
        """The steps that were reported."""
        return [event for event in self.events if isinstance(event, StepDone)]


def rendered(engine: Engine, *jobs: JobParameters | Member, recorder: Recorder | None = None) -> Recorder:
    """Run a batch in this process."""
    recorder = recorder or Recorder()
    engine.run(batch(*jobs), recorder.emit, recorder)
    return recorder


def is_step(number: int) -> Callable[[Event], bool]:
    """A condition for Recorder.when."""
    return lambda event: isinstance(event, StepDone) and event.step == number


def wait_until(condition: Callable[[], bool], timeout_s: float = 10) -> None:
    """Poll until the condition holds."""
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, "the condition did not come true in time"
        time.sleep(0.01)


def process_ended(pid: int) -> bool:
    """Whether a process is gone, or only waits to be reaped."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
