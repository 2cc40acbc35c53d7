"""An engine without a model: it draws what the prompt says, takes scripted time and fails on request.

For load tests, fault tests and work on the user interface. Its name is in every result. Markers in a prompt script it:
[oom] [nan] [error] fail that job and [crash] [hang] take the process, in the middle of the denoise; [slow=0.5] sets the
seconds per step; [worn] asks for a fresh process after the batch.
"""

import ctypes
import os
import platform
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.domain.jobs import ErrorClass, Phase
from common.domain.parameters import JobParameters
from worker.engine.base import (
    MAX_CHUNK_FRAMES,
    Batch,
    Capabilities,
    Control,
    Emit,
    EngineConfig,
    Frames,
    FramesReady,
    Member,
    MemberDecoded,
    PhaseStarted,
    StepDone,
)
from worker.engine.control import Part, StopBatch

COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 180, 60),
    "blue": (40, 70, 220),
    "yellow": (235, 215, 40),
    "purple": (150, 50, 190),
    "orange": (245, 140, 30),
    "white": (240, 240, 240),
    "gray": (128, 128, 128),
    "black": (10, 10, 10),
}
_MOTIONS = {"right": (1, 0), "left": (-1, 0), "down": (0, 1), "up": (0, -1)}
_FAILURES = {
    "[oom]": (ErrorClass.OOM, "scripted: out of memory"),
    "[nan]": (ErrorClass.NAN_OUTPUT, "scripted: the latents are not finite"),
    "[error]": (ErrorClass.INTERNAL, "scripted: an unexpected exception"),
}
_SLOW = re.compile(r"\[slow=(\d+(?:\.\d+)?)\]")
# A cancel is noticed within this time, as quickly as by the block hooks of the real engine.
_TICK_S = 0.02


class SyntheticEngine:
    """Implements Engine. Pixel-exact for equal parameters; the seed moves the start by a few pixels."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config

    def load(self) -> None:
        """Nothing to load."""

    def warmup(self) -> None:
        """Nothing to warm."""

    def capabilities(self) -> Capabilities:
        """Describe the engine."""
        versions = {"python": platform.python_version(), "numpy": np.__version__}
        return Capabilities("synthetic", self._config.model, "cpu", self._config.max_batch, "draws, no model", versions)

    def run(self, batch: Batch, emit: Emit, control: Control) -> bool:
        """Render a batch."""
        part = Part([_marked(member, self._config.synthetic_markers) for member in batch.members], emit, control)
        try:
            denoise_ms = self._denoise(part)
            for member in tuple(part.waiting.values()):
                part.check()
                part.drop_cancelled()
                if member.job_id in part.waiting:
                    part.settle(_decode(member, part, denoise_ms))
        except StopBatch as stop:
            part.settle_all(stop.reason)
        return not any("[worn]" in member.parameters.prompt for member in batch.members)

    def reset(self) -> None:
        """Nothing is kept between calls."""

    def close(self) -> None:
        """Nothing to free."""

    def _denoise(self, part: Part) -> int:
        """Take the scripted time, settle members that fail or are cancelled; returns the milliseconds it took."""
        members = tuple(part.waiting.values())
        for phase in (Phase.TEXT, Phase.DENOISE):
            part.emit(PhaseStarted(part.job_ids, phase))
        steps = members[0].parameters.num_inference_steps
        step_s = max(self._step_s(member.parameters.prompt) for member in members)
        began = time.monotonic()
        for step in range(1, steps + 1):
            _rest(step_s, part)
            if step == (steps + 1) // 2:
                _strike(part)
            part.drop_cancelled()
            if not part.waiting:
                break
            part.emit(StepDone(part.job_ids, step, steps, step_s))
        return round((time.monotonic() - began) * 1000)

    def _step_s(self, prompt: str) -> float:
        slow = _SLOW.search(prompt)
        return float(slow.group(1)) if slow else self._config.synthetic_step_s


def _marked(member: Member, markers: str) -> Member:
    return replace(member, parameters=replace(member.parameters, prompt=member.parameters.prompt + markers))


def _rest(seconds: float, part: Part) -> None:
    until = time.monotonic() + seconds
    part.check()
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(left, _TICK_S))
        part.check()


def _strike(part: Part) -> None:
    """Do what the markers say."""
    for job_id, member in tuple(part.waiting.items()):
        prompt = member.parameters.prompt
        if "[crash]" in prompt:
            os.kill(os.getpid(), signal.SIGSEGV)
        if "[hang]" in prompt:
            # PyDLL keeps the interpreter lock: no thread of this process answers, as in a driver call that never ends.
            ctypes.PyDLL(None).sleep(3600)
        marker = next((marker for marker in _FAILURES if marker in prompt), None)
        if marker is not None:
            part.fail(job_id, *_FAILURES[marker])


def _decode(member: Member, part: Part, denoise_ms: int) -> MemberDecoded:
    began = time.monotonic()
    part.emit(PhaseStarted((member.job_id,), Phase.DECODE))
    for index, chunk in draw_chunks(member.parameters):
        part.emit(FramesReady(member.job_id, index, chunk))
    timings = {"text": 0, "denoise": denoise_ms, "decode": round((time.monotonic() - began) * 1000)}
    return MemberDecoded(member.job_id, member.parameters.num_frames, timings, None)


def draw_chunks(parameters: JobParameters) -> Iterator[tuple[int, Frames]]:
    """Yield (index, frames) as the real decode does: one frame, then four at a time."""
    index = 0
    while index < parameters.num_frames:
        count = min(1 if index == 0 else MAX_CHUNK_FRAMES, parameters.num_frames - index)
        yield index, np.stack([_draw(parameters, index + offset) for offset in range(count)])
        index += count


def _draw(parameters: JobParameters, index: int) -> Frames:
    """One frame: a shape on a plain background, moved by half the picture's shorter side over the whole clip."""
    width, height = parameters.width, parameters.height
    shape_words, _, background_words = parameters.prompt.lower().partition(" on ")
    frame = np.empty((height, width, 3), np.uint8)
    frame[:] = _colour(background_words, "black")
    side = min(width, height)
    dx, dy = next((step for word, step in _MOTIONS.items() if word in shape_words.split()), (0, 0))
    along = (index / max(1, parameters.num_frames - 1) - 0.5) * side * 0.5
    jitter = parameters.seed % 5 - 2
    x = np.arange(width)[None, :] - (width / 2 + dx * along + jitter)
    y = np.arange(height)[:, None] - (height / 2 + dy * along + jitter)
    frame[_inside(shape_words, x, y, side * 0.16)] = _colour(shape_words, "white")
    return frame


def _colour(words: str, default: str) -> tuple[int, int, int]:
    return COLOURS[next((word for word in words.split() if word in COLOURS), default)]


def _inside(words: str, x: NDArray[Any], y: NDArray[Any], radius: float) -> NDArray[np.bool_]:
    """Which pixels belong to the shape, from their distances to its centre."""
    inside: NDArray[np.bool_] = x**2 + y**2 <= radius**2
    if "square" in words:
        inside = np.maximum(np.abs(x), np.abs(y)) <= radius
    elif "triangle" in words:
        inside = (np.abs(x) <= (y + radius) / 2) & (y <= radius)
    return inside
