"""Dispatchers that die, freeze or are two (F52, F53, F57)."""

import time

from tests.faults.broker_faults import reruns
from tests.faults.farm import DISPATCHERS, LEADER_LEASE_S, LEASE_S, WORKERS, Farm, until
from tests.faults.fault import fault, require

TAKEOVER_S = 5.0


@fault("F52", "the leading dispatcher SIGSTOPped, then two leaders at once")
def leader_frozen(farm: Farm) -> str:
    first = leader(farm)
    farm.pause(first)
    began = time.monotonic()
    until(lambda: leads(farm), lambda names: names - {first}, 20, "another leader")
    took = time.monotonic() - began
    # More than the window holds, so that the second leader has to release them.
    jobs = farm.client.submit_many(f"n {n}" for n in range(30))
    farm.resume(first)
    farm.await_done(jobs)
    require(took <= LEADER_LEASE_S + TAKEOVER_S, f"taken over after {took:.1f} s")
    require(reruns(farm, jobs) == 0, "a job ran twice")
    return f"taken over after {took:.1f} s, lease {LEADER_LEASE_S:g} s"


@fault("F52b", "the leading dispatcher SIGKILLed between release and publish")
def leader_killed(farm: Farm) -> str:
    with farm.points.armed("dispatcher.after_release") as standing:
        jobs = farm.client.submit_many(f"n {n}" for n in range(30))
        pid = standing()
        victim = next(name for name in DISPATCHERS if farm.stack.pid(name) == pid)
        farm.kill(victim)
    began = time.monotonic()
    farm.await_done(jobs)
    farm.start_part(victim)
    require(reruns(farm, jobs) == 0, "a job ran twice")
    return f"30 jobs done {time.monotonic() - began:.1f} s after the kill"


@fault("F53", "the whole farm suspended for three leases, workers back last", short=True)
def everything_suspended(farm: Farm) -> str:
    jobs = farm.client.submit_many((f"slow {n} [slow=0.4]" for n in range(2)), deterministic=True)
    for job in jobs:
        farm.await_running(job)
    farm.pause(*DISPATCHERS, *WORKERS)
    time.sleep(3 * LEASE_S)
    farm.resume(*DISPATCHERS)
    time.sleep(2.5)  # a scan and a half, in which every lease is long over
    farm.resume(*WORKERS)
    farm.await_done(jobs)
    require(reruns(farm, jobs) == 0, f"re-runs: {[farm.outcomes(job) for job in jobs]}")
    return f"{3 * LEASE_S:g} s suspended, lease {LEASE_S:g} s, 0 re-runs"


@fault("F57", "forty jobs that fail again and again", within_s=150)
def retry_storm(farm: Farm) -> str:
    jobs = farm.client.submit_many((f"[error] {n}" for n in range(40)), deterministic=True)
    began = time.monotonic()
    good = farm.client.submit("good")
    farm.await_done([good], within_s=60)
    waited = time.monotonic() - began
    ids = [job.removeprefix("job_") for job in jobs]
    time.sleep(10)
    counted = "SELECT count(*) FILTER (WHERE attempt = 1) AS first, count(*) FILTER (WHERE attempt > 1) AS again"
    row = farm.sql(f"{counted} FROM attempts WHERE job_id = ANY(%s::uuid[])", ids)[0]
    allowed = max(10, 0.2 * row.first) + 2  # two that were claimed while the count was being made
    require(
        row.again <= allowed, f"{row.again} retries of {row.first} first attempts, {allowed:g} are allowed in 5 min"
    )
    # Delayed, not failed: with the five minutes over they run.
    for _ in range(6):
        farm.age()
        farm.sql("UPDATE jobs SET run_at = now() WHERE state = 'queued' AND id = ANY(%s::uuid[])", ids)
        time.sleep(4)
        if farm.states(jobs).get("failed", 0) == len(jobs):
            break
    for job in jobs:
        if farm.row(job).state == "queued":
            farm.client.cancel(job)
    return f"{row.again} retries of {row.first} first attempts; a good job behind them was done after {waited:.1f} s"


def leads(farm: Farm) -> set[str]:
    """The dispatchers that believe that they lead."""
    return {
        name
        for name in DISPATCHERS
        if name not in farm.paused and farm.counter(name, "latentmill_dispatcher_leading") == 1
    }


def leader(farm: Farm) -> str:
    """The one dispatcher that leads."""
    return next(iter(until(lambda: leads(farm), bool, 15, "a leading dispatcher")))
