"""A bucket that is away, slow, lies or loses, and a worker's disk that is full (F42 to F47, F57)."""

import resource
import time

from common.domain.jobs import ErrorClass
from tests.faults.broker_faults import Storm, reruns
from tests.faults.database_faults import small_disk
from tests.faults.farm import LEASE_S, WORKERS, Farm, until
from tests.faults.fault import fault, require
from tests.faults.proxy import CutReply, Weather

REFUSED = b"HTTP/1.1 500 Internal Server Error\r\nContent-Type: application/xml\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


@fault("F42", "the bucket away for several leases while jobs end", short=True, within_s=90)
def bucket_away(farm: Farm) -> str:
    seconds = 35 if farm.thorough else 12
    running = farm.client.submit("slow [slow=0.2]")
    farm.await_running(running)
    farm.stack.stop_part("s3")
    with Storm(farm, 0.5) as storm:
        time.sleep(seconds)
        waiting = farm.sql("SELECT count(*) AS jobs FROM attempts WHERE ended_at IS NULL AND phase = 'upload'")[0].jobs
    farm.start_part("s3")
    storm.require_all_taken()
    jobs = [running, *storm.taken]
    farm.await_done(jobs, within_s=90)
    require(reruns(farm, jobs) == 0, "a job ran twice")
    return f"{seconds} s away (lease {LEASE_S:g} s), {waiting} videos waited, 0 re-runs of {len(jobs)} jobs"


@fault("F42b", "the worker killed while its video waits for the bucket: the spool survives", within_s=90)
def spool_survives(farm: Farm) -> str:
    farm.stack.stop_part("s3")
    jobs = farm.client.submit_many(["spooled"] * 3, deterministic=True)
    upload = "SELECT worker_id FROM attempts WHERE ended_at IS NULL AND phase = 'upload'"
    rows = until(lambda: farm.sql(upload), lambda found: len(found) == len(jobs), 30, "three videos that wait")
    victims = {row.worker_id for row in rows}
    for victim in victims:
        farm.kill(victim)
    farm.start_part("s3")
    for victim in victims:
        farm.start_part(victim)
    farm.await_done(jobs, within_s=90)
    require(reruns(farm, jobs) == 0, f"videos were made again: {[farm.outcomes(job) for job in jobs]}")
    left = [path for worker in WORKERS for path in (farm.stack.layout.spool / worker).glob("*.mp4*")]
    require(not left, f"the spool still holds {left}")
    return f"{len(victims)} workers killed, 3 videos delivered by their successors, 0 re-runs"


@fault("F43", "the bucket slow (1 KB/s), then stalled in the middle", within_s=90)
def bucket_slow(farm: Farm) -> str:
    proxy = farm.proxies["s3.worker"]
    with proxy.under(Weather(bytes_per_s=1000)):
        job = farm.client.submit("slow upload [slow=0.05]")
        until(lambda: farm.row(job).state, lambda state: state == "running")
        began = time.monotonic()
        until(lambda: farm.sql("SELECT 1 FROM attempts WHERE phase = 'upload' AND ended_at IS NULL"), bool, 20)
        proxy.set(Weather(swallowed=True))
        time.sleep(2 * LEASE_S)
        proxy.set(Weather(bytes_per_s=1000))
        farm.await_done([job])
    require(reruns(farm, [job]) == 0, "the lease was not kept during the upload")
    return f"uploaded in {time.monotonic() - began:.1f} s, lease {LEASE_S:g} s"


@fault("F44", "the bucket stores the object and answers 500, three times")
def bucket_lies_about_failure(farm: Farm) -> None:
    proxy = farm.proxies["s3.worker"]
    with proxy.under(Weather(cut=CutReply(b"PUT /latentmill/videos/", b"HTTP/1.1", REFUSED, times=3))):
        job = farm.client.submit("stored all the same")
        farm.await_done([job])
        require(proxy.cuts_done >= 1, "no answer was replaced")
    require(farm.outcomes(job) == ["succeeded"], f"attempts {farm.outcomes(job)}")
    ours = [key for key in farm.bucket.videos() if job.removeprefix("job_") in key.replace("-", "")]
    require(len(ours) == 1, f"the job left {ours}")


@fault("F45", "the bucket holds fewer bytes than were sent, says its HEAD")
def bucket_truncates(farm: Farm) -> None:
    job = farm.client.submit("truncated")
    farm.await_done([job])
    size = farm.row(job).object_bytes
    proxy = farm.proxies["s3.worker"]
    # The same prompt and seed make the same bytes.
    told, lie = (f"Content-Length: {number}\r".encode() for number in (size, size - 1))
    with proxy.under(Weather(rewrite=(told, lie))):
        again = farm.client.submit("truncated", seed=farm.row(job).params["seed"])
        until(lambda: farm.sql("SELECT 1 FROM attempts WHERE phase = 'upload' AND ended_at IS NULL"), bool, 20)
        time.sleep(2)
        require(farm.row(again).state == "running", f"a truncated object was taken: {farm.row(again).state}")
    farm.await_done([again])
    require(farm.outcomes(again) == ["succeeded"], f"attempts {farm.outcomes(again)}")


@fault("F46", "objects deleted behind the farm's back", "I1 I2 I3")
def object_deleted(farm: Farm) -> str:
    job = farm.client.submit("deleted later")
    farm.await_done([job])
    farm.bucket.remove(farm.row(job).object_key)
    answer = farm.client.http.get(farm.client.get(job)["result"]["url"])
    require(answer.status_code in {404, 410}, f"its address answers {answer.status_code}")
    return f"its address answers {answer.status_code}"


@fault("F47", "a worker's spool on a full disk", within_s=90)
def spool_disk_full(farm: Farm) -> str:
    folder = farm.stack.layout.root.with_name(f"{farm.stack.layout.root.name}-small-spool")
    farm.stack.stop_part("worker-1")
    with small_disk(folder, 1) as disk:
        filler = disk / "filler"
        farm.start_part("worker-1", LATENTMILL_SPOOL_DIR=str(disk))
        with filler.open("wb", buffering=0) as file:
            while _written(file):
                pass
        jobs = farm.client.submit_many((f"n {n}" for n in range(6)), deterministic=True)
        farm.await_done(jobs, within_s=60)
        outcomes = [outcome for job in jobs for outcome in farm.outcomes(job)]
        accepting = farm.sql("SELECT accepting FROM workers WHERE id = 'worker-1'")
        filler.unlink()
        until(
            lambda: farm.sql("SELECT 1 FROM workers WHERE id = 'worker-1' AND accepting"),
            bool,
            60,
            "the worker's return",
        )
        farm.stack.stop_part("worker-1")
    farm.start_part("worker-1")
    failed = outcomes.count(ErrorClass.INFRASTRUCTURE)
    require(failed <= 6, f"{failed} attempts failed on the full disk")
    return f"{failed} attempts failed there, accepting {[row.accepting for row in accepting]}, 6 jobs done elsewhere"


@fault("F60", "a worker that fails every job at once (it can write no file)", within_s=120)
def black_hole(farm: Farm) -> str:
    farm.limit("worker-1", resource.RLIMIT_FSIZE, 0)
    jobs = farm.client.submit_many((f"n {n}" for n in range(16)), deterministic=True)
    try:
        farm.await_done(jobs, within_s=100)
        failed = sum(farm.outcomes(job).count(ErrorClass.INFRASTRUCTURE) for job in jobs)
        require(failed <= 8, f"{failed} attempts failed: the worker stayed in rotation")
    finally:
        farm.limit("worker-1", resource.RLIMIT_FSIZE, -1)
    farm.await_ready(within_s=60)
    return f"{failed} attempts failed on it, 16 jobs done, back in rotation"


def _written(file: object) -> bool:
    try:
        file.write(b"\0" * 4096)  # type: ignore[attr-defined]
    except OSError:
        return False
    return True
