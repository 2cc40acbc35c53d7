"""The farm under test: the real stack of infra/local, with a fault proxy before every server and every kind of process."""

import contextlib
import dataclasses
import os
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psycopg
from psycopg.rows import namedtuple_row

from infra.local import process
from infra.local.options import StackOptions
from infra.local.part import Launch
from infra.local.stack import LocalStack
from tests.conftest import REPOSITORY
from tests.faults.bucket import Bucket
from tests.faults.clients import MODEL, Caller, ClientLog, Watchers
from tests.faults.points import FaultPoints
from tests.faults.proxy import FAIR, FaultProxy

# Scaled: a lost worker is noticed within seconds, and an outage of some seconds outlasts every lease.
LEASE_S = 5.0
LEADER_LEASE_S = 3.0
SCAN_GAP_S = 6.0
WORKERS = ("worker-1", "worker-2")
DISPATCHERS = ("dispatcher", "dispatcher-2")
APIS = ("api-1", "api-2")
SERVERS = ("postgres", "redis", "s3", "epmd", "rabbitmq", "nginx")
KINDS = ("api", "worker", "dispatcher")
# The variable that leads a process to each server.
_ADDRESSES = {
    "postgres": "LATENTMILL_DATABASE_URL",
    "rabbitmq": "LATENTMILL_AMQP_URL",
    "redis": "LATENTMILL_REDIS_URL",
    "s3": "LATENTMILL_S3_ENDPOINT",
}
_LEASES = {"LATENTMILL_LEASE_S": str(LEASE_S)}
WORKER_ENVIRONMENT = _LEASES | {
    "LATENTMILL_ENGINE": "synthetic",
    "LATENTMILL_MODEL": MODEL,
    "LATENTMILL_SYNTHETIC_STEP_S": "0.02",
    "LATENTMILL_MAX_BATCH": "4",
    "LATENTMILL_STALL_S": "3",
    "LATENTMILL_HEARTBEAT_S": "1",
    "LATENTMILL_DRAIN_GRACE_S": "20",
}
DISPATCHER_ENVIRONMENT = _LEASES | {
    "LATENTMILL_LEADER_LEASE_S": str(LEADER_LEASE_S),
    "LATENTMILL_SCAN_GAP_S": str(SCAN_GAP_S),
    "LATENTMILL_TICKET_LOST_AFTER_S": "5",
    "LATENTMILL_TICKET_RECHECK_S": "3",
    "LATENTMILL_DEADLINE_BACKSTOP_S": "5",
}
T = TypeVar("T")


def until(read: Callable[[], T], holds: Callable[[T], Any], within_s: float = 30.0, what: str = "") -> T:
    """Read until the condition holds; the last reading. Raises AssertionError with it when time is up."""
    deadline = time.monotonic() + within_s
    while not holds(value := read()):
        if time.monotonic() > deadline:
            message = f"{what or 'the condition'} did not come about in {within_s:g} s; last seen {value!r}"
            raise AssertionError(message)
        time.sleep(0.05)
    return value


class Farm:
    """One stack with two apis, two dispatchers and two or more synthetic workers, for many faults one after the other.

    thorough: faults last as long as in the whole matrix, not as in `make test`.
    """

    def __init__(self, directory: Path, seed: int = 0, *, thorough: bool = False) -> None:
        self.dice = random.Random(seed)
        self.thorough = thorough
        plain = StackOptions(directory=directory, workers=0, connections_per_address=3000)
        ports = LocalStack(plain)
        self.proxies = {
            f"{server}.{kind}": FaultProxy(f"{server}.{kind}", lambda server=server: ports.port(server))  # type: ignore[misc]
            for server in _ADDRESSES
            for kind in KINDS
        }
        self.points = FaultPoints(directory.with_name(f"{directory.name}-points"))
        self.points.make()
        self.stack = LocalStack(
            dataclasses.replace(
                plain,
                api_env=self._environment(ports, "api"),
                worker_env=self._environment(ports, "worker") | WORKER_ENVIRONMENT,
                dispatcher_env=self._environment(ports, "dispatcher") | DISPATCHER_ENVIRONMENT,
            )
        )
        # One book of ports: a port that turns out to be taken at the start is exchanged for both.
        ports._plan = self.stack._plan  # noqa: SLF001
        self.log = ClientLog()
        self.paused: set[str] = set()

    def _environment(self, stack: LocalStack, kind: str) -> dict[str, str]:
        own = {
            variable: re.sub(r"127\.0\.0\.1:\d+", f"127.0.0.1:{self.proxies[f'{server}.{kind}'].port}", value)
            for server, variable in _ADDRESSES.items()
            if (value := stack.environment[variable])
        }
        return own | {"LATENTMILL_FAULT_POINTS": str(self.points.folder)}

    def start(self) -> None:
        """Start everything, make a key, and begin to watch."""
        self.stack.start()
        for name in (*DISPATCHERS[1:], *WORKERS):
            self.stack.start_part(name)
        self.bucket = Bucket(self.stack.environment)
        self.client = self.caller(self.make_key("team"))
        apis = [self.stack.url(api) for api in APIS]
        self._watchers = Watchers(apis, self.stack.public_url, self.client.key, self.log)
        self._watchers.start()
        self.await_ready()

    def close(self) -> None:
        """Stop everything and remove its data."""
        if hasattr(self, "_watchers"):
            self._watchers.stop()
            self.client.close()
        self.resume_all()
        for proxy in self.proxies.values():
            proxy.close()
        self.stack.destroy()
        self.points.remove()

    # Clients.

    def caller(self, key: str, api: str | None = None, timeout_s: float = 30.0) -> Caller:
        """A client, through nginx or past it to one api."""
        return Caller(self.stack.url(api) if api else self.stack.public_url, key, self.log, timeout_s)

    def make_key(self, tenant: str, *options: str) -> str:
        """A key for a tenant, which is made when it is new."""
        command = [sys.executable, "-m", "api.keys", "create", "--tenant", tenant, "--name", "test", "--quiet"]
        environment = {**os.environ, **self.stack.environment}
        made = subprocess.run(
            [*command, *options], env=environment, cwd=REPOSITORY, check=True, capture_output=True, text=True
        )
        return made.stdout.strip()

    # What the job store says.

    def sql(self, statement: str, *values: object) -> list[Any]:
        """Run one statement past every proxy; its rows."""
        url = self.stack.environment["LATENTMILL_DATABASE_URL"]
        with psycopg.connect(url, autocommit=True, connect_timeout=5, row_factory=namedtuple_row) as connection:
            cursor = connection.execute(statement.encode(), values or None)
            return cursor.fetchall() if cursor.description else []

    def row(self, job_id: str) -> Any:
        """The row of a job."""
        return self.sql("SELECT * FROM jobs WHERE id = %s", uuid_of(job_id))[0]

    def attempts(self, job_id: str) -> list[Any]:
        """The attempts of a job, in order."""
        return self.sql("SELECT * FROM attempts WHERE job_id = %s ORDER BY attempt", uuid_of(job_id))

    def outcomes(self, job_id: str) -> list[str]:
        """How its attempts ended."""
        return [attempt.outcome for attempt in self.attempts(job_id)]

    def states(self, job_ids: Sequence[str]) -> dict[str, int]:
        """How many of the jobs are in which state."""
        ids = [uuid_of(job_id) for job_id in job_ids]
        rows = self.sql("SELECT state, count(*) AS jobs FROM jobs WHERE id = ANY(%s::uuid[]) GROUP BY state", ids)
        return {row.state: row.jobs for row in rows}

    def await_states(self, job_ids: Sequence[str], *states: str, within_s: float = 60.0) -> None:
        """Wait until all the jobs are in one of the states."""
        wanted = f"{len(job_ids)} jobs in {' or '.join(states)}"
        until(
            lambda: self.states(job_ids),
            lambda seen: sum(seen.get(s, 0) for s in states) == len(job_ids),
            within_s,
            wanted,
        )

    def await_done(self, job_ids: Sequence[str], within_s: float = 60.0) -> None:
        """Wait until all the jobs have succeeded."""
        self.await_states(job_ids, "succeeded", within_s=within_s)

    def await_running(self, job_id: str, step: int = 1, within_s: float = 30.0) -> str:
        """Wait until the running attempt has done this many steps; its worker."""
        read = "SELECT a.worker_id, a.step FROM attempts a JOIN jobs j ON j.id = a.job_id AND j.attempt = a.attempt"
        where = "WHERE j.id = %s AND j.state = 'running' AND a.step >= %s"
        rows = until(
            lambda: self.sql(f"{read} {where}", uuid_of(job_id), step), bool, within_s, f"step {step} of {job_id}"
        )
        return str(rows[0].worker_id)

    def counter(self, part: str, name: str) -> float:
        """The sum of a metric of one process over its labels; 0 when it shows none."""
        page = httpx.get(f"{self.stack.url(f'{part}.metrics')}/metrics", trust_env=False, timeout=5).text
        lines = (line for line in page.splitlines() if re.match(rf"{name}(\{{| )", line))
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    # Processes.

    def pid(self, part: str) -> int:
        """The process of a part. Raises AssertionError when it does not run."""
        found = self.stack.pid(part)
        assert found is not None, f"{part} does not run"
        return found

    def engine_child(self, worker: str) -> int:
        """The engine child of a worker."""
        return until(lambda: children(self.pid(worker)), bool, 10, f"an engine child of {worker}")[0]

    def signal(self, part: str, number: signal.Signals) -> None:
        """Send a signal to the process alone."""
        os.kill(self.pid(part), number)

    def kill(self, part: str) -> None:
        """SIGKILL a process and its children."""
        self.paused.discard(part)
        self.stack.kill_part(part)

    def start_part(self, part: str, **environment: str) -> None:
        """Start a part and wait until it serves."""
        self.stack.start_part(part, environment)

    def start_server_with(self, part: str, environment: Mapping[str, str]) -> None:
        """Start a server with more in its environment than the stack gives it."""
        known = self.stack._part(part, {})  # noqa: SLF001

        def launch() -> Launch:
            plain = known.launch()
            return dataclasses.replace(plain, environment={**plain.environment, **environment})

        self.stack._begin(dataclasses.replace(known, launch=launch), threading.Event())  # noqa: SLF001

    def run(self, *module: str) -> None:
        """Run a command of latentmill's to its end. Raises CalledProcessError."""
        environment = {**os.environ, **self.stack.environment}
        command = [sys.executable, "-m", *module]
        subprocess.run(command, env=environment, cwd=REPOSITORY, check=True, capture_output=True, timeout=60)

    def pause(self, *parts: str) -> None:
        """SIGSTOP processes with all their children."""
        for part in parts:
            self.paused.add(part)
            os.killpg(self.pid(part), signal.SIGSTOP)

    def resume(self, *parts: str) -> None:
        """SIGCONT them."""
        for part in parts:
            self.paused.discard(part)
            pid = self.stack.pid(part)
            if pid is not None:
                os.killpg(pid, signal.SIGCONT)

    def resume_all(self) -> None:
        """Let everything go on that a fault has stopped."""
        self.resume(*tuple(self.paused))

    @contextlib.contextmanager
    def only(self, *workers: str) -> Iterator[None]:
        """Stop all other workers meanwhile."""
        others = [worker for worker in self.workers() if worker not in workers]
        together(self.stack.stop_part, others)
        try:
            yield
        finally:
            self.resume_all()
            together(self.start_part, [worker for worker in others if self.stack.pid(worker) is None])

    @contextlib.contextmanager
    def no_workers(self) -> Iterator[None]:
        """Stop all workers meanwhile."""
        with self.only():
            yield

    def workers(self) -> list[str]:
        """The workers that run."""
        return [name for name, pid in self.stack.status().items() if name.startswith("worker-") and pid is not None]

    def limit(self, part: str, kind: int, value: int) -> None:
        """Set a soft limit of a running process (prlimit)."""
        pid = self.pid(part)
        hard = resource.prlimit(pid, kind)[1]
        resource.prlimit(pid, kind, (hard if value < 0 else value, hard))

    # Faults between processes and servers.

    def proxies_of(self, server: str, *kinds: str) -> list[FaultProxy]:
        """The proxies before a server, all or those of some kinds of process."""
        return [self.proxies[f"{server}.{kind}"] for kind in kinds or KINDS]

    # Back to normal.

    def calm(self) -> None:
        """Lift every fault: proxies pass, stopped processes go on, dead parts are started."""
        self.points.release_all()
        for proxy in self.proxies.values():
            proxy.set(FAIR)
        self.resume_all()
        for server in SERVERS:
            if self.stack.pid(server) is None:
                self.start_part(server)
        missing = [part for part in (*APIS, *DISPATCHERS, *WORKERS) if self.stack.pid(part) is None]
        together(self.start_part, missing)
        together(self.stack.stop_part, [worker for worker in self.workers() if worker not in WORKERS])

    def await_ready(self, within_s: float = 60.0) -> None:
        """Wait until both apis are ready, a dispatcher leads, and the workers take jobs."""
        live = "SELECT id FROM workers WHERE accepting AND heartbeat_at > now() - interval '4 seconds'"
        until(
            lambda: {row.id for row in self.sql(live)},
            lambda ids: ids >= set(WORKERS),
            within_s,
            "workers that take jobs",
        )
        leads = "SELECT 1 FROM leaders WHERE expires_at > now() AND last_scan_at > now() - interval '5 seconds'"
        until(lambda: self.sql(leads), bool, within_s, "a leading dispatcher")
        for api in APIS:
            until(
                lambda api=api: self.ready(api),
                lambda ready: ready["broker"] and ready["redis"],
                within_s,
                f"{api} ready",
            )  # type: ignore[misc]

    def ready(self, api: str) -> dict[str, Any]:
        """What /readyz of an api says; all false when it says nothing."""
        try:
            answer: dict[str, Any] = httpx.get(f"{self.stack.url(api)}/readyz", trust_env=False, timeout=5).json()
        except (httpx.HTTPError, ValueError):
            return {"status": "unreachable", "postgres": False, "broker": False, "redis": False}
        return answer

    def age(self) -> None:
        """Make what has ended look an hour old, so that budgets over minutes are not used up by earlier faults."""
        self.sql("UPDATE attempts SET started_at = started_at - interval '1 hour' WHERE ended_at IS NOT NULL")


def uuid_of(job_id: str) -> str:
    """The id as Postgres takes it."""
    return job_id.removeprefix("job_")


def children(pid: int) -> list[int]:
    """The processes that a process has started, on all of its threads."""
    found: list[int] = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            found += map(int, (thread / "children").read_text().split())
    return found


def together(action: Callable[[str], object], names: Sequence[str]) -> None:
    """Do something for each name at the same time. Raises the first error."""
    errors: list[BaseException] = []

    def run(name: str) -> None:
        try:
            action(name)
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def is_gone(pid: int) -> bool:
    """Whether a process has ended."""
    return process.birth_mark(pid) is None
