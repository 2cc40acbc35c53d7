"""More apis are found by nginx; fewer workers lose nothing."""

from latentmill import Client
from tests.compose.conftest import PROMPT
from tests.compose.metrics import metric
from tests.compose.rows import running_hosts, stored
from tests.compose.stack import ComposeStack, Container
from tests.compose.waiting import all_succeed, submit, until

SLOW = f"{PROMPT} [slow=0.2]"


def _submits_taken_by(api: Container) -> float:
    return metric(api, "latentmill_jobs_submitted_total")


def test_a_new_api_gets_its_share_after_a_reload(synthetic_stack: ComposeStack, client: Client) -> None:
    synthetic_stack.scale["api"] = 3
    synthetic_stack.up()
    synthetic_stack.compose("kill", "--signal=HUP", "nginx")
    apis = synthetic_stack.containers("api")
    assert len(apis) == 3
    before = [_submits_taken_by(api) for api in apis]
    jobs: list[str] = []

    def all_took_some() -> bool:
        jobs.extend(submit(client, 12, PROMPT))
        return all(_submits_taken_by(api) > count for api, count in zip(apis, before, strict=True))

    until(all_took_some, bool)
    all_succeed(client, jobs)


def test_scaling_down_to_one_worker_under_load_loses_nothing(synthetic_stack: ComposeStack, client: Client) -> None:
    workers = {worker.hostname for worker in synthetic_stack.containers("worker")}
    jobs = submit(client, 48, SLOW)
    until(lambda: running_hosts(synthetic_stack, jobs), lambda hosts: hosts == workers)
    synthetic_stack.scale["worker"] = 1
    with synthetic_stack.timed("--scale worker=1 under load"):
        synthetic_stack.up()
    assert len(synthetic_stack.containers("worker")) == 1
    all_succeed(client, jobs)
    found = stored(synthetic_stack, jobs)
    assert {job_id: job for job_id, job in found.items() if not job.is_done_once()} == {}
    assert {outcome for job in found.values() for outcome in job.outcomes} == {"succeeded"}
