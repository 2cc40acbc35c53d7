"""A finished video outlives the process that made it, and is delivered without another run of the GPU."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from uuid import UUID

import pytest

from common.settings import StorageSettings
from common.storage import client
from tests.integration.conftest import Store
from tests.integration.workers import NO_BUCKET, Workers, outcomes, submit, until, wait_for_end, workers_of


@pytest.fixture
def workers(environment: Mapping[str, str], tmp_path: Path, store: Store) -> Iterator[Workers]:
    with workers_of(environment, tmp_path, store) as workers:
        yield workers


def spooled_job(store: Store, workers: Workers, name: str = "w1") -> UUID:
    """A job whose video waits for a bucket that is away."""
    (job_id,) = submit(store, "quick")
    workers.start(name, NO_BUCKET)
    until(lambda: list((workers.spool / name).glob("*.json")), bool)
    return job_id


def stored_bytes(settings: StorageSettings, store: Store, job_id: UUID) -> int:
    key = store.row(job_id).object_key
    return int(client(settings).head_object(Bucket=settings.s3_bucket, Key=key)["ContentLength"])


def test_a_killed_worker_that_comes_back_delivers_what_it_had_finished(
    store: Store, workers: Workers, storage_settings: StorageSettings
) -> None:
    job_id = spooled_job(store, workers)
    workers.kill("w1")
    workers.start("w1")
    assert wait_for_end(store, job_id) == ["succeeded"]
    assert outcomes(store, job_id) == ["succeeded"]
    assert stored_bytes(storage_settings, store, job_id) == store.row(job_id).object_bytes
    until(lambda: list((workers.spool / "w1").glob("*.*")), lambda left: left == [])


def test_a_worker_that_leaves_keeps_its_finished_video_for_the_next_one(store: Store, workers: Workers) -> None:
    job_id = spooled_job(store, workers)
    assert workers.leave("w1") == 0
    assert (store.row(job_id).state, store.row(job_id).failures) == ("queued", {})
    workers.start("w1")
    assert wait_for_end(store, job_id) == ["succeeded"]
    assert store.row(job_id).attempt == 1


def test_a_dead_workers_video_is_delivered_by_the_next_that_starts_there(store: Store, workers: Workers) -> None:
    job_id = spooled_job(store, workers, "dead")
    workers.kill("dead")
    workers.start("other")
    assert wait_for_end(store, job_id) == ["succeeded"]
    assert outcomes(store, job_id) == ["succeeded"]
    assert store.row(job_id).result["worker"] == "dead"
    assert not (workers.spool / "dead").exists()


def test_a_queued_job_is_not_run_again_while_its_video_waits_for_the_bucket(store: Store, workers: Workers) -> None:
    job_id = spooled_job(store, workers)
    workers.leave("w1")
    workers.start("w1", NO_BUCKET)
    # Longer than the lease that the job was left for; a second worker is there to take it.
    until(lambda: store.sql("SELECT run_at > created_at + interval '12 seconds' AS kept FROM jobs")[0].kept, bool)
    workers.start("w2")
    workers.leave("w1")
    workers.start("w1")
    assert wait_for_end(store, job_id) == ["succeeded"]
    assert store.row(job_id).attempt == 1


def test_a_video_whose_job_was_run_by_another_worker_is_dropped(store: Store, workers: Workers) -> None:
    job_id = spooled_job(store, workers)
    workers.kill("w1")
    store.sql("UPDATE jobs SET state = 'queued', dispatched_at = now() WHERE id = :id", id=job_id)
    store.claim(job_id, worker="w2")
    workers.start("w1")
    until(lambda: workers.said("w1", "spooled_result_dropped"), bool)
    assert (store.row(job_id).state, store.row(job_id).attempt) == ("running", 2)
    assert list((workers.spool / "w1").glob("*.*")) == []


def test_a_video_whose_job_was_cancelled_meanwhile_is_dropped(store: Store, workers: Workers) -> None:
    job_id = spooled_job(store, workers)
    workers.kill("w1")
    store.sql("UPDATE jobs SET cancel_requested_at = now() WHERE id = :id", id=job_id)
    workers.start("w1")
    assert wait_for_end(store, job_id) == ["cancelled"]
    assert list((workers.spool / "w1").glob("*.*")) == []


def test_a_changed_video_is_never_delivered(store: Store, workers: Workers) -> None:
    job_id = spooled_job(store, workers)
    workers.kill("w1")
    (video,) = (workers.spool / "w1").glob("*.mp4")
    video.write_bytes(video.read_bytes()[:-1])
    store.sql("UPDATE jobs SET deadline = now() + interval '1 hour'")
    workers.start("w1")
    until(lambda: workers.said("w1", "spool_entry_unusable"), bool)
    assert list((workers.spool / "w1").glob("*.*")) == []
    assert store.row(job_id).state == "running"


def test_a_video_goes_when_its_job_is_past_its_deadline(store: Store, workers: Workers) -> None:
    (job_id,) = submit(store, "quick", deadline_s=6)
    workers.start("w1", NO_BUCKET)
    assert wait_for_end(store, job_id) == ["failed"]
    assert store.row(job_id).error_code == "deadline_exceeded"
    until(lambda: list((workers.spool / "w1").glob("*.*")), lambda left: left == [])


def test_a_worker_with_too_many_undelivered_videos_takes_no_more_jobs(store: Store, workers: Workers) -> None:
    submit(store, "one", "two", "three")
    workers.start("w1", NO_BUCKET, {"LATENTMILL_SPOOL_JOBS": "2"})
    until(lambda: store.sql("SELECT accepting FROM workers")[0].accepting, lambda accepting: accepting is False)
    assert len(store.sql("SELECT 1 FROM jobs WHERE state = 'running'")) == 2


def test_a_worker_with_too_many_undelivered_bytes_takes_no_more_jobs(store: Store, workers: Workers) -> None:
    submit(store, "one", "two")
    workers.start("w1", NO_BUCKET, {"LATENTMILL_SPOOL_BYTES": "1"})
    until(lambda: store.sql("SELECT accepting FROM workers")[0].accepting, lambda accepting: accepting is False)
    assert len(store.sql("SELECT 1 FROM jobs WHERE state = 'running'")) == 1
