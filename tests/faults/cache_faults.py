"""Redis that dies, freezes, fills up or forgets (F41)."""

import time

import redis

from tests.faults.broker_faults import Storm, reruns
from tests.faults.farm import Farm, until
from tests.faults.fault import fault, require
from tests.faults.proxy import Weather

SLOW = "slow [slow=0.4]"
# A submit needs nothing of Redis but its rate limit, which each process then counts by itself.
SUBMIT_S = 1.0


@fault("F41", "Redis SIGKILLed with running jobs, submits and followers", short=True)
def redis_killed(farm: Farm) -> str:
    seconds = 35 if farm.thorough else 6
    running = farm.client.submit(SLOW)
    farm.await_running(running)
    farm.kill("redis")
    with Storm(farm, 0.2) as storm:
        time.sleep(seconds)
        cancelled = farm.client.submit("slow [slow=1]")
        farm.await_running(cancelled)
        farm.client.cancel(cancelled)
        farm.await_states([cancelled], "cancelled", within_s=10)
    # The socket reads Postgres every two seconds now.
    seen = until(lambda: _told_by_socket(farm, running), bool, 20, "the end of the job on the socket")
    farm.start_part("redis")
    return _judge(farm, storm, running, f"{seconds} s away, the socket told version {seen}")


@fault("F41b", "Redis frozen (SIGSTOP)")
def redis_frozen(farm: Farm) -> str:
    seconds = 30 if farm.thorough else 8
    running = farm.client.submit(SLOW)
    farm.await_running(running)
    farm.pause("redis")
    with Storm(farm, 0.2) as storm:
        time.sleep(seconds)
    farm.resume("redis")
    return _judge(farm, storm, running, f"{seconds} s frozen")


@fault("F41c", "Redis full (maxmemory), flushed, and its clients killed")
def redis_full(farm: Farm) -> str:
    running = farm.client.submit(SLOW)
    farm.await_running(running)
    with redis.Redis.from_url(farm.stack.environment["LATENTMILL_REDIS_URL"]) as server:
        before = server.config_get("maxmemory")["maxmemory"]
        server.config_set("maxmemory", "1mb")
        try:
            with Storm(farm, 0.2) as storm:
                for _ in range(3):
                    server.flushall()
                    server.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
                    time.sleep(1)
        finally:
            server.config_set("maxmemory", before)
    return _judge(farm, storm, running, "full for 3 s")


@fault("F41d", "the way to Redis cut: nothing arrives, nobody is told")
def redis_unreachable(farm: Farm) -> str:
    running = farm.client.submit(SLOW)
    farm.await_running(running)
    proxies = farm.proxies_of("redis")
    for proxy in proxies:
        proxy.set(Weather(swallowed=True))
    with Storm(farm, 0.2) as storm:
        time.sleep(20 if farm.thorough else 8)
    return _judge(farm, storm, running, "cut")


def _judge(farm: Farm, storm: Storm, running: str, what: str) -> str:
    storm.require_all_taken()
    jobs = [running, *storm.taken]
    farm.await_done(jobs)
    require(reruns(farm, jobs) == 0, "a job ran twice")
    require(storm.slowest() < SUBMIT_S, f"the slowest submit took {storm.slowest():.2f} s")
    return f"{what}; {len(storm.taken)} submits taken, slowest {storm.slowest():.2f} s"


def _told_by_socket(farm: Farm, job: str) -> int | None:
    """The version in which a socket told the job's end."""
    told = [s.seq for s in farm.log.seen[job] if s.source.startswith("socket") and s.status == "succeeded"]
    return told[0] if told else None
