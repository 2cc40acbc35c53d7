import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.domain.jobs import (
    ATTEMPT_BUDGET,
    BACKOFF_CAP_S,
    FINAL_ERROR_CODE,
    TERMINAL_STATES,
    TRANSITIONS,
    ErrorClass,
    GiveUp,
    JobState,
    Retry,
    after_failure,
)


def test_every_state_has_its_moves() -> None:
    assert set(TRANSITIONS) == set(JobState)


def test_terminal_states_are_the_four_outcomes() -> None:
    assert set(TERMINAL_STATES) == {JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.EXPIRED}


def test_a_started_job_never_expires() -> None:
    assert JobState.EXPIRED not in TRANSITIONS[JobState.RUNNING]


def test_every_error_class_has_a_budget_and_a_final_code() -> None:
    assert set(ATTEMPT_BUDGET) == set(FINAL_ERROR_CODE) == set(ErrorClass)


@given(st.sampled_from(list(ErrorClass)), st.integers(1, 50), st.integers())
def test_a_class_is_given_up_exactly_when_its_budget_is_spent(error: ErrorClass, failures: int, seed: int) -> None:
    verdict = after_failure(error, failures, random.Random(seed))
    budget = ATTEMPT_BUDGET[error]
    assert isinstance(verdict, GiveUp) == (budget is not None and failures >= budget)


@given(st.sampled_from(list(ErrorClass)), st.integers(1, 1000), st.integers())
def test_backoff_stays_within_its_bounds(error: ErrorClass, failures: int, seed: int) -> None:
    verdict = after_failure(error, failures, random.Random(seed))
    if isinstance(verdict, Retry):
        assert 0 <= verdict.delay_s <= BACKOFF_CAP_S


@pytest.mark.parametrize("error", [ErrorClass.CHILD_CRASH, ErrorClass.WORKER_LOST, ErrorClass.PREEMPTED])
def test_the_first_retry_after_a_lost_process_is_immediate(error: ErrorClass) -> None:
    assert after_failure(error, 1, random.Random(0)) == Retry(0.0)


def test_invalid_input_is_never_tried_again() -> None:
    assert after_failure(ErrorClass.INVALID_INPUT, 1, random.Random(0)) == GiveUp("invalid_input")
