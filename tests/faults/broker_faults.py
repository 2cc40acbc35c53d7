"""RabbitMQ that dies, freezes, forgets or refuses, and tickets that are not what they should be (F16 to F30)."""

import pickle
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from common.broker.topology import JOBS_EXCHANGE
from common.domain.tickets import Ticket, encode_ticket
from infra.local.plan import USER
from tests.faults.clients import MODEL
from tests.faults.farm import WORKERS, Farm, until, uuid_of
from tests.faults.fault import fault, require
from tests.faults.proxy import Weather
from tests.faults.tickets import QUEUE, channel, dead, depth, publish, ticket_of

SLOW = "slow [slow=0.3]"


class Storm:
    """Submits in the background until it is stopped; how long each took and what it was answered."""

    def __init__(self, farm: Farm, every_s: float, prompt: str = "storm [slow=0.02]") -> None:
        self._farm, self._every_s, self._prompt = farm, every_s, prompt
        self._stopping = threading.Event()
        self.taken: list[str] = []
        self.seconds: list[float] = []
        self.statuses: list[int] = []
        self._thread = threading.Thread(target=self._run, name="storm", daemon=True)

    def __enter__(self) -> "Storm":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(timeout=40)

    def _run(self) -> None:
        while not self._stopping.wait(self._every_s):
            began = time.monotonic()
            try:
                answer = self._farm.client.post(self._prompt)
            except httpx.TransportError:
                self.statuses.append(0)
                continue
            self.seconds.append(time.monotonic() - began)
            self.statuses.append(answer.status_code)
            if answer.status_code == httpx.codes.ACCEPTED:
                self.taken.append(answer.json()["id"])

    def require_all_taken(self) -> None:
        """Every submit was answered 202."""
        others = [status for status in self.statuses if status != httpx.codes.ACCEPTED]
        require(self.statuses and not others, f"of {len(self.statuses)} submits these were not taken: {others[:10]}")

    def slowest(self) -> float:
        """Seconds that the slowest submit took."""
        return max(self.seconds, default=0.0)


@fault("F16", "broker SIGKILLed in a submit storm", short=True)
def broker_killed(farm: Farm) -> str:
    with Storm(farm, 0.05) as storm:
        until(lambda: len(storm.taken), lambda count: count >= 20)
        farm.kill("rabbitmq")
        before = len(storm.taken)
        until(lambda: len(storm.taken), lambda count: count >= before + 20)
        farm.start_part("rabbitmq")
    storm.require_all_taken()
    farm.await_done(storm.taken)
    require(reruns(farm, storm.taken) == 0, "a job ran twice")
    return f"{len(storm.taken)} submits, slowest {storm.slowest():.2f} s"


@fault("F17", "broker away (stop_app) with running jobs and submits", within_s=90)
def broker_stopped(farm: Farm) -> str:
    seconds = 30 if farm.thorough else 10
    running = farm.client.submit(SLOW)
    farm.await_running(running)
    with Storm(farm, 0.2) as storm:
        farm.stack.rabbitmqctl("stop_app")
        time.sleep(seconds)
        farm.stack.rabbitmqctl("start_app")
    storm.require_all_taken()
    farm.await_done([running, *storm.taken], within_s=90)
    require(reruns(farm, [running, *storm.taken]) == 0, "a job ran twice")
    return f"{seconds} s away, {len(storm.taken)} submits taken, slowest {storm.slowest():.2f} s"


@fault("F18", "broker SIGSTOPped")
def broker_frozen(farm: Farm) -> str:
    seconds = 30 if farm.thorough else 10
    threads = farm_threads(farm)
    with Storm(farm, 0.2) as storm:
        farm.pause("rabbitmq")
        time.sleep(seconds)
        farm.resume("rabbitmq")
    storm.require_all_taken()
    farm.await_done(storm.taken)
    require(storm.slowest() < 1.0, f"the slowest submit took {storm.slowest():.2f} s")
    grown = farm_threads(farm) - threads
    require(grown <= 8, f"{grown} more threads than before")
    return f"{seconds} s frozen, slowest submit {storm.slowest():.2f} s"


@fault("F19", "all connections closed every 2 s", short=True)
def connections_closed(farm: Farm) -> str:
    seconds = 60 if farm.thorough else 12
    jobs: list[str] = []
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        jobs.append(farm.client.submit("quick [slow=0.1]"))
        farm.stack.rabbitmqctl("close_all_user_connections", USER, "a test")
        time.sleep(max(0.0, min(0.8, ends - time.monotonic())))
    began = time.monotonic()
    until(lambda: consumers(farm), lambda count: count >= len(WORKERS), 10, "consumers on the queue")
    back_s = time.monotonic() - began
    farm.await_done(jobs)
    require(reruns(farm, jobs) == 0, "a claimed job ran twice")
    require(back_s <= 6, f"the consumers were back after {back_s:.1f} s")
    return f"{len(jobs)} rounds, consumers back after {back_s:.1f} s"


@fault("F20", "channel closed by consumer_timeout while a worker holds tickets", short=True)
def consumer_timeout(farm: Farm) -> str:
    with _environment(farm, consumer_timeout="3000", channel_tick_interval="1000"):
        farm.proxies["rabbitmq.worker"].break_connections()  # new channels take the new timeouts
        until(lambda: consumers(farm), lambda count: count >= len(WORKERS), 15, "consumers on the queue")
        with farm.points.armed("worker.after_delivery") as standing:
            jobs = [farm.client.submit("held")]
            standing()
            time.sleep(8)
        jobs += farm.client.submit_many(["after"] * 4, deterministic=True)
        farm.await_done(jobs, within_s=40)
    require(reruns(farm, jobs) == 0, "a job ran twice")
    until(lambda: consumers(farm), lambda count: count >= len(WORKERS), 15, "consumers on the queue")
    return "both workers consume again"


@fault("F21", "queue purged, then deleted under its consumers")
def queue_gone(farm: Farm) -> None:
    for command in ("purge_queue", "delete_queue"):
        with farm.no_workers():
            jobs = farm.client.submit_many(["waits"] * 5)
            until(lambda: depth(farm), lambda tickets: tickets >= 1)
            if command == "purge_queue":
                farm.stack.rabbitmqctl(command, QUEUE)
        if command == "delete_queue":
            farm.stack.rabbitmqctl(command, QUEUE)
            jobs += farm.client.submit_many(["after"] * 3)
        farm.await_done(jobs, within_s=60)


@fault("F22", "binding removed: publishes are returned")
def unroutable(farm: Farm) -> None:
    with channel(farm) as opened:
        opened.queue_unbind(QUEUE, JOBS_EXCHANGE, QUEUE)
    try:
        jobs = farm.client.submit_many(["unroutable"] * 5)
        require(farm.states(jobs).keys() <= {"queued", "running", "succeeded"}, f"{farm.states(jobs)}")
    finally:
        with channel(farm) as opened:
            opened.queue_bind(QUEUE, JOBS_EXCHANGE, QUEUE)
    farm.await_done(jobs)


@fault("F23", "memory alarm, then disk alarm", within_s=90)
def alarms(farm: Farm) -> str:
    taken: list[str] = []
    slowest = 0.0
    for command, alarm, normal in (
        ("set_vm_memory_high_watermark", ("absolute", "1MB"), ("0.4",)),
        ("set_disk_free_limit", ("4000GB",), ("64MB",)),
    ):
        running = farm.client.submit(SLOW)
        farm.await_running(running)
        try:
            farm.stack.rabbitmqctl(command, *alarm)
            with Storm(farm, 0.2) as storm:
                until(lambda: farm.row(running).state, lambda state: state == "succeeded")  # noqa: B023
        finally:
            farm.stack.rabbitmqctl(command, *normal)
        storm.require_all_taken()
        taken += [running, *storm.taken]
        slowest = max(slowest, storm.slowest())
    farm.await_done(taken, within_s=90)
    require(slowest < 2.0, f"the slowest submit took {slowest:.2f} s")
    return f"{len(taken)} jobs, slowest submit {slowest:.2f} s"


@fault("F24", "every ticket three times, shuffled", short=True)
def doubled_tickets(farm: Farm) -> None:
    with farm.no_workers():
        jobs = farm.client.submit_many(f"job {n}" for n in range(8))
        until(lambda: farm.sql("SELECT 1 FROM jobs WHERE dispatched_at IS NOT NULL AND state = 'queued'"), bool)
        copies = [ticket_of(farm.row(job)) for job in jobs] * 3
        farm.dice.shuffle(copies)
        publish(farm, *copies)
    farm.await_done(jobs)
    require(reruns(farm, jobs) == 0, "a job ran twice")
    until(lambda: depth(farm), lambda tickets: tickets == 0, 15, "an empty queue")


@fault("F25", "an old ticket while the retry waits")
def stale_ticket(farm: Farm) -> str:
    job = farm.client.submit("[error]")
    waits = until(
        lambda: farm.row(job), lambda row: row.state == "queued" and row.attempt >= 1 or row.state == "failed", 20
    )
    tried = 0
    while (row := farm.row(job)).state == "queued" and row.attempt == waits.attempt:
        publish(farm, ticket_of(row), encode_ticket(Ticket(row.id, 1, MODEL, row.batch_key)))
        tried += 1
    if row.attempt > waits.attempt:
        second = farm.attempts(job)[waits.attempt]
        require(second.started_at >= waits.run_at, f"claimed at {second.started_at}, run_at was {waits.run_at}")
    farm.await_states([job], "failed", within_s=60)
    return f"{tried} old tickets in the wait"


@fault("F26", "messages that are no tickets: garbage, 1 MB, a pickle, nested JSON")
def bad_messages(farm: Farm) -> None:
    pids, before = [farm.pid(worker) for worker in WORKERS], dead(farm)
    bodies = [b"", b"\xff\x00garbage", b"x" * 1_000_000, pickle.dumps({"job": 1}), b"[" * 200, b'{"v": 99}', b"null"]
    publish(farm, *bodies)
    job = farm.client.submit("after")
    farm.await_done([job])
    until(lambda: dead(farm) - before, lambda count: count == len(bodies), 15, "all of them in the dead-letter queue")
    require([farm.stack.pid(worker) for worker in WORKERS] == pids, "a worker ended")


@fault("F27", "tickets of jobs that nobody knows")
def unknown_jobs(farm: Farm) -> None:
    def noops() -> float:
        return sum(farm.counter(worker, "latentmill_ticket_noops_total") for worker in WORKERS)

    before = noops()
    publish(farm, *(encode_ticket(Ticket(uuid.uuid4(), 1, MODEL, "nobody")) for _ in range(5)))
    until(noops, lambda count: count - before >= 5, 20, "five tickets without a job")
    until(lambda: depth(farm), lambda tickets: tickets == 0, 15, "an empty queue")
    job = farm.client.submit("after")
    farm.await_done([job])


@fault("F28", "a ticket over its delivery limit", within_s=90)
def delivery_limit(farm: Farm) -> str:
    with farm.no_workers():
        job = farm.client.submit("rejected a thousand times")
        until(lambda: depth(farm), lambda tickets: tickets >= 1)
        before = dead(farm)
        times = reject_until_dead(farm)
        until(lambda: dead(farm), lambda count: count > before, 15, "the ticket in the dead-letter queue")
    farm.await_done([job], within_s=60)
    require(reruns(farm, [job]) == 0, "the job ran twice")
    return f"dead after {times} deliveries; the job was sent again"


@fault("F29", "half-open connections between workers and broker", within_s=120)
def half_open(farm: Farm) -> str:
    running = farm.client.submit("slow [slow=0.5]")
    farm.await_running(running)
    began = time.monotonic()
    with farm.proxies["rabbitmq.worker"].under(Weather(swallowed=True)):
        waiting = farm.client.submit_many(["waits"] * 3)
        farm.await_done([running])
        time.sleep(max(0.0, 20 - (time.monotonic() - began)))
    until(lambda: farm.states(waiting).get("succeeded", 0), lambda done: done == len(waiting), 60)
    require(reruns(farm, [running, *waiting]) == 0, "a job ran twice")
    return f"all done {time.monotonic() - began:.0f} s after the cut of 20 s began"


@fault("F30", "the farm's user loses its permissions", within_s=90)
def permissions_revoked(farm: Farm) -> None:
    farm.stack.rabbitmqctl("clear_permissions", USER)
    try:
        for kind in ("worker", "api", "dispatcher"):
            farm.proxies[f"rabbitmq.{kind}"].break_connections()
        with Storm(farm, 0.2) as storm:
            until(lambda: farm.ready("api-1"), lambda ready: not ready["broker"], 20, "an api that says so")
            time.sleep(3)
        storm.require_all_taken()
    finally:
        farm.stack.rabbitmqctl("set_permissions", USER, ".*", ".*", ".*")
    farm.await_done(storm.taken, within_s=90)


def reruns(farm: Farm, jobs: list[str]) -> int:
    """Attempts beyond the first of each job."""
    ids = [uuid_of(job) for job in jobs]
    rows = farm.sql("SELECT count(*) AS extra FROM attempts WHERE attempt > 1 AND job_id = ANY(%s::uuid[])", ids)
    return int(rows[0].extra)


def consumers(farm: Farm) -> int:
    """Consumers on the queue of the farm's model; workers that run a batch have none."""
    with channel(farm) as opened:
        return int(opened.queue_declare(QUEUE, passive=True).method.consumer_count)


def reject_until_dead(farm: Farm) -> int:
    """Take the ticket and give it back until the broker has had enough; how often."""
    times = 0
    with channel(farm) as opened:
        while True:
            method, _, _ = opened.basic_get(QUEUE)
            if method is None:
                if times and depth(farm) == 0:
                    return times
                continue
            times += 1
            opened.basic_nack(method.delivery_tag, requeue=True)


def farm_threads(farm: Farm) -> int:
    """Threads of both apis and all workers."""
    pids = [farm.pid(part) for part in ("api-1", "api-2", *WORKERS)]
    return sum(_threads(pid) for pid in pids)


def _threads(pid: int) -> int:
    with open(f"/proc/{pid}/status", encoding="ascii") as status:  # noqa: PTH123
        return next(int(line.split()[1]) for line in status if line.startswith("Threads:"))


@contextmanager
def _environment(farm: Farm, **values: str) -> Iterator[None]:
    """Set parameters of the broker's application meanwhile."""
    before = {name: farm.stack.rabbitmqctl("eval", f"application:get_env(rabbit, {name}).").strip() for name in values}
    for name, value in values.items():
        farm.stack.rabbitmqctl("eval", f"application:set_env(rabbit, {name}, {value}).")
    try:
        yield
    finally:
        for name, value in before.items():
            known = value.removeprefix("{ok,").removesuffix("}")
            farm.stack.rabbitmqctl("eval", f"application:set_env(rabbit, {name}, {known}).")
