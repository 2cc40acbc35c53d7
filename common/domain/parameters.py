"""From what a client asked to the exact parameters of a job, checked against the model's profile.

Nothing is changed silently: a value is either legal, or refused with the field's name and what would be legal.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any
from uuid import UUID

from common.domain.errors import FieldError, InvalidParametersError
from common.domain.profiles import DEFAULT_NEGATIVE_PROMPT, PROFILES, ImageInput, ModelProfile, Range

MAX_SEED = 2**63 - 1  # torch's generators take a signed 64-bit seed
_UNBATCHED = frozenset({"prompt", "negative_prompt", "seed", "fps"})  # may differ inside one pipeline call


@dataclass(frozen=True, slots=True)
class JobParameters:
    """Everything that determines the video of a job, with defaults filled in."""

    model: str
    prompt: str
    negative_prompt: str
    width: int
    height: int
    num_frames: int
    fps: int
    num_inference_steps: int
    guidance_scale: float
    guidance_scale_2: float | None
    flow_shift: float
    seed: int
    deterministic: bool = False

    def as_dict(self) -> dict[str, Any]:
        """The parameters as JSON-ready values, as stored and as shown to clients."""
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "JobParameters":
        """The inverse of as_dict. Keys of a later version are ignored."""
        known = {field.name for field in fields(cls)}
        return cls(**{key: value for key, value in raw.items() if key in known})

    def batch_key(self, job_id: UUID) -> str:
        """Equal for jobs that may share a pipeline call; a deterministic job has one of its own."""
        if self.deterministic:
            return f"alone-{job_id}"
        shared = {key: value for key, value in asdict(self).items() if key not in _UNBATCHED}
        return hashlib.sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest()[:16]


def resolve(asked: Mapping[str, Any], seed: int) -> JobParameters:
    """Fill in the profile's defaults and check every field.

    `asked` holds the fields that the client sent; absent and None mean the default. `seed` is used when none was sent,
    so that a job that runs twice gives the same video. Raises InvalidParametersError naming every bad field.
    """
    profile = PROFILES.get(str(asked.get("model") or ""))
    if profile is None:
        raise InvalidParametersError([FieldError("model", f"must be one of {', '.join(PROFILES)}")])
    errors: list[FieldError] = []
    width, height = _size(asked, profile, errors)
    parameters = JobParameters(
        model=profile.model,
        prompt=_text(asked, "prompt", profile, errors),
        negative_prompt=_text(asked, "negative_prompt", profile, errors),
        width=width,
        height=height,
        num_frames=_frames(asked, profile, errors),
        fps=profile.fps if asked.get("fps") is None else _whole(asked, "fps", Range(1, 60, profile.fps), errors),
        num_inference_steps=_whole(asked, "num_inference_steps", profile.steps, errors),
        guidance_scale=_real(asked, "guidance_scale", profile.guidance_scale, errors),
        guidance_scale_2=_second_guidance(asked, profile, errors),
        flow_shift=_real(asked, "flow_shift", profile.flow_shift, errors),
        seed=_whole(asked, "seed", Range(0, MAX_SEED, seed), errors),
        deterministic=bool(asked.get("deterministic")),
    )
    _check_image(asked, profile, errors)
    if errors:
        raise InvalidParametersError(errors)
    return parameters


def _text(asked: Mapping[str, Any], name: str, profile: ModelProfile, errors: list[FieldError]) -> str:
    text = asked.get(name)
    if text is None and name == "negative_prompt":
        return DEFAULT_NEGATIVE_PROMPT
    if not isinstance(text, str) or (name == "prompt" and not text.strip()):
        errors.append(FieldError(name, f"must be a text of 1 to {profile.max_prompt_chars} characters"))
        return ""
    if len(text) > profile.max_prompt_chars:
        errors.append(FieldError(name, f"has {len(text)} characters, at most {profile.max_prompt_chars} are legal"))
    if "\0" in text:
        errors.append(FieldError(name, "must not contain the NUL character"))
    if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
        errors.append(FieldError(name, "must be valid Unicode, without lone surrogates"))
    return text


def _size(asked: Mapping[str, Any], profile: ModelProfile, errors: list[FieldError]) -> tuple[int, int]:
    default = profile.sizes[0]
    width, height = asked.get("width"), asked.get("height")
    if width is None and height is None:
        return default
    legal = "offered are " + ", ".join(f"{w}x{h}" for w, h in profile.sizes)
    for name, value in (("width", width), ("height", height)):
        if value is None:
            errors.append(FieldError(name, f"is needed when the other side is given; {legal}"))
        elif value % profile.size_multiple or not profile.min_side <= value:
            multiple = f"must be a multiple of {profile.size_multiple} and at least {profile.min_side}"
            errors.append(FieldError(name, f"{multiple}, not {value}; {legal}"))
    if width is None or height is None:
        return default
    if width * height > profile.max_area:
        area = f"has {width * height} pixels a frame, at most {profile.max_area} are legal"
        errors.append(FieldError("width", f"{width}x{height} {area}; {legal}"))
    return int(width), int(height)


def _frames(asked: Mapping[str, Any], profile: ModelProfile, errors: list[FieldError]) -> int:
    frames = _whole(asked, "num_frames", profile.num_frames, errors)
    if profile.frame_choices and frames not in profile.frame_choices:
        legal = ", ".join(map(str, profile.frame_choices))
        errors.append(FieldError("num_frames", f"must be one of {legal}, not {frames}"))
    elif frames % 4 != 1:
        near = frames - (frames - 1) % 4
        errors.append(FieldError("num_frames", f"must be 4k+1, not {frames}; near are {near} and {near + 4}"))
    return frames


def _whole(asked: Mapping[str, Any], name: str, legal: Range, errors: list[FieldError]) -> int:
    value = asked.get(name)
    if value is None:
        return int(legal.default)
    if not legal.low <= value <= legal.high:
        errors.append(FieldError(name, f"must be from {int(legal.low)} to {int(legal.high)}, not {value}"))
    return int(value)


def _real(asked: Mapping[str, Any], name: str, legal: Range, errors: list[FieldError]) -> float:
    value = asked.get(name)
    if value is None:
        return legal.default
    if not math.isfinite(value) or not legal.low <= value <= legal.high:
        errors.append(FieldError(name, f"must be a number from {legal.low:g} to {legal.high:g}, not {value}"))
    return float(value)


def _second_guidance(asked: Mapping[str, Any], profile: ModelProfile, errors: list[FieldError]) -> float | None:
    value = asked.get("guidance_scale_2")
    if profile.guidance_scale_2 is None:
        if value is not None:
            errors.append(FieldError("guidance_scale_2", f"{profile.model} has one expert; leave the field out"))
        return None
    second = _real(asked, "guidance_scale_2", profile.guidance_scale_2, errors)
    first = asked.get("guidance_scale")
    if first is not None and first <= 1 < second:
        # Without guidance in the first expert the pipelines ignore the second value: two jobs that look different
        # would be the same video.
        if value is not None:
            errors.append(FieldError("guidance_scale_2", "must be 1 when guidance_scale is 1"))
        return 1.0
    return second


def _check_image(asked: Mapping[str, Any], profile: ModelProfile, errors: list[FieldError]) -> None:
    if asked.get("image") is not None and profile.image is ImageInput.REFUSED:
        errors.append(FieldError("image", f"{profile.model} makes videos from text alone; leave the field out"))
    elif asked.get("image") is not None:
        errors.append(FieldError("image", "input images are not served by this version"))
    elif profile.image is ImageInput.REQUIRED:
        errors.append(FieldError("image", f"{profile.model} needs an input image, which this version does not take"))
