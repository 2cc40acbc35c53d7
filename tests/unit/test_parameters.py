from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.domain.errors import InvalidParametersError
from common.domain.ids import new_id
from common.domain.parameters import MAX_SEED, JobParameters, resolve
from common.domain.profiles import PROFILES

TINY = {"model": "tiny-wan2.2-t2v", "prompt": "a red circle"}


def fields_of(asked: dict[str, Any]) -> set[str]:
    with pytest.raises(InvalidParametersError) as refused:
        resolve(asked, seed=1)
    return {error.field for error in refused.value.errors}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", "wan3"),
        ("prompt", ""),
        ("prompt", "   "),
        ("prompt", None),
        ("prompt", "x" * 2001),
        ("prompt", "a\0b"),
        ("prompt", "a\ud800b"),
        ("negative_prompt", "x" * 2001),
        ("num_frames", 10),
        ("num_frames", 5),
        ("num_frames", 21),
        ("fps", 0),
        ("fps", 61),
        ("num_inference_steps", 0),
        ("num_inference_steps", 13),
        ("guidance_scale", 0.5),
        ("guidance_scale", float("nan")),
        ("guidance_scale", float("inf")),
        ("guidance_scale_2", 16.0),
        ("flow_shift", 0.0),
        ("seed", -1),
        ("seed", MAX_SEED + 1),
        ("image", {"data": "x"}),
    ],
)
def test_a_bad_value_is_refused_by_its_name(field: str, value: object) -> None:
    assert fields_of({**TINY, field: value}) == {field}


def test_a_size_off_the_grid_names_both_sides() -> None:
    assert fields_of({**TINY, "width": 63, "height": 63}) == {"width", "height"}


def test_one_side_alone_is_refused() -> None:
    assert fields_of({**TINY, "width": 64}) == {"height"}


def test_a_size_over_the_area_is_refused() -> None:
    assert fields_of({**TINY, "width": 128, "height": 64}) == {"width"}


def test_all_bad_fields_are_named_at_once() -> None:
    assert fields_of({**TINY, "prompt": "", "num_frames": 10, "seed": -1}) == {"prompt", "num_frames", "seed"}


def test_an_image_model_says_that_it_needs_an_image() -> None:
    assert fields_of({"model": "tiny-wan2.2-i2v", "prompt": "a circle"}) == {"image"}


def test_a_model_with_one_expert_refuses_a_second_guidance() -> None:
    assert fields_of({"model": "wan2.2-ti2v-5b", "prompt": "x", "guidance_scale_2": 3.0}) == {"guidance_scale_2"}


def test_guidance_off_in_the_first_expert_cannot_be_on_in_the_second() -> None:
    assert fields_of({**TINY, "guidance_scale": 1.0, "guidance_scale_2": 3.0}) == {"guidance_scale_2"}


@pytest.mark.parametrize("model", [name for name, profile in PROFILES.items() if profile.image != "required"])
def test_the_defaults_of_a_profile_are_legal(model: str) -> None:
    profile = PROFILES[model]
    parameters = resolve({"model": model, "prompt": "x"}, seed=7)
    assert (parameters.num_frames, parameters.fps) == (profile.num_frames.default, profile.fps)


def test_what_was_asked_is_what_is_run() -> None:
    asked = {**TINY, "num_frames": 17, "num_inference_steps": 4, "guidance_scale": 2.5, "seed": 99, "fps": 12}
    parameters = resolve(asked, seed=1).as_dict()
    assert {name: parameters[name] for name in asked} == asked


def test_a_missing_seed_takes_the_drawn_one() -> None:
    assert resolve(TINY, seed=42).seed == 42


@given(st.text(min_size=1).filter(lambda text: text.strip() and "\0" not in text), st.integers(0, MAX_SEED))
def test_parameters_survive_storage(prompt: str, seed: int) -> None:
    parameters = resolve({**TINY, "prompt": prompt[:2000]}, seed) if prompt[:2000].strip() else resolve(TINY, seed)
    assert JobParameters.from_dict(parameters.as_dict()) == parameters


def test_prompt_and_seed_do_not_split_a_batch() -> None:
    first, second = resolve(TINY, 1), resolve({**TINY, "prompt": "a blue square", "fps": 4}, 2)
    assert first.batch_key(new_id()) == second.batch_key(new_id())


@pytest.mark.parametrize("change", [{"num_frames": 13}, {"num_inference_steps": 5}, {"guidance_scale": 2.0}])
def test_what_the_pipeline_shares_splits_a_batch(change: dict[str, object]) -> None:
    assert resolve(TINY, 1).batch_key(new_id()) != resolve({**TINY, **change}, 1).batch_key(new_id())


def test_a_deterministic_job_shares_with_nobody() -> None:
    alone = resolve({**TINY, "deterministic": True}, 1)
    assert alone.batch_key(new_id()) != alone.batch_key(new_id())
