"""Jobs outlive what runs them."""

import operator
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import httpx

from infra.local.stack import LocalStack
from latentmill import Client
from tests.e2e.conftest import LEASE_S, PROMPT, SMALL, SYNTHETIC, TINY, until
from tests.e2e.rows import attempts_of, read

PATIENCE_S = 120.0


def wait_all(client: Client, job_ids: list[str]) -> set[str]:
    return {client.wait(job_id, timeout_s=PATIENCE_S).status for job_id in job_ids}


def running_on(client: Client, stack: LocalStack, job_id: str) -> str:
    """Wait until the job has done a step; the worker that has it."""
    until(lambda: client.get(job_id).progress.step, lambda step: step >= 1)
    return str(attempts_of(stack, job_id)[-1].worker_id)


def test_twenty_jobs_are_shared_by_two_workers(client: Client, stack: LocalStack) -> None:
    jobs = [client.submit(PROMPT, model=TINY, seed=seed).id for seed in range(20)]
    assert wait_all(client, jobs) == {"succeeded"}
    assert {attempts_of(stack, job_id)[0].worker_id for job_id in jobs} == {"worker-1", "worker-2"}
    assert all(len(attempts_of(stack, job_id)) == 1 for job_id in jobs)


def test_a_job_whose_worker_is_killed_finishes_on_the_other(client: Client, stack: LocalStack) -> None:
    job = client.submit("slow [slow=0.6]", **SMALL)
    victim = running_on(client, stack, job.id)
    stack.kill_part(victim)
    assert client.wait(job.id, timeout_s=PATIENCE_S).status == "succeeded"
    first, second = attempts_of(stack, job.id)
    assert (first.worker_id, first.outcome) == (victim, "worker_lost")
    assert (second.worker_id != victim, second.outcome) == (True, "succeeded")
    stack.start_part(victim, SYNTHETIC)


def test_a_job_whose_engine_child_is_killed_runs_again(client: Client, stack: LocalStack) -> None:
    job = client.submit("slow [slow=0.5]", **SMALL)
    worker = running_on(client, stack, job.id)
    os.kill(engine_child(stack, worker), signal.SIGKILL)
    assert client.wait(job.id, timeout_s=PATIENCE_S).status == "succeeded"
    assert [attempt.outcome for attempt in attempts_of(stack, job.id)] == ["child_crash", "succeeded"]


def engine_child(stack: LocalStack, worker: str) -> int:
    pid = stack.pid(worker)
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as children:  # noqa: PTH123
        return int(children.read().split()[0])


def test_a_job_that_kills_its_engine_is_given_up(client: Client, stack: LocalStack) -> None:
    job = client.wait(client.submit("[crash]", **SMALL).id, timeout_s=PATIENCE_S)
    assert job.status == "failed"
    assert job.error is not None
    assert job.error.code == "poisoned"
    assert [attempt.outcome for attempt in attempts_of(stack, job.id)] == ["child_crash"] * 3


def test_a_poisonous_job_does_not_take_its_mates_along(client: Client) -> None:
    prompts = ["one [slow=0.1]", "[crash]", "two [slow=0.1]", "three [slow=0.1]"]
    with ThreadPoolExecutor(len(prompts)) as pool:
        jobs = list(pool.map(lambda prompt: client.submit(prompt, **SMALL).id, prompts))
    outcomes = [client.wait(job_id, timeout_s=PATIENCE_S).status for job_id in jobs]
    assert outcomes == ["succeeded", "failed", "succeeded", "succeeded"]


def test_a_job_that_hangs_its_engine_is_given_up_and_its_mates_finish(client: Client) -> None:
    with ThreadPoolExecutor(3) as pool:
        jobs = list(pool.map(lambda prompt: client.submit(prompt, **SMALL).id, ["[hang]", "one", "two"]))
    ended = [client.wait(job_id, timeout_s=PATIENCE_S) for job_id in jobs]
    assert [job.status for job in ended] == ["failed", "succeeded", "succeeded"]
    assert ended[0].error is not None
    assert ended[0].error.code == "inference_timeout"


def test_an_engine_child_that_dies_while_idle_costs_no_job_an_attempt(client: Client, stack: LocalStack) -> None:
    client.wait(client.submit("quick", **SMALL).id, timeout_s=PATIENCE_S)
    for worker in ("worker-3", "worker-4"):
        os.kill(engine_child(stack, worker), signal.SIGKILL)
    job = client.wait(client.submit("after", **SMALL).id, timeout_s=PATIENCE_S)
    assert [attempt.outcome for attempt in attempts_of(stack, job.id)] == ["succeeded"]


def test_a_queued_job_is_cancelled_at_once(client: Client) -> None:
    job = client.submit("nobody serves this", model="wan2.2-t2v-a14b")
    assert client.cancel(job.id).status == "cancelled"


def test_a_running_job_is_cancelled_within_a_step(client: Client, stack: LocalStack) -> None:
    job = client.submit("slow [slow=1.0]", **SMALL)
    running_on(client, stack, job.id)
    client.cancel(job.id)
    done = client.wait(job.id, timeout_s=PATIENCE_S)
    assert (done.status, done.result) == ("cancelled", None)
    (attempt,) = attempts_of(stack, job.id)
    assert attempt.step < SMALL["num_inference_steps"]


def leave_now(stack: LocalStack, worker: str) -> None:
    """Send two signals, one after the other is noticed: at once they would be one. Returns when the worker is gone."""
    pid = stack.pid(worker)
    assert pid is not None
    os.kill(pid, signal.SIGTERM)
    until(lambda: read(stack, "SELECT accepting FROM workers WHERE id = :id", id=worker)[0].accepting, operator.not_)
    os.kill(pid, signal.SIGTERM)
    until(lambda: stack.pid(worker), lambda alive: alive is None)


def test_a_worker_that_is_told_to_leave_hands_its_job_over_uncharged(client: Client, stack: LocalStack) -> None:
    job = client.submit("slow [slow=0.6]", **SMALL)
    leaving = running_on(client, stack, job.id)
    leave_now(stack, leaving)
    assert client.wait(job.id, timeout_s=PATIENCE_S).status == "succeeded"
    assert [attempt.outcome for attempt in attempts_of(stack, job.id)] == ["preempted", "succeeded"]
    stack.start_part(leaving, SYNTHETIC)


def test_submits_are_accepted_while_the_broker_is_away(client: Client, stack: LocalStack) -> None:
    stack.stop_part("rabbitmq")
    jobs = [client.submit(PROMPT, model=TINY, num_inference_steps=4).id for _ in range(6)]
    stack.start_part("rabbitmq")
    assert wait_all(client, jobs) == {"succeeded"}


def test_submits_go_on_when_one_api_dies(client: Client, stack: LocalStack) -> None:
    stack.kill_part("api-1")
    jobs = [client.submit(f"job {n}", **SMALL).id for n in range(6)]
    stack.start_part("api-1")
    assert wait_all(client, jobs) == {"succeeded"}


def test_a_follower_sees_the_end_across_an_api_restart(client: Client, stack: LocalStack) -> None:
    job = client.submit("slow [slow=0.5]", **SMALL)
    events = client.events(job.id, timeout_s=PATIENCE_S)
    next(events)
    for api in ("api-1", "api-2"):
        stack.stop_part(api)
        stack.start_part(api)
    last = list(events)[-1]
    assert [j.status for j in last.jobs] == ["succeeded"]


def test_without_redis_jobs_run_and_are_followed(client: Client, stack: LocalStack) -> None:
    stack.stop_part("redis")
    try:
        job = client.submit("slow [slow=0.1]", **SMALL)
        assert client.wait(job.id, timeout_s=PATIENCE_S).status == "succeeded"
    finally:
        stack.start_part("redis")


def test_without_postgres_submits_say_when_to_come_back(http: httpx.Client, stack: LocalStack) -> None:
    stack.stop_part("postgres")
    try:
        answer = http.post("/v1/jobs", json={"prompt": "x", **SMALL})
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "database_unavailable"
        assert int(answer.headers["Retry-After"]) > 0
    finally:
        stack.start_part("postgres")


def test_a_job_survives_an_outage_of_the_job_store(client: Client, stack: LocalStack) -> None:
    job = client.submit("slow [slow=0.5]", **SMALL)
    running_on(client, stack, job.id)
    stack.stop_part("postgres")
    longer_than_a_lease = time.monotonic() + LEASE_S + 1
    until(time.monotonic, lambda now: now > longer_than_a_lease)
    stack.start_part("postgres")
    assert client.wait(job.id, timeout_s=PATIENCE_S).status == "succeeded"
    assert [attempt.outcome for attempt in attempts_of(stack, job.id)] == ["succeeded"]


def test_a_result_waits_for_a_bucket_that_is_away(client: Client, stack: LocalStack) -> None:
    job = client.submit("slow [slow=0.2]", **SMALL)
    running_on(client, stack, job.id)
    stack.stop_part("s3")
    until(lambda: client.get(job.id).phase, lambda phase: phase == "upload")
    stack.start_part("s3")
    assert client.wait(job.id, timeout_s=PATIENCE_S).status == "succeeded"
    assert len(attempts_of(stack, job.id)) == 1


def upload_without_a_bucket(client: Client, stack: LocalStack) -> tuple[str, str]:
    """A job whose video waits for a bucket that is away, and the worker that has it."""
    job = client.submit("slow [slow=0.2]", **SMALL)
    worker = running_on(client, stack, job.id)
    stack.stop_part("s3")
    until(lambda: client.get(job.id).phase, lambda phase: phase == "upload")
    return job.id, worker


def test_a_job_is_cancelled_while_its_upload_waits(client: Client, stack: LocalStack) -> None:
    try:
        job_id, _ = upload_without_a_bucket(client, stack)
        client.cancel(job_id)
        assert client.wait(job_id, timeout_s=PATIENCE_S).status == "cancelled"
    finally:
        stack.start_part("s3")


def test_a_worker_leaves_although_the_bucket_is_away(client: Client, stack: LocalStack) -> None:
    job_id, leaving = upload_without_a_bucket(client, stack)
    leave_now(stack, leaving)
    stack.start_part("s3")
    assert client.wait(job_id, timeout_s=PATIENCE_S).status == "succeeded"
    assert [attempt.outcome for attempt in attempts_of(stack, job_id)] == ["preempted", "succeeded"]
    stack.start_part(leaving, SYNTHETIC)
