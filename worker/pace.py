"""How fast this worker's engine has been: from that, how long an attempt and a single step may take.

Figures of the engine's parent about its own GPU; a new process starts without any.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence

from common.domain.parameters import JobParameters

# Wan2.2 takes 67 minutes for 720p on the slowest GPU that was measured; nothing legitimate takes longer than this.
ATTEMPT_CAP_S = 3 * 3600.0
# An attempt may take this many times its estimate, and this much more for what does not grow with the work.
_ATTEMPT_FACTOR, _ATTEMPT_SLACK_S = 3.0, 120.0
_STALL_FACTOR = 10.0
# What is remembered: so many batches, shapes, and steps of each shape.
_BATCHES, _SHAPES, _STEPS = 64, 32, 100

Shape = tuple[int, int, int, int, bool]


def work(parameters: JobParameters) -> float:
    """Steps x frames x pixels: what a job costs, up to a factor of the machine and the model."""
    return float(parameters.num_inference_steps * _volume(parameters))


def _volume(parameters: JobParameters) -> int:
    return parameters.num_frames * parameters.width * parameters.height


def shape(members: Sequence[JobParameters]) -> Shape:
    """What the time of a step depends on: picture, length, batch, and whether guidance doubles the passes."""
    first = members[0]
    return first.width, first.height, first.num_frames, len(members), first.guidance_scale > 1


class Pace:
    """Learns from batches that ended well. For one thread."""

    def __init__(self) -> None:
        self._batches: deque[tuple[int, float]] = deque(maxlen=_BATCHES)
        self._steps: OrderedDict[Shape, deque[float]] = OrderedDict()

    def note_batch(self, members: Sequence[JobParameters], seconds: float) -> None:
        """All of these jobs were rendered, in one call that took `seconds` from text to the last frame."""
        self._batches.append((_volume(members[0]), seconds / sum(map(work, members))))

    def note_step(self, of: Shape, seconds: float) -> None:
        """One denoising step of a batch of this shape took so long."""
        self._steps.setdefault(of, deque(maxlen=_STEPS)).append(seconds)
        self._steps.move_to_end(of)
        if len(self._steps) > _SHAPES:
            self._steps.popitem(last=False)

    def attempt_limit_s(self, members: Sequence[JobParameters]) -> float:
        """How long a call with these jobs may take. Without an estimate that is the cap."""
        estimate = self._estimate_s(members)
        return ATTEMPT_CAP_S if estimate is None else min(ATTEMPT_CAP_S, _ATTEMPT_FACTOR * estimate + _ATTEMPT_SLACK_S)

    def _estimate_s(self, members: Sequence[JobParameters]) -> float | None:
        # Of videos of this size or larger alone: attention makes those slower for their work, so that smaller ones say
        # too little about them. And the slowest pace among these, for nothing legitimate may be ended.
        known = [pace for volume, pace in self._batches if volume >= _volume(members[0])]
        return max(known) * sum(map(work, members)) if known else None

    def stall_limit_s(self, of: Shape, least_s: float) -> float:
        """How long the engine may be silent: `least_s`, or ten times what all but 1 % of the steps took."""
        steps = sorted(self._steps.get(of, ()))
        return max(least_s, _STALL_FACTOR * steps[int(0.99 * (len(steps) - 1))]) if steps else least_s
