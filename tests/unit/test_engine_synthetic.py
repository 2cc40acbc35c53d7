"""The engine that draws."""

import numpy as np
import pytest

from common.domain.jobs import ErrorClass
from models.pixel_test import expected_from_prompt, read_clip, verdict
from tests.unit.engine_support import GREEN_SQUARE, RED_CIRCLE, Recorder, is_step, parameters, rendered
from worker.engine.base import EngineConfig, MemberCancelled, MemberDecoded, MemberFailed, MemberInterrupted
from worker.engine.synthetic import SyntheticEngine


@pytest.fixture
def engine() -> SyntheticEngine:
    return SyntheticEngine(EngineConfig("synthetic", "tiny-wan2.2-t2v", synthetic_step_s=0.0))


@pytest.mark.parametrize("prompt", [RED_CIRCLE, GREEN_SQUARE, "a yellow triangle moving down on a black background"])
def test_the_clip_shows_what_the_prompt_says(engine: SyntheticEngine, prompt: str) -> None:
    seen = read_clip(rendered(engine, parameters(prompt)).frames())
    expected = expected_from_prompt(prompt)
    assert expected is not None
    assert verdict(expected, seen).ok, seen


def test_every_member_is_decoded_with_all_its_frames(engine: SyntheticEngine) -> None:
    run = rendered(engine, parameters(num_frames=13), parameters(GREEN_SQUARE, num_frames=13))
    assert all(isinstance(outcome, MemberDecoded) for outcome in run.outcomes().values())
    assert run.frames("j0").shape == run.frames("j1").shape == (13, 64, 64, 3)


def test_every_step_is_reported(engine: SyntheticEngine) -> None:
    steps = rendered(engine, parameters()).steps()
    assert [(step.step, step.steps) for step in steps] == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_equal_parameters_give_equal_frames(engine: SyntheticEngine) -> None:
    assert np.array_equal(rendered(engine, parameters()).frames(), rendered(engine, parameters()).frames())


@pytest.mark.parametrize(
    ("marker", "error"),
    [("[oom]", ErrorClass.OOM), ("[nan]", ErrorClass.NAN_OUTPUT), ("[error]", ErrorClass.INTERNAL)],
)
def test_a_marker_fails_its_job_and_spares_its_mate(engine: SyntheticEngine, marker: str, error: ErrorClass) -> None:
    outcomes = rendered(engine, parameters(f"a circle {marker}"), parameters()).outcomes()
    failed = outcomes["j0"]
    assert isinstance(failed, MemberFailed)
    assert failed.error is error
    assert isinstance(outcomes["j1"], MemberDecoded)


def test_a_slow_job_takes_the_time_it_asks_for(engine: SyntheticEngine) -> None:
    decoded = rendered(engine, parameters("[slow=0.05]")).outcomes()["j0"]
    assert isinstance(decoded, MemberDecoded)
    assert decoded.timings_ms["denoise"] >= 4 * 50


def test_a_cancelled_member_is_dropped_and_its_mate_goes_on(engine: SyntheticEngine) -> None:
    recorder = Recorder(cancel=frozenset({"j0"}), when=is_step(2))
    outcomes = rendered(engine, parameters(), parameters(), recorder=recorder).outcomes()
    assert isinstance(outcomes["j0"], MemberCancelled)
    assert isinstance(outcomes["j1"], MemberDecoded)


def test_a_batch_of_cancelled_members_stops(engine: SyntheticEngine) -> None:
    run = rendered(engine, parameters(), recorder=Recorder(cancel=frozenset({"j0"}), when=is_step(2)))
    assert isinstance(run.outcomes()["j0"], MemberCancelled)
    assert len(run.steps()) == 2


def test_an_interrupt_stops_the_batch(engine: SyntheticEngine) -> None:
    run = rendered(engine, parameters(), parameters(), recorder=Recorder(interrupt=True, when=is_step(1)))
    assert all(isinstance(outcome, MemberInterrupted) for outcome in run.outcomes().values())


def test_a_passed_deadline_is_a_timeout(engine: SyntheticEngine) -> None:
    failed = rendered(engine, parameters(), recorder=Recorder(deadline=0.0)).outcomes()["j0"]
    assert isinstance(failed, MemberFailed)
    assert failed.error is ErrorClass.TIMEOUT
