"""More work than the farm can do (F58, F59)."""

import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import httpx

from tests.faults.clients import Caller
from tests.faults.farm import Farm, until
from tests.faults.fault import fault, require

STEP_S = 0.2


@fault("F58", "a tenant with 10,000 queued jobs, then a newcomer with one", "I2 I3 I9", short=True)
def hog_and_newcomer(farm: Farm) -> str:
    """A service time is how long a batch of the hog's jobs keeps a worker."""
    count = 10_000 if farm.thorough else 2_000
    hog = farm.caller(farm.make_key("hog"))
    newcomer = farm.caller(farm.make_key("newcomer"))
    _submit_backlog(farm, hog, count)
    until(
        lambda: farm.sql(
            "SELECT 1 FROM attempts a JOIN jobs j ON j.id = a.job_id WHERE a.outcome = 'succeeded' AND j.priority = 3"
        ),
        bool,
        60,
    )
    began = time.monotonic()
    job = newcomer.submit(f"newcomer [slow={STEP_S}]")
    until(lambda: farm.row(job).state, lambda state: state != "queued", 60, "the newcomer's start")
    waited = time.monotonic() - began
    service_s = _service_time(farm)
    require(waited <= 2 * service_s, f"it waited {waited:.1f} s, a service time is {service_s:.1f} s")
    other = newcomer.http.get(f"/v1/jobs/{_any_of(farm, 'hog')}")
    require(other.status_code == httpx.codes.NOT_FOUND, f"another tenant's job was answered {other.status_code}")
    farm.await_done([job])
    _drop_backlog(farm)
    return f"{count} queued, it waited {waited:.1f} s, a service time is {service_s:.1f} s"


@fault("F59", "submits at fifty times the capacity", within_s=150)
def thundering_submits(farm: Farm) -> str:
    """Ten jobs a second are what two workers do of these; five hundred submits come within a second."""
    count = 1500 if farm.thorough else 400
    began = time.monotonic()
    with ThreadPoolExecutor(100) as pool:
        answers = list(pool.map(lambda n: _timed(farm.client, n), range(count)))
    took = time.monotonic() - began
    statuses = {status for status, _, _ in answers}
    require(statuses <= {202, 429, 503}, f"answers {statuses}")
    require(all(after for status, _, after in answers if status != 202), "a refusal without Retry-After")
    seconds = sorted(seconds for status, seconds, _ in answers if status == 202)
    p99 = seconds[int(0.99 * (len(seconds) - 1))]
    require(p99 < 5, f"p99 of the accepted is {p99:.2f} s")
    jobs = farm.log.since(began)
    farm.await_done(jobs, within_s=150)
    return f"{count} within {took:.1f} s: {len(seconds)} taken (p99 {p99:.2f} s, median {statistics.median(seconds):.2f} s)"


def _timed(client: Caller, number: int) -> tuple[int, float, str | None]:
    began = time.monotonic()
    answer = client.post(f"crowd {number} [slow=0]", num_inference_steps=1)
    return answer.status_code, time.monotonic() - began, answer.headers.get("Retry-After")


def _submit_backlog(farm: Farm, hog: Caller, count: int) -> None:
    """Submit through the api, in parallel. These jobs are marked by their priority and not followed further."""
    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda n: hog.post(f"hog {n} [slow={STEP_S}]", priority=3).status_code, range(count)))
    require(set(answers) == {202}, f"the hog's submits were answered {set(answers)}")


def _service_time(farm: Farm) -> float:
    took = "SELECT avg(extract(epoch FROM ended_at - started_at))::float AS seconds FROM attempts"
    recent = "WHERE outcome = 'succeeded' AND ended_at > now() - interval '60 seconds'"
    return float(farm.sql(f"{took} {recent}")[0].seconds)


def _any_of(farm: Farm, tenant: str) -> str:
    row = farm.sql("SELECT j.id FROM jobs j JOIN tenants t ON t.id = j.tenant_id WHERE t.name = %s LIMIT 1", tenant)[0]
    return f"job_{row.id.hex}"


def _drop_backlog(farm: Farm) -> None:
    """Cancel what is left of the hog's jobs, all at once, and forget them: nobody waits for 10,000 videos."""
    farm.sql(
        "UPDATE jobs SET cancel_requested_at = now(), state = CASE state WHEN 'queued' THEN 'cancelled' ELSE state END,"
        " finished_at = CASE state WHEN 'queued' THEN now() END"
        " WHERE state IN ('queued', 'running') AND priority = 3"
    )
    until(lambda: farm.sql("SELECT 1 FROM jobs WHERE priority = 3 AND state = 'running'"), lambda rows: not rows, 30)
    hogs = {f"job_{row.id.hex}" for row in farm.sql("SELECT id FROM jobs WHERE priority = 3")}
    for job_id in hogs:
        farm.log.accepted.pop(job_id, None)
