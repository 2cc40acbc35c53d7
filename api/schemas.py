"""What clients send, checked strictly: unknown fields, numbers as strings and NaN are refused by name."""

import math
import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator

from common.domain.errors import INVALID_JSON, FieldError, InvalidParametersError, LatentmillError
from common.domain.parameters import JobParameters, resolve
from common.domain.profiles import PROFILES

DEFAULT_PRIORITY = 5
# The limits OpenAI's API set for the same field: enough for ids and labels, too little for documents.
MAX_METADATA_KEYS = 16
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_VALUE_CHARS = 512
# A hostile body can hold ten thousand wrong fields with names of any length; the answer names the first of them.
_MAX_ERRORS = 20
_MAX_FIELD_NAME_CHARS = 100
_PARAMETERS = frozenset(
    {
        "model", "prompt", "negative_prompt", "width", "height", "num_frames", "fps", "num_inference_steps",
        "guidance_scale", "guidance_scale_2", "flow_shift", "seed", "deterministic", "image",
    }
)  # fmt: skip


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class JobRequest(_Strict):
    """A video to make. Fields that are left out or null take the defaults of the model (see /v1/models)."""

    model: str = Field(description="One of the models of /v1/models.", examples=["tiny-wan2.2-t2v"])
    prompt: str = Field(description="What the video shows.", examples=["a red circle moving right"])
    negative_prompt: str | None = Field(None, description="What it shall not show. Null: a list of usual defects.")
    size: str | None = Field(
        None, pattern=r"^[0-9]{1,5}x[0-9]{1,5}$", description="Width x height in pixels; instead of width and height."
    )
    width: int | None = Field(None, description="Pixels; needs height.")
    height: int | None = Field(None, description="Pixels; needs width.")
    num_frames: int | None = Field(None, description="Frames, 4k+1.")
    seconds: float | None = Field(
        None,
        gt=0,
        le=3600,
        description="Instead of num_frames: the 4k+1 frames whose duration is nearest are made; params names them.",
    )
    fps: int | None = Field(None, description="Frames a second, 1 to 60.")
    num_inference_steps: int | None = Field(None, description="Denoising steps.")
    guidance_scale: float | None = Field(None, description="Guidance of the high-noise expert.")
    guidance_scale_2: float | None = Field(None, description="Guidance of the low-noise expert.")
    flow_shift: float | None = Field(None, description="Shift of the noise schedule.")
    seed: int | None = Field(None, description="0 to 2^63-1. Null: one is drawn now, stored and shown in params.")
    deterministic: bool | None = Field(None, description="Never share a batch, so that a rerun gives the same bytes.")
    priority: int | None = Field(None, ge=0, le=9, description="0 to 9, higher first. Default 5.")
    queue_deadline_s: float | None = Field(None, gt=0, description="Seconds until a job that never started expires.")
    metadata: dict[str, str] | None = Field(None, description="Up to 16 labels of one's own, returned as they are.")
    image: Any = Field(None, description="An input image; refused by this version.")

    @field_validator("metadata")
    @classmethod
    def _check_metadata(cls, labels: dict[str, str] | None) -> dict[str, str] | None:
        labels = labels or {}
        if len(labels) > MAX_METADATA_KEYS:
            msg = f"must have at most {MAX_METADATA_KEYS} keys, not {len(labels)}"
            raise ValueError(msg)
        for key, value in labels.items():
            if not 1 <= len(key) <= MAX_METADATA_KEY_CHARS or len(value) > MAX_METADATA_VALUE_CHARS:
                msg = f"keys have 1 to {MAX_METADATA_KEY_CHARS} characters, values at most {MAX_METADATA_VALUE_CHARS}"
                raise ValueError(msg)
            if "\0" in key or "\0" in value:
                msg = "must not contain the NUL character"
                raise ValueError(msg)
        return labels


class Subscribe(_Strict):
    """Follow some jobs, or with `all` every job of the tenant."""

    type: Literal["subscribe"]
    job_ids: list[str] = Field(default_factory=list)
    all: bool = False


class Unsubscribe(_Strict):
    """Follow some jobs no longer."""

    type: Literal["unsubscribe"]
    job_ids: list[str]


class Cancel(_Strict):
    """Cancel a job."""

    type: Literal["cancel"]
    job_id: str


class Ping(_Strict):
    """Ask for a pong."""

    type: Literal["ping"]


SocketMessage = Subscribe | Unsubscribe | Cancel | Ping
_SOCKET_MESSAGE: TypeAdapter[SocketMessage] = TypeAdapter(Annotated[SocketMessage, Field(discriminator="type")])


def read_job_request(body: bytes) -> JobRequest:
    """The request in a body. Raises InvalidParametersError naming the bad fields, or LatentmillError (invalid_json)."""
    try:
        return JobRequest.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(error) from None


def read_socket_message(text: str) -> SocketMessage:
    """One frame of a client. Raises LatentmillError for anything that is not in the protocol."""
    try:
        return _SOCKET_MESSAGE.validate_json(text)
    except ValidationError as error:
        raise _refusal(error) from None


def parameters_of(request: JobRequest, seed: int) -> JobParameters:
    """The parameters of the job; `seed` is used when the request names none. Raises InvalidParametersError."""
    conflicts = [
        FieldError(name, f"must be left out when {other} is given")
        for name, other, both in (
            ("size", "width or height", request.size is not None and (request.width, request.height) != (None, None)),
            ("seconds", "num_frames", request.seconds is not None and request.num_frames is not None),
        )
        if both
    ]
    if conflicts:
        raise InvalidParametersError(conflicts)
    asked = request.model_dump(include=set(_PARAMETERS))
    if request.size is not None:
        asked["width"], asked["height"] = map(int, request.size.split("x"))
    if request.seconds is not None:
        asked["num_frames"] = _nearest_frames(request)
    try:
        return resolve(asked, seed)
    except InvalidParametersError as error:
        raise InvalidParametersError(list(_as_asked(request, asked, error.errors))) from None


def _nearest_frames(request: JobRequest) -> int | None:
    """The 4k+1 frames (the VAE's temporal stride is 4) whose duration is nearest, the longer of two as near."""
    profile = PROFILES.get(request.model)
    if profile is None or request.seconds is None:
        return None
    fps = profile.fps if request.fps is None else request.fps
    return 4 * math.floor((request.seconds * fps - 1) / 4 + 0.5) + 1


def _as_asked(request: JobRequest, asked: dict[str, Any], errors: Iterable[FieldError]) -> Iterable[FieldError]:
    """The errors by the names of the fields that the client used."""
    for error in errors:
        if error.field in ("width", "height") and request.size is not None:
            yield FieldError("size", error.message)
        elif error.field == "num_frames" and request.seconds is not None:
            yield FieldError("seconds", f"gives {asked['num_frames']} frames, which {error.message}")
        else:
            yield error


def _refusal(error: ValidationError) -> LatentmillError:
    details = error.errors(include_url=False, include_context=False, include_input=False)
    if details[0]["type"] == "json_invalid":
        return LatentmillError(details[0]["msg"], kind=INVALID_JSON)
    return InvalidParametersError([_field_error(dict(detail)) for detail in details[:_MAX_ERRORS]])


def _field_error(detail: dict[str, Any]) -> FieldError:
    name = ".".join(str(part) for part in detail["loc"])[:_MAX_FIELD_NAME_CHARS] or "body"
    if detail["type"] == "missing":
        return FieldError(name, "is required")
    if detail["type"] == "extra_forbidden":
        return FieldError(name, "is not a known field")
    return FieldError(name, re.sub(r"^(Input |Value error, )", "", str(detail["msg"])))
