"""The job that warms an engine up: the smallest legal one, with one step."""

import io
import math

from common.domain.parameters import JobParameters
from common.domain.profiles import DEFAULT_NEGATIVE_PROMPT, ImageInput, ModelProfile
from worker.engine.base import Member


class Unlimited:
    """Implements Control for the warm-up."""

    deadline = math.inf

    def cancelled(self) -> frozenset[str]:
        """Nobody cancels it."""
        return frozenset()

    def interrupted(self) -> bool:
        """Nobody interrupts it."""
        return False


def smallest_member(profile: ModelProfile, *, with_picture: bool = True) -> Member:
    """One step at the smallest legal size, with a plain picture where the model needs one."""
    frames = profile.frame_choices[0] if profile.frame_choices else int(profile.num_frames.low)
    second = profile.guidance_scale_2
    parameters = JobParameters(
        model=profile.model,
        prompt="",
        negative_prompt=DEFAULT_NEGATIVE_PROMPT,
        width=profile.min_side,
        height=profile.min_side,
        num_frames=frames,
        fps=profile.fps,
        num_inference_steps=1,
        guidance_scale=profile.guidance_scale.default,
        guidance_scale_2=second.default if second is not None else None,
        flow_shift=profile.flow_shift.default,
        seed=0,
    )
    return Member("warm-up", 1, parameters, _plain_picture(profile) if with_picture else None)


def _plain_picture(profile: ModelProfile) -> bytes | None:
    if profile.image is not ImageInput.REQUIRED:
        return None
    from PIL import Image  # noqa: PLC0415  a worker with the synthetic engine has no Pillow, and needs no picture

    png = io.BytesIO()
    Image.new("RGB", (profile.min_side, profile.min_side), "gray").save(png, "PNG")
    return png.getvalue()
