"""Three workers share the work, and jobs outlive what is killed or cut off in the middle."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from latentmill import Client
from tests.compose.conftest import PROMPT, WORKERS
from tests.compose.metrics import metric
from tests.compose.rows import leader, running_hosts, states, stored
from tests.compose.stack import ComposeStack, Container, docker
from tests.compose.waiting import all_succeed, submit, until

STEPS = 10
# Two seconds a batch: long enough to be met in the middle.
SLOW = f"{PROMPT} [slow=0.2]"


@pytest.fixture(scope="module", autouse=True)
def stack_of_three_workers(synthetic_stack: ComposeStack) -> ComposeStack:
    return synthetic_stack


@pytest.fixture
def repaired(stack: ComposeStack) -> Iterator[None]:
    """What a test killed is started again: Docker leaves alone what was killed by hand."""
    yield
    stack.up()


def _done_once(stack: ComposeStack, job_ids: Sequence[str]) -> None:
    found = stored(stack, job_ids)
    assert len(found) == len(job_ids)
    assert {job_id: job for job_id, job in found.items() if not job.is_done_once()} == {}


def test_sixty_jobs_are_shared_by_three_workers(client: Client, stack: ComposeStack) -> None:
    with stack.timed(f"60 synthetic jobs on {WORKERS} workers"):
        jobs = submit(client, 60, PROMPT)
        all_succeed(client, jobs)
    _done_once(stack, jobs)
    attempts = [attempt for job in stored(stack, jobs).values() for attempt in job.attempts]
    assert len(attempts) == 60
    taken = {host: sum(attempt.host == host for attempt in attempts) for host in {attempt.host for attempt in attempts}}
    assert set(taken) == {worker.hostname for worker in stack.containers("worker")}
    stack.note("jobs that each of them took", ", ".join(map(str, sorted(taken.values()))))


@pytest.mark.usefixtures("repaired")
def test_jobs_of_a_killed_worker_finish_on_the_others(client: Client, stack: ComposeStack) -> None:
    jobs = submit(client, 24, SLOW)
    victim = min(until(lambda: running_hosts(stack, jobs, step=STEPS // 2), bool))
    docker("kill", victim)
    with stack.timed("after the kill of a worker, all jobs done"):
        all_succeed(client, jobs)
    _done_once(stack, jobs)
    lost = [
        attempt for job in stored(stack, jobs).values() for attempt in job.attempts if attempt.outcome == "worker_lost"
    ]
    assert {attempt.host for attempt in lost} == {victim}


def _follow(stack: ComposeStack, job_ids: Sequence[str]) -> None:
    with Client(stack.public_url, stack.api_key) as follower:
        all_succeed(follower, job_ids)


def _api_with_a_stream(stack: ComposeStack) -> Container | None:
    return next((api for api in stack.containers("api") if metric(api, "latentmill_progress_streams")), None)


@pytest.mark.usefixtures("repaired")
def test_submits_and_followers_go_on_when_an_api_is_killed(client: Client, stack: ComposeStack) -> None:
    before = submit(client, 48, SLOW)
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(_follow, stack, before)
        victim = until(lambda: _api_with_a_stream(stack), bool)
        assert victim is not None
        docker("kill", victim.id)
        began = time.monotonic()
        after = submit(client, 12, PROMPT)
        stack.note("12 submits after the kill of an api", f"{time.monotonic() - began:.1f} s")
        following.result()
    all_succeed(client, after)
    _done_once(stack, [*before, *after])


@pytest.mark.usefixtures("repaired")
def test_the_other_dispatcher_takes_over_when_the_leading_one_is_killed(client: Client, stack: ComposeStack) -> None:
    # More than the window: without a leader the rest would never be released.
    jobs = submit(client, 48, SLOW)
    killed = leader(stack)
    docker("kill", killed)
    with stack.timed("after the kill of the leading dispatcher, another leads"):
        until(lambda: leader(stack), lambda host: host != killed)
    all_succeed(client, jobs)
    _done_once(stack, jobs)


@contextmanager
def _cut_off(stack: ComposeStack, container: Container, network: str, alias: str) -> Iterator[None]:
    docker("network", "disconnect", network, container.id)
    try:
        yield
    finally:
        docker("network", "connect", f"--alias={alias}", network, container.id)


def _is_stuck(seen: list[str]) -> bool:
    return "running" not in seen and "queued" in seen


def test_jobs_are_accepted_while_the_broker_is_cut_off_and_finish_later(client: Client, stack: ComposeStack) -> None:
    before = submit(client, 48, SLOW)
    until(lambda: running_hosts(stack, before), bool)
    (broker,) = stack.containers("rabbitmq")
    with _cut_off(stack, broker, stack.network("data"), "rabbitmq"):
        began = time.monotonic()
        during = submit(client, 12, PROMPT)
        stack.note("12 submits while the broker is cut off", f"{time.monotonic() - began:.1f} s")
        # What the workers have got is done, and the rest has no way to them.
        until(lambda: states(stack, [*before, *during]), _is_stuck)
    with stack.timed("after the broker's return, all jobs done"):
        all_succeed(client, [*before, *during])
    _done_once(stack, [*before, *during])
