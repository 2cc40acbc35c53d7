"""A thousand submits within a second from a hundred keys, each followed until it is done."""

import json
from collections import Counter

import pytest

from tests.compose.burst import Burst, run
from tests.compose.conftest import PROMPT, TINY
from tests.compose.programs import MAKE_KEYS
from tests.compose.rows import stored
from tests.compose.stack import ComposeStack

JOBS = 1000
ANSWERED_WITHIN_S = 10.0
# How long a late answer is waited for, so that its lateness is known.
PATIENCE_S = 60.0
DONE_WITHIN_S = 300.0


@pytest.fixture(scope="module")
def burst(synthetic_stack: ComposeStack) -> Burst:
    keys = json.loads(synthetic_stack.python("api", MAKE_KEYS))
    body = {"model": TINY, "prompt": PROMPT, "num_inference_steps": 4}
    bodies = [body | {"seed": seed} for seed in range(JOBS)]
    done = run(synthetic_stack.port, keys, bodies, PATIENCE_S, DONE_WITHIN_S)
    _note(synthetic_stack, done)
    return done


def _note(stack: ComposeStack, burst: Burst) -> None:
    seconds = sorted(answer.seconds for answer in burst.answers)
    p50, p95, last = (seconds[int((len(seconds) - 1) * part)] for part in (0.5, 0.95, 1.0))
    stack.note(f"burst: {JOBS} submits sent within", f"{burst.send_window_s:.2f} s")
    stack.note("burst: answers p50, p95, max", f"{p50:.2f} s, {p95:.2f} s, {last:.2f} s")
    stack.note(f"burst: all followed and done, {len(burst.followed)} sockets, after", f"{burst.done_after_s:.1f} s")


def test_a_thousand_submits_go_out_within_a_second(burst: Burst) -> None:
    assert len(burst.answers) == JOBS
    assert burst.send_window_s <= 1.0


def test_each_is_accepted(burst: Burst) -> None:
    assert Counter(answer.status for answer in burst.answers) == {202: JOBS}


def test_each_is_answered_within_ten_seconds(burst: Burst) -> None:
    assert max(answer.seconds for answer in burst.answers) <= ANSWERED_WITHIN_S


def test_each_is_followed_by_its_own_socket_until_it_is_done(burst: Burst) -> None:
    assert Counter((job.status, job.error) for job in burst.followed) == {("succeeded", ""): JOBS}


def test_each_is_done_once(burst: Burst, stack: ComposeStack) -> None:
    found = stored(stack, [job.job_id for job in burst.followed])
    assert len(found) == JOBS
    assert {job_id: job for job_id, job in found.items() if not job.is_done_once()} == {}
