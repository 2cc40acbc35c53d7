"""Workers that die, freeze, hang or leave (F01 to F15, F60 to F62 as far as they concern workers)."""

import os
import resource
import signal
import time

from common.domain.jobs import ErrorClass
from tests.faults.clients import SMALL
from tests.faults.farm import LEASE_S, WORKERS, Farm, is_gone, until
from tests.faults.fault import fault, require

SLOW = "slow [slow=0.3]"  # ten steps: three seconds
MARGIN_S = 5.0  # a lost worker's job starts again within its lease and this
CRASH_RETRY_S = 2.0
_BURSTS = ("[slow=0.1]", "[slow=0.2]", "[slow=0.3]")


@fault("F01", "worker SIGKILLed between delivery and claim")
def killed_before_the_claim(farm: Farm) -> None:
    with farm.points.armed("worker.after_delivery") as standing:
        job = farm.client.submit("one")
        kill_process(farm, standing())
    farm.await_done([job])
    require(farm.outcomes(job) == ["succeeded"], f"no attempt was lost, but there are {farm.outcomes(job)}")


@fault("F02", "worker SIGKILLed between claim and ack, the other one free")
def killed_after_the_claim(farm: Farm) -> str:
    with farm.points.armed("worker.after_claim") as standing:
        job = farm.client.submit("one")
        killed_at = kill_process(farm, standing())
    farm.await_done([job])
    require(farm.outcomes(job) == ["worker_lost", "succeeded"], f"attempts {farm.outcomes(job)}")
    return retried_in_time(farm, job, killed_at)


@fault("F03", "workers SIGKILLed in the denoise, again and again", short=True, within_s=150)
def killed_again_and_again(farm: Farm) -> str:
    kills = 50 if farm.thorough else 6
    jobs: list[str] = []
    for _ in range(kills):
        jobs += farm.client.submit_many(f"burst {farm.dice.choice(_BURSTS)} {n}" for n in range(2))
        running = "SELECT a.worker_id FROM attempts a JOIN jobs j ON j.id = a.job_id AND j.attempt = a.attempt"
        rows = until(lambda: farm.sql(f"{running} WHERE j.state = 'running' AND a.phase = 'denoise'"), bool, 60)  # noqa: B023
        victim = farm.dice.choice([row.worker_id for row in rows])
        if farm.stack.pid(victim) is not None:
            farm.kill(victim)
            farm.start_part(victim)
    farm.await_done(jobs, within_s=150)
    attempts = sum(len(farm.attempts(job)) for job in jobs)
    return (
        f"{kills} kills, {len(jobs)} jobs, {attempts} attempts, longest retry after {longest_retry(farm, jobs):.1f} s"
    )


@fault("F04", "worker SIGKILLed between upload and completion", "I1 I2 I3 I4 I7 I8", short=True)
def killed_after_the_upload(farm: Farm) -> None:
    with farm.points.armed("worker.after_upload") as standing:
        job = farm.client.submit("one")
        kill_process(farm, standing())
    farm.await_done([job])


@fault("F05", "reply to the completion's COMMIT cut, twice")
def completion_reply_lost(farm: Farm) -> None:
    from tests.faults.proxy import READY_FOR_QUERY, CutReply, Weather  # noqa: PLC0415

    proxy = farm.proxies["postgres.worker"]
    with proxy.under(Weather(cut=CutReply(b"videos/", READY_FOR_QUERY, times=2))):
        job = farm.client.submit("one")
        farm.await_done([job])
        require(proxy.cuts_done >= 1, "no reply was cut")
    require(farm.outcomes(job) == ["succeeded"], f"attempts {farm.outcomes(job)}")
    require(farm.row(job).result["attempt"] == 1, "another result was stored")


@fault("F06", "engine child SEGV, a worker free", short=True)
def child_segfault(farm: Farm) -> str:
    job = farm.client.submit(SLOW)
    worker = farm.await_running(job)
    killed_at = time.time()
    os.kill(farm.engine_child(worker), signal.SIGSEGV)
    farm.await_done([job])
    require(farm.outcomes(job) == ["child_crash", "succeeded"], f"attempts {farm.outcomes(job)}")
    waited = farm.attempts(job)[1].started_at.timestamp() - killed_at
    require(waited <= CRASH_RETRY_S, f"started again after {waited:.2f} s, {CRASH_RETRY_S} s are promised")
    return f"again after {waited:.2f} s"


@fault("F07", "a batch of three good jobs and one that crashes the engine", short=True)
def poison_in_a_batch(farm: Farm) -> str:
    prompts = ["good one [slow=0.1]", "bad [crash]", "good two [slow=0.1]", "good three [slow=0.1]"]
    with farm.only("worker-1"):
        farm.pause("worker-1")
        jobs = farm.client.submit_many(prompts)
        farm.resume("worker-1")
        until(lambda: len(farm.attempts(jobs[1])), lambda attempts: attempts >= 1)
    bad = jobs.pop(1)
    farm.await_done(jobs)
    farm.await_states([bad], "failed")
    require(farm.row(bad).error_code == "poisoned", f"the bad job failed as {farm.row(bad).error_code}")
    crashes = farm.outcomes(bad)
    require(set(crashes) == {"child_crash"}, f"its attempts ended as {crashes}")
    mates = [farm.outcomes(job) for job in jobs]
    require(all(len(outcomes) <= 2 for outcomes in mates), f"mates were taken along twice: {mates}")
    return f"the bad one crashed {len(crashes)} times, its mates {sum(len(o) - 1 for o in mates)} in all"


@fault("F08", "the only worker SIGSTOPped for three leases", short=True)
def frozen_and_nobody_else(farm: Farm) -> None:
    with farm.only("worker-1"):
        job = farm.client.submit(SLOW)
        farm.await_running(job)
        farm.pause("worker-1")
        until(lambda: farm.row(job).state, lambda state: state == "queued", 3 * LEASE_S, "the lease's end")
        farm.resume("worker-1")
        farm.await_done([job])
    require(farm.outcomes(job) == ["succeeded"], f"the late result was not taken: {farm.outcomes(job)}")


@fault("F09", "a worker SIGSTOPped while another takes its job over", short=True)
def frozen_and_overtaken(farm: Farm) -> None:
    job = farm.client.submit(SLOW)
    zombie = farm.await_running(job)
    before = farm.counter(zombie, "latentmill_stale_completions_total")
    farm.pause(zombie)
    farm.await_done([job])
    farm.resume(zombie)
    require(farm.row(job).result["attempt"] == 2, "the result is not the second attempt's")
    # It is told to stop at its next heartbeat, or its result is refused when it was done before that.
    until(lambda: farm.sql("SELECT 1 FROM attempts WHERE ended_at IS NULL"), lambda rows: not rows)
    require(farm.row(job).result["attempt"] == 2, "the zombie replaced the result")
    require(farm.counter(zombie, "latentmill_stale_completions_total") <= before + 1, "refused more than once")


@fault("F09b", "a worker SIGSTOPped after its upload while another takes the job over", "I1 I2 I3 I4 I7 I8")
def frozen_with_a_result(farm: Farm) -> None:
    with farm.points.armed("worker.after_upload") as standing:
        job = farm.client.submit(SLOW)
        zombie = part_of(farm, standing())
        before = farm.counter(zombie, "latentmill_stale_completions_total")
        farm.pause(zombie)
        farm.points.release("worker.after_upload")
        farm.await_done([job])
        farm.resume(zombie)
    stale = until(
        lambda: farm.counter(zombie, "latentmill_stale_completions_total") - before, lambda count: count >= 1, 30
    )
    require(stale == 1, f"{stale} results were refused")
    require(farm.row(job).result["attempt"] == 2, "the zombie's result was taken")


@fault("F10", "engine hung while the parent goes on", within_s=90)
def hung_engine(farm: Farm) -> None:
    bad = farm.client.submit("[hang]")
    good = farm.client.submit("good")
    farm.await_states([bad], "failed", within_s=60)
    require(farm.row(bad).error_code == "inference_timeout", f"failed as {farm.row(bad).error_code}")
    farm.await_done([good])


@fault("F11", "CUDA out of memory, always")
def out_of_memory(farm: Farm) -> None:
    job = farm.client.submit("[oom]")
    farm.await_states([job], "failed", within_s=60)
    require(farm.row(job).error_code == "gpu_out_of_memory", f"failed as {farm.row(job).error_code}")
    require(farm.outcomes(job) == [ErrorClass.OOM] * 2, f"attempts {farm.outcomes(job)}")


@fault("F12", "worker's memory limited to what it has (prlimit)")
def out_of_host_memory(farm: Farm) -> str:
    job = farm.client.submit(SLOW)
    victim = farm.await_running(job)
    farm.limit(victim, resource.RLIMIT_AS, 1)
    farm.await_done([job])
    ended = farm.stack.pid(victim) is None
    if not ended:
        farm.limit(victim, resource.RLIMIT_AS, -1)
    return f"the worker {'ended' if ended else 'lived on'}, attempts {farm.outcomes(job)}"


@fault("F13", "SIGTERM with little left to do", short=True)
def told_to_leave_in_time(farm: Farm) -> None:
    job = farm.client.submit(SLOW)
    leaving = farm.await_running(job, 5)
    pid = farm.pid(leaving)
    farm.signal(leaving, signal.SIGTERM)
    until(lambda: is_gone(pid), bool, 20, "the worker's end")
    require(farm.outcomes(job) == ["succeeded"], f"attempts {farm.outcomes(job)}")


@fault("F13b", "SIGTERM with more to do than the grace allows", short=True)
def told_to_leave_too_early(farm: Farm) -> str:
    grace_s = 1.0
    farm.stack.stop_part("worker-1")
    farm.start_part("worker-1", LATENTMILL_DRAIN_GRACE_S=str(grace_s))
    with farm.only("worker-1"):
        job = farm.client.submit("slow [slow=0.6]")
        farm.await_running(job)
        pid, began = farm.pid("worker-1"), time.monotonic()
        farm.signal("worker-1", signal.SIGTERM)
        until(lambda: is_gone(pid), bool, 20, "the worker's end")
        took = time.monotonic() - began
    farm.await_done([job])
    require(farm.outcomes(job) == ["preempted", "succeeded"], f"attempts {farm.outcomes(job)}")
    require(farm.row(job).failures == {}, f"it was charged: {farm.row(job).failures}")
    require(took < grace_s + 4, f"it left after {took:.1f} s")
    return f"left after {took:.1f} s, grace {grace_s:g} s"


@fault("F14", "SIGTERM, then a cancel during the drain")
def cancelled_during_the_drain(farm: Farm) -> None:
    job = farm.client.submit("slow [slow=0.6]")
    leaving = farm.await_running(job)
    pid = farm.pid(leaving)
    farm.signal(leaving, signal.SIGTERM)
    require(farm.client.cancel(job).status_code == 202, "the cancel was not taken")
    until(lambda: is_gone(pid), bool, 20, "the worker's end")
    farm.await_states([job], "cancelled")
    require(len(farm.attempts(job)) == 1, f"attempts {farm.outcomes(job)}")


@fault("F15", "SIGTERM twice, then SIGKILL in the drain of the next")
def killed_in_the_drain(farm: Farm) -> None:
    jobs = farm.client.submit_many(["slow [slow=0.5]"] * 2, deterministic=True)
    first = farm.await_running(jobs[0])
    second = farm.await_running(jobs[1])
    farm.signal(first, signal.SIGTERM)
    farm.signal(second, signal.SIGTERM)
    until(lambda: farm.sql("SELECT 1 FROM workers WHERE NOT accepting"), lambda rows: len(rows) >= 2, 10)
    farm.kill(second)
    farm.signal(first, signal.SIGTERM)
    for worker in WORKERS:
        until(lambda worker=worker: farm.stack.pid(worker), lambda pid: pid is None, 20)  # type: ignore[misc]
        farm.start_part(worker)
    farm.await_done(jobs)
    require(farm.outcomes(jobs[1])[0] == "worker_lost", f"attempts {farm.outcomes(jobs[1])}")
    require(farm.outcomes(jobs[0])[0] == "preempted", f"attempts {farm.outcomes(jobs[0])}")


@fault("F61", "tickets and rows of a newer build reach this one", "I1 I2 I3 I7")
def newer_build(farm: Farm) -> None:
    """A row with a parameter that this build does not know must not end the workers or cost other jobs."""
    pids = [farm.pid(worker) for worker in WORKERS]
    with farm.no_workers():
        odd = farm.client.submit("from the future")
        farm.sql(
            "UPDATE jobs SET params = params || '{\"unheard_of\": 1}'::jsonb WHERE id = %s", odd.removeprefix("job_")
        )
    pids = [farm.pid(worker) for worker in WORKERS]
    good = farm.client.submit_many(["good"] * 3)
    farm.await_done(good)
    until(lambda: farm.row(odd).state, lambda state: state in {"failed", "succeeded", "queued"}, 30)
    require([farm.stack.pid(worker) for worker in WORKERS] == pids, "a worker ended because of it")
    if farm.row(odd).state == "queued":
        farm.client.cancel(odd)


def kill_process(farm: Farm, pid: int) -> float:
    """SIGKILL the part that this process is, start it again; the time of the kill."""
    part = part_of(farm, pid)
    killed_at = time.time()
    farm.kill(part)
    farm.start_part(part)
    return killed_at


def part_of(farm: Farm, pid: int) -> str:
    """The part that a process is."""
    found = [name for name, known in farm.stack.status().items() if known == pid]
    require(found, f"process {pid} is no part of the stack")
    return found[0]


def retried_in_time(farm: Farm, job: str, killed_at: float) -> str:
    """Check that the second attempt came within lease + 5 s of the kill."""
    waited = float(farm.attempts(job)[1].started_at.timestamp() - killed_at)
    require(waited <= LEASE_S + MARGIN_S, f"started again after {waited:.1f} s, lease {LEASE_S:g} s + {MARGIN_S:g} s")
    return f"again after {waited:.1f} s, lease {LEASE_S:g} s"


def longest_retry(farm: Farm, jobs: list[str]) -> float:
    """The longest time between the end of an attempt and the start of the next."""
    gaps = [0.0]
    for job in jobs:
        attempts = farm.attempts(job)
        gaps += [
            (later.started_at - earlier.ended_at).total_seconds()
            for earlier, later in zip(attempts, attempts[1:], strict=False)
        ]
    return max(gaps)


def submit_slow(farm: Farm, count: int, step_s: float = 0.3) -> list[str]:
    """Jobs that never share a batch, of ten such steps."""
    return farm.client.submit_many((f"slow {n} [slow={step_s}]" for n in range(count)), deterministic=True, **{})


assert SMALL["num_inference_steps"] == 10  # what the comments above count with
