"""Following jobs over a real WebSocket, through restarts, and without one."""

import pytest

from latentmill import ApiError, Client, ConnectionFailedError, WaitTimeoutError
from latentmill.progress import Board
from tests.unit.client_support import KEY, QUICK, RESTART, Farm, job, state, step, unused_url

QUEUED = job(seq=1)
RUNNING = job(status="running", seq=2, attempt=1, phase="text")
DONE = job(status="succeeded", seq=3, attempt=1)
SNAPSHOT = {"type": "snapshot", "jobs": [QUEUED]}


def test_events_start_with_the_snapshot_and_end_with_the_job(farm: Farm, client: Client) -> None:
    farm.scripts.append([SNAPSHOT, state(RUNNING), step(RUNNING, 1), step(RUNNING, 2), state(DONE)])
    events = list(client.events(QUEUED["id"]))
    assert [event.type for event in events] == ["snapshot", "job.state", "job.progress", "job.progress", "job.state"]
    assert events[2].jobs[0].progress.step == 1
    assert farm.subscriptions == [{"type": "subscribe", "job_ids": [QUEUED["id"]]}]


def test_a_restart_of_the_server_is_survived(farm: Farm, client: Client) -> None:
    farm.add(RUNNING)
    farm.scripts.append([SNAPSHOT, state(RUNNING), step(RUNNING, 1), RESTART])
    farm.scripts.append([{"type": "snapshot", "jobs": [RUNNING]}, step(RUNNING, 2), state(DONE)])
    steps = [event.jobs[0].progress.step for event in client.events(QUEUED["id"]) if event.type == "job.progress"]
    assert steps == [1, 2]
    assert len(farm.subscriptions) == 2


def test_what_ended_during_the_gap_is_seen(farm: Farm, client: Client) -> None:
    farm.add(DONE)
    farm.scripts.append([SNAPSHOT, RESTART])
    assert client.wait(QUEUED["id"]).status == "succeeded"


def test_only_unfinished_jobs_are_subscribed_again(farm: Farm, client: Client) -> None:
    other = job(2)
    farm.add(other)
    farm.scripts.append([{"type": "snapshot", "jobs": [DONE, other]}, RESTART])
    farm.scripts.append([{"type": "snapshot", "jobs": [job(2, "failed", seq=2)]}])
    list(client.events(DONE["id"], other["id"]))
    assert farm.subscriptions[1]["job_ids"] == [other["id"]]


def test_without_websockets_jobs_are_read_by_get(farm: Farm, client: Client) -> None:
    farm.has_sockets = False
    farm.add(RUNNING)
    events = client.events(QUEUED["id"])
    assert next(events).jobs[0].status == "running"
    farm.add(DONE)
    assert [event.jobs[0].status for event in events] == ["succeeded"]


def test_an_unknown_job_is_refused(farm: Farm, client: Client) -> None:
    farm.scripts.append([{"type": "error", "code": "not_found", "message": "no such job", "job_id": "job_x"}])
    with pytest.raises(ApiError, match="job_x"):
        list(client.events("job_x"))


def test_a_bad_key_is_refused(farm: Farm) -> None:
    with Client(farm.url, "lm_wrong", QUICK) as client, pytest.raises(ApiError) as refused:
        list(client.events("job_1"))
    assert refused.value.status == 401


def test_trouble_of_the_server_is_waited_out(farm: Farm, client: Client) -> None:
    farm.add(QUEUED)
    farm.scripts.append([{"type": "error", "code": "database_unavailable", "message": "try again"}, 1013])
    farm.scripts.append([SNAPSHOT, state(DONE)])
    assert client.wait(QUEUED["id"]).status == "succeeded"


def test_no_server_from_the_start_is_told_soon() -> None:
    with Client(unused_url(), KEY, QUICK) as client, pytest.raises(ConnectionFailedError):
        list(client.events("job_1"))


def test_waiting_ends_when_its_time_is_over(farm: Farm, client: Client) -> None:
    farm.scripts.append([SNAPSHOT])
    with pytest.raises(WaitTimeoutError):
        client.wait(QUEUED["id"], timeout_s=0.2)


def test_an_older_state_does_not_replace_a_newer_one() -> None:
    board = Board([QUEUED["id"]])
    board.read(state(RUNNING))
    assert board.read(SNAPSHOT) is None


def test_a_late_step_does_not_revive_a_job_that_waits_again() -> None:
    board = Board([QUEUED["id"]])
    board.read(state(job(status="queued", seq=4, attempt=1)))
    assert board.read(step(QUEUED, 2, attempt=1)) is None


def test_a_step_of_a_new_attempt_is_taken_before_its_state() -> None:
    board = Board([QUEUED["id"]])
    board.read(SNAPSHOT)
    event = board.read(step(QUEUED, 1, attempt=1))
    assert event is not None
    assert (event.jobs[0].status, event.jobs[0].attempt) == ("running", 1)


def test_messages_of_a_later_protocol_are_ignored() -> None:
    assert Board(["job_1"]).read({"type": "job.preview", "job_id": "job_1"}) is None
