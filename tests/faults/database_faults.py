"""Postgres that dies, freezes, fills up or loses replies, and statements that wait (F31 to F40, F55)."""

import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import psycopg

from tests.faults.broker_faults import SLOW, Storm, reruns
from tests.faults.clients import Caller
from tests.faults.clocks import shifted_clock
from tests.faults.farm import LEASE_S, Farm, until, uuid_of
from tests.faults.fault import SkippedError, fault, require
from tests.faults.proxy import READY_FOR_QUERY, CutReply, Weather

# Beyond this a caller would rather hear 503: the api's own bound on a request, and what nginx adds.
ANSWER_S = 12.0


@fault("F31", "backends terminated all the time, whatever they do")
def backends_terminated(farm: Farm) -> str:
    seconds = 30 if farm.thorough else 10
    kill = "SELECT count(pg_terminate_backend(pid)) AS killed FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
    killed = 0
    with Storm(farm, 0.1) as storm:
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            killed += farm.sql(f"{kill} AND backend_type = 'client backend'")[0].killed
            time.sleep(0.3)
    farm.await_done(storm.taken)
    refused = [status for status in storm.statuses if status not in {202, 503}]
    require(not refused, f"answers besides 202 and 503: {refused[:5]}")
    require(len(storm.taken) >= 5, f"only {len(storm.taken)} submits were taken")
    require(reruns(farm, storm.taken) == 0, "a job ran twice")
    return f"{killed} backends killed, {len(storm.taken)} of {len(storm.statuses)} submits taken"


@fault("F32", "Postgres SIGKILLed, all of its processes, and started again")
def postgres_killed(farm: Farm) -> str:
    running = farm.client.submit("slow [slow=0.6]")
    farm.await_running(running)
    with Storm(farm, 0.1) as storm:
        until(lambda: len(storm.taken), lambda count: count >= 10)
        farm.kill("postgres")
        time.sleep(LEASE_S + 1)
        farm.start_part("postgres")
        before = len(storm.taken)
        until(lambda: len(storm.taken), lambda count: count >= before + 5, 30, "submits after the restart")
    farm.await_done([running, *storm.taken])
    require(reruns(farm, [running, *storm.taken]) == 0, "a job ran twice")
    return f"{len(storm.taken)} submits taken, {len(storm.statuses) - len(storm.taken)} refused"


@fault("F33", "Postgres stopped for several leases, jobs running", short=True, within_s=90)
def postgres_stopped(farm: Farm) -> str:
    """A scaled outage of five minutes: leases are a ninth of their default."""
    seconds = 35 if farm.thorough else 13
    jobs = farm.client.submit_many((f"slow {n} [slow={0.3 + n}]" for n in range(2)), deterministic=True)
    for job in jobs:
        farm.await_running(job)
    farm.stack.stop_part("postgres")
    answers = [farm.client.post("while it is away") for _ in range(3)]
    time.sleep(seconds)
    farm.start_part("postgres")
    require({answer.status_code for answer in answers} == {503}, f"submits were answered {answers}")
    require(all(int(answer.headers["Retry-After"]) > 0 for answer in answers), "without Retry-After")
    farm.await_done(jobs, within_s=90)
    require(reruns(farm, jobs) == 0, f"a job ran twice: {[farm.outcomes(job) for job in jobs]}")
    return f"{seconds} s away (lease {LEASE_S:g} s), 0 re-runs"


@fault("F34", "Postgres SIGSTOPped", within_s=90)
def postgres_frozen(farm: Farm) -> str:
    seconds = 20
    running = farm.client.submit("slow [slow=1]")
    farm.await_running(running)
    farm.pause("postgres")
    began = time.monotonic()
    answer = farm.client.post("while it is frozen")
    took = time.monotonic() - began
    time.sleep(max(0.0, seconds - took))
    farm.resume("postgres")
    require(answer.status_code == 503, f"a submit was answered {answer.status_code}")
    require(took < ANSWER_S, f"the answer took {took:.1f} s")
    farm.await_done([running])
    require(reruns(farm, [running]) == 0, "the job ran twice")
    return f"{seconds} s frozen, 503 after {took:.1f} s, 0 re-runs"


@fault("F35", "Postgres' disk full under its tables")
def postgres_disk_full(farm: Farm) -> str:
    with _small_tablespace(farm) as filler:
        farm.sql("ALTER TABLE jobs SET TABLESPACE small")
        try:
            _fill(filler)
            answers = [farm.client.post("x" * 1500) for _ in range(60)]
            statuses = {answer.status_code for answer in answers}
            require(statuses <= {202, 503}, f"submits were answered {statuses}")
            require(503 in statuses, "the disk was never full")
            filler.unlink()
            taken = [answer.json()["id"] for answer in answers if answer.status_code == 202]
            after = farm.client.submit("after")
            farm.await_done([*taken, after])
        finally:
            filler.unlink(missing_ok=True)
            farm.sql("ALTER TABLE jobs SET TABLESPACE pg_default")
    refused = [answer for answer in answers if answer.status_code == 503]
    return f"{len(refused)} of 60 refused"


@fault("F36", "Postgres read-only, as after a failover")
def postgres_read_only(farm: Farm) -> None:
    running = farm.client.submit("slow [slow=0.5]")
    farm.await_running(running)
    farm.sql("ALTER SYSTEM SET default_transaction_read_only = on")
    farm.sql("SELECT pg_reload_conf()")
    try:
        until(lambda: farm.sql("SHOW default_transaction_read_only")[0][0], lambda value: value == "on")
        answer = farm.client.post("while it is read-only")
        require(answer.status_code == 503, f"a submit was answered {answer.status_code}: {answer.text[:150]}")
        require(farm.client.get(running)["status"] == "running", "reads do not work")
        time.sleep(LEASE_S + 2)
    finally:
        farm.sql("SET default_transaction_read_only = off; ALTER SYSTEM RESET default_transaction_read_only")
        farm.sql("SELECT pg_reload_conf()")
    farm.await_done([running])
    require(reruns(farm, [running]) == 0, "the job ran twice")


@fault("F37", "reply to the submit's COMMIT cut", "I1 I2 I3 I4 I5", short=True)
def submit_reply_lost(farm: Farm) -> str:
    """A client that gets no 202 asks again with its key, and gets the job that the lost commit made."""
    proxy, key = farm.proxies["postgres.api"], f"key-{uuid.uuid4()}"
    marker = f"marked {uuid.uuid4()}"
    with proxy.under(Weather(cut=CutReply(marker.encode(), READY_FOR_QUERY))):
        first = farm.client.post(marker, idempotency_key=key)
        require(proxy.cuts_done == 1, "no reply was cut")
    again = [farm.client.post(marker, idempotency_key=key) for _ in range(2)]
    ids = {answer.json()["id"] for answer in again}
    require(len(ids) == 1, f"one key made the jobs {ids}: {[answer.status_code for answer in again]}")
    rows = farm.sql("SELECT id FROM jobs WHERE params ->> 'prompt' = %s", marker)
    require(len(rows) == 1, f"{len(rows)} rows for one submit")
    other = farm.client.post("another body", idempotency_key=key)
    require(other.status_code == 422, f"another body under the key was answered {other.status_code}")
    farm.await_done(list(ids))
    return f"first answer {first.status_code}, then the same job twice"


@fault("F38", "a transaction holds locks on released and waiting jobs")
def lock_pile_up(farm: Farm) -> str:
    with farm.no_workers():
        held = farm.client.submit_many(f"held {n}" for n in range(12))
    url = farm.stack.environment["LATENTMILL_DATABASE_URL"]
    with psycopg.connect(url) as connection:
        ids = [uuid_of(job) for job in held]
        connection.execute(
            "SELECT 1 FROM jobs WHERE id = ANY(%s::uuid[]) AND state = 'queued' FOR UPDATE SKIP LOCKED", (ids,)
        )
        began = time.monotonic()
        others = farm.client.submit_many(f"free {n}" for n in range(4))
        farm.await_done(others, within_s=25)
        took = time.monotonic() - began
        connection.rollback()
    farm.await_done(held)
    return f"jobs beside the locked ones done after {took:.1f} s"


@fault("F39", "200 callers at once while every reply of Postgres takes 0.3 s")
def pool_exhausted(farm: Farm) -> str:
    with farm.proxies["postgres.api"].under(Weather(delay_s=0.3)), ThreadPoolExecutor(200) as pool:
        began = time.monotonic()
        answers = list(pool.map(lambda n: _status(farm.client, n), range(200)))
        took = time.monotonic() - began
    require(set(answers) <= {200, 202, 503}, f"answers {sorted(set(answers))}")
    require(took < ANSWER_S + 5, f"the last answer came after {took:.1f} s")
    jobs = farm.log.since(began)
    farm.await_done(jobs)
    return f"{answers.count(202) + answers.count(200)} served, {answers.count(503)} refused, all within {took:.1f} s"


@fault("F40", "a migration under load: columns and an index come and go, then `migrations upgrade`")
def migration_under_load(farm: Farm) -> str:
    with Storm(farm, 0.05) as storm:
        for statement in (
            "ALTER TABLE jobs ADD COLUMN of_a_newer_build integer",
            "ALTER TABLE attempts ADD COLUMN of_a_newer_build integer",
            "CREATE INDEX CONCURRENTLY of_a_newer_build ON jobs (of_a_newer_build)",
        ):
            farm.sql(statement)
            time.sleep(1)
        farm.run("migrations", "upgrade")
        time.sleep(1)
        farm.sql("ALTER TABLE jobs DROP COLUMN of_a_newer_build; ALTER TABLE attempts DROP COLUMN of_a_newer_build")
        time.sleep(1)
    storm.require_all_taken()
    farm.await_done(storm.taken)
    require(reruns(farm, storm.taken) == 0, "a job ran twice")
    return f"{len(storm.taken)} submits, all taken"


@fault("F55", "Postgres restarted with its clock an hour ahead, then an hour back", within_s=90)
def database_clock_steps(farm: Farm) -> str:
    running = farm.client.submit("slow [slow=1]")
    farm.await_running(running)
    # libfaketime would be loaded by postgres itself only where its user may read it; see clocks.py.
    farm.stack.stop_part("postgres")
    with shifted_clock(3600) as environment:
        farm.start_server_with("postgres", environment)
        time.sleep(3)
        jobs = farm.client.submit_many(["ahead"] * 2)
        farm.await_done([running, *jobs])
        farm.stack.stop_part("postgres")
    farm.start_part("postgres")
    farm.await_ready()
    after = farm.client.submit_many(["back"] * 2)
    farm.await_done(after)
    extra = reruns(farm, [running, *jobs, *after])
    require(extra <= 1, f"{extra} re-runs")
    return f"{extra} re-runs"


def _status(client: Caller, number: int) -> int:
    try:
        if number % 4 == 0:
            return client.post(f"crowd {number}").status_code
        return client.http.get("/v1/jobs", params={"limit": 5}).status_code
    except httpx.TransportError:
        return 0


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    """A tmpfs of this size at the folder. Raises SkippedError where this user may not mount."""
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    mount = shutil.which("mount")
    if os.getuid() != 0 or mount is None:
        raise SkippedError("mounting a small tmpfs takes root")
    done = subprocess.run(
        [mount, "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SkippedError(f"no tmpfs can be mounted: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False)  # noqa: S607
        folder.rmdir()


@contextmanager
def _small_tablespace(farm: Farm) -> Iterator[Path]:
    """A tablespace `small` on a disk of 24 MB; the file that may fill it."""
    data = farm.sql("SHOW data_directory")[0][0]
    owner = Path(data).stat()
    with small_disk(Path(data).parent / "small-disk", 24) as disk:
        space = disk / "space"
        space.mkdir()
        os.chown(space, owner.st_uid, owner.st_gid)
        farm.sql(f"CREATE TABLESPACE small LOCATION '{space}'")
        try:
            yield disk / "filler"
        finally:
            farm.sql("DROP TABLESPACE small")


def _fill(filler: Path) -> None:
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"\0" * 65_536)
        except OSError:
            return
