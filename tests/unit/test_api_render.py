from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from api.render import MAY_EXPIRE, UNSERVED, Job, render_job
from api.submit import Accepted, NewJob
from common.db.readings import DEEPEST_POSITION
from common.domain.parameters import resolve
from common.events import JobProgress
from common.urls import SignedUrl

ID = UUID(int=7)
T0 = datetime(2026, 12, 1, 12, tzinfo=UTC)
PARAMETERS = resolve({"model": "tiny-wan2.2-t2v", "prompt": "a red circle"}, 1)
STATES = ["queued", "running", "succeeded", "failed", "cancelled", "expired"]


def row(state: str = "queued", **changed: Any) -> dict[str, Any]:
    new = NewJob(ID, ID, PARAMETERS, 5, {"a": "b"}, 60, 600)
    fresh = Accepted(new, 1, T0, position=3, jobs_per_s=0.5, served=True).as_row()
    if state != "queued":
        fresh |= {"state": state, "position": None, "attempt": 1, "started_at": T0 + timedelta(seconds=2)}
    if state == "succeeded":
        fresh |= {"object_key": "videos/a.mp4", "object_sha256": "ab", "object_bytes": 9, "batch_size": 2}
        fresh |= {"result": {"width": 64, "engine": "wan", "duration_s": 1.1}, "timings": {"denoise": 12.5, "load": 1}}
    return fresh | changed


def render(shown: dict[str, Any], last: JobProgress | None = None) -> dict[str, Any]:
    return render_job(shown, last, lambda key: SignedUrl(f"http://edge/{key}", 1_800_000_000))


def progress(attempt: int = 1, step: int = 4) -> JobProgress:
    return JobProgress(str(ID), str(ID), attempt, "denoise", step, 10, 2.5)


@pytest.mark.parametrize("state", STATES)
def test_a_body_in_any_state_is_what_openapi_promises(state: str) -> None:
    Job.model_validate(render(row(state), progress()))


def test_a_queued_job_shows_where_it_stands() -> None:
    assert render(row())["queue"] == {"position": 3, "ahead": 2, "est_start_s": 4.0, "note": None}


def test_without_a_pace_no_start_is_estimated() -> None:
    assert render(row(jobs_per_s=None))["queue"]["est_start_s"] is None


def test_a_queued_job_says_that_nobody_serves_its_model() -> None:
    assert render(row(served=False, jobs_per_s=None))["queue"]["note"] == UNSERVED


def test_a_queued_job_says_that_it_may_expire() -> None:
    assert render(row(expires_in_s=3.9))["queue"]["note"] == MAY_EXPIRE
    assert render(row(expires_in_s=4.1))["queue"]["note"] is None


def test_a_job_that_was_started_once_does_not_expire() -> None:
    assert render(row(expires_in_s=-1.0, attempt=1))["queue"]["note"] is None


def test_a_position_ends_where_counting_does_and_promises_no_start() -> None:
    shown = render(row(position=DEEPEST_POSITION + 5, expires_in_s=1e9))["queue"]
    assert shown == {"position": DEEPEST_POSITION, "ahead": DEEPEST_POSITION - 1, "est_start_s": None, "note": None}


def test_a_running_job_shows_its_last_progress() -> None:
    body = render(row("running"), progress())
    assert (body["phase"], body["progress"]) == ("denoise", {"step": 4, "steps": 10, "percent": 40, "eta_s": 2.5})


def test_progress_of_an_earlier_attempt_is_not_shown() -> None:
    body = render(row("running", attempt=2, phase="text", step=0), progress(attempt=1))
    assert (body["phase"], body["progress"]["step"]) == ("text", 0)


def test_without_redis_the_heartbeat_of_the_worker_is_shown() -> None:
    assert render(row("running", phase="denoise", step=3))["progress"]["percent"] == 30


def test_a_result_has_a_signed_address_and_the_facts_of_the_file() -> None:
    assert render(row("succeeded"))["result"] == {
        "url": "http://edge/videos/a.mp4",
        "expires_at": "2027-01-15T08:00:00.000Z",
        "sha256": "ab",
        "bytes": 9,
        "width": 64,
        "height": 64,
        "fps": 8,
        "num_frames": 9,
        "duration_s": 1.1,
        "engine": "wan",
    }


def test_timings_are_those_of_the_known_stages() -> None:
    assert render(row("succeeded"))["timings_ms"] == {"queue": 2000, "denoise": 12.5}


def test_an_error_is_shown_once_the_job_has_ended() -> None:
    failure = {"error_code": "poisoned", "error_message": "gone", "error_class": "child_crash"}
    assert render(row("queued", **failure))["error"] is None
    assert render(row("failed", **failure))["error"] == {"code": "poisoned", "message": "gone", "class": "child_crash"}


@pytest.mark.parametrize("state", ["cancelled", "expired", "failed"])
def test_an_ended_job_without_a_video_always_says_why(state: str) -> None:
    assert render(row(state))["error"]["code"] == state


def test_times_are_utc_to_the_millisecond() -> None:
    assert render(row())["created_at"] == "2026-12-01T12:00:00.000Z"
