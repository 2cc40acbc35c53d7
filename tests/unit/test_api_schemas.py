import json
from typing import Any

import pytest

from api.schemas import parameters_of, read_job_request, read_socket_message
from common.domain.errors import InvalidParametersError, LatentmillError
from common.domain.parameters import JobParameters

LEGAL = {"model": "tiny-wan2.2-t2v", "prompt": "a red circle moving right"}

BAD_FIELDS = [
    ("model", "no-such-model", "model"),
    ("model", 7, "model"),
    ("model", None, "model"),
    ("prompt", "", "prompt"),
    ("prompt", "  ", "prompt"),
    ("prompt", "x" * 2001, "prompt"),
    ("prompt", "a\0b", "prompt"),
    ("prompt", 7, "prompt"),
    ("prompt", ["a"], "prompt"),
    ("negative_prompt", 7, "negative_prompt"),
    ("negative_prompt", "x" * 2001, "negative_prompt"),
    ("size", "64", "size"),
    ("size", "64X64", "size"),
    ("size", "64x64\n", "size"),
    ("size", "0x0", "size"),
    ("size", "65x64", "size"),
    ("size", "999999x64", "size"),
    ("size", 64, "size"),
    ("width", 64, "height"),
    ("height", 64, "width"),
    ("width", "64", "width"),
    ("num_frames", 10, "num_frames"),
    ("num_frames", 9.0, "num_frames"),
    ("num_frames", "9", "num_frames"),
    ("num_frames", 10**30, "num_frames"),
    ("num_frames", True, "num_frames"),
    ("seconds", 0, "seconds"),
    ("seconds", 60, "seconds"),
    ("seconds", "1", "seconds"),
    ("fps", 0, "fps"),
    ("fps", 61, "fps"),
    ("fps", 8.5, "fps"),
    ("num_inference_steps", 0, "num_inference_steps"),
    ("num_inference_steps", 13, "num_inference_steps"),
    ("num_inference_steps", "10", "num_inference_steps"),
    ("guidance_scale", 0.5, "guidance_scale"),
    ("guidance_scale", "4", "guidance_scale"),
    ("guidance_scale", float("nan"), "guidance_scale"),
    ("guidance_scale", float("inf"), "guidance_scale"),
    ("guidance_scale", 10**400, "guidance_scale"),
    ("guidance_scale_2", 99, "guidance_scale_2"),
    ("guidance_scale_2", float("nan"), "guidance_scale_2"),
    ("flow_shift", 0, "flow_shift"),
    ("flow_shift", float("-inf"), "flow_shift"),
    ("seed", -1, "seed"),
    ("seed", 2**63, "seed"),
    ("seed", 10**40, "seed"),
    ("seed", 1.5, "seed"),
    ("seed", "1", "seed"),
    ("deterministic", 1, "deterministic"),
    ("deterministic", "true", "deterministic"),
    ("priority", 10, "priority"),
    ("priority", -1, "priority"),
    ("priority", "high", "priority"),
    ("queue_deadline_s", 0, "queue_deadline_s"),
    ("queue_deadline_s", -1, "queue_deadline_s"),
    ("queue_deadline_s", float("inf"), "queue_deadline_s"),
    ("queue_deadline_s", "60", "queue_deadline_s"),
    ("metadata", "a", "metadata"),
    ("metadata", {"a": 1}, "metadata.a"),
    ("metadata", {"": "a"}, "metadata"),
    ("metadata", {"k" * 65: "a"}, "metadata"),
    ("metadata", {"a": "v" * 513}, "metadata"),
    ("metadata", {"a": "\0"}, "metadata"),
    ("metadata", {str(n): "" for n in range(17)}, "metadata"),
    ("image", {"url": "https://example.org/a.png"}, "image"),
    ("webhook", {}, "webhook"),
    ("Prompt", "x", "Prompt"),
]


def ask(**fields: Any) -> JobParameters:
    return parameters_of(read_job_request(json.dumps({**LEGAL, **fields}).encode()), 1)


def refused_fields(**fields: Any) -> list[str]:
    with pytest.raises(InvalidParametersError) as refused:
        ask(**fields)
    return [error.field for error in refused.value.errors]


@pytest.mark.parametrize(("field", "value", "named"), BAD_FIELDS, ids=lambda value: str(value)[:30])
def test_a_bad_value_is_refused_with_the_name_of_its_field(field: str, value: Any, named: str) -> None:
    assert named in refused_fields(**{field: value})


@pytest.mark.parametrize("field", ["model", "prompt"])
def test_a_missing_field_is_named(field: str) -> None:
    body = {name: value for name, value in LEGAL.items() if name != field}
    with pytest.raises(InvalidParametersError) as refused:
        read_job_request(json.dumps(body).encode())
    assert [(error.field, error.message) for error in refused.value.errors] == [(field, "is required")]


def test_every_bad_field_is_named_at_once() -> None:
    assert set(refused_fields(seed="1", fps="8", extra=1)) == {"seed", "fps", "extra"}


def test_ten_thousand_unknown_fields_give_a_short_answer() -> None:
    assert len(refused_fields(**{"x" * 1000 + str(n): 1 for n in range(10_000)})) <= 20


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"\xff", b'{"prompt": "\\ud800"}', b"[" * 10_000, b'{"a": 1,}'],
    ids=lambda body: repr(body[:20]),
)
def test_what_is_not_json_is_told_apart(body: bytes) -> None:
    with pytest.raises(LatentmillError) as refused:
        read_job_request(body)
    assert refused.value.kind.code == "invalid_json"


@pytest.mark.parametrize("body", [b"null", b"[]", b'"text"', b"7"])
def test_a_body_that_is_no_object_is_named_body(body: bytes) -> None:
    with pytest.raises(InvalidParametersError) as refused:
        read_job_request(body)
    assert refused.value.errors[0].field == "body"


def test_null_means_the_default() -> None:
    nulls = dict.fromkeys(("negative_prompt", "size", "seconds", "fps", "seed", "deterministic", "guidance_scale"))
    assert ask(**nulls) == ask()


@pytest.mark.parametrize("sides", [{"width": 64}, {"height": 64}, {"width": 64, "height": 64}, {"width": 0}])
def test_size_excludes_width_and_height(sides: dict[str, int]) -> None:
    assert refused_fields(size="64x64", **sides) == ["size"]


def test_size_is_width_times_height() -> None:
    asked = ask(model="wan2.2-t2v-a14b", size="1280x720")
    assert (asked.width, asked.height) == (1280, 720)


def test_seconds_exclude_num_frames() -> None:
    assert refused_fields(seconds=1, num_frames=9) == ["seconds"]


@pytest.mark.parametrize(
    ("seconds", "fps", "frames"), [(5, None, 81), (5.0625, None, 81), (3, None, 49), (2, 24, 49), (1.1, 10, 13)]
)
def test_seconds_give_the_nearest_legal_frames(seconds: float, fps: int | None, frames: int) -> None:
    assert ask(model="wan2.2-t2v-a14b", seconds=seconds, fps=fps).num_frames == frames


def test_the_seed_of_the_request_wins() -> None:
    assert (ask(seed=0).seed, ask().seed) == (0, 1)


def test_a_whole_number_is_a_legal_real() -> None:
    assert ask(guidance_scale=5).guidance_scale == 5.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "[]",
        "{}",
        '{"type":"bogus"}',
        '{"type":"subscribe","job_ids":"all"}',
        '{"type":"cancel"}',
        '{"type":"ping","t":1}',
    ],
)
def test_a_message_outside_the_protocol_is_refused(text: str) -> None:
    with pytest.raises(LatentmillError):
        read_socket_message(text)


def test_a_subscription_is_read() -> None:
    message = read_socket_message('{"type":"subscribe","job_ids":["job_1"]}')
    assert message.model_dump() == {"type": "subscribe", "job_ids": ["job_1"], "all": False}
