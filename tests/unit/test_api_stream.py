import asyncio
import contextlib
import json
from typing import Any
from uuid import UUID

from api.reads import JobView
from api.stream import (
    GOING_AWAY,
    MAX_SNAPSHOT_CHARS,
    MAX_UNREAD_CHARS,
    MAX_UNREAD_FOR_PROGRESS,
    PROGRESS_BURST,
    TRY_LATER,
    Bucket,
    Change,
    Frame,
    Step,
    Stream,
    snapshot_frames,
    state_frame,
)

TENANT, JOB, OTHER = UUID(int=1), UUID(int=2), UUID(int=3)


def view(version: int, state: str = "running", job_id: UUID = JOB, text: str = "") -> JobView:
    return JobView(job_id, TENANT, version, 1, state, {"id": str(job_id.int), "text": text})


def change(version: int, state: str = "running", job_id: UUID = JOB, *, first: bool = True) -> Change:
    seen = view(version, state, job_id)
    return Change(seen, state_frame(seen), first)


def step(number: int, attempt: int = 1, job_id: UUID = JOB) -> Step:
    return Step(job_id, attempt, Frame("job.progress", json.dumps({"type": "job.progress", "step": number})))


def following(*views: JobView) -> Stream:
    stream = Stream(TENANT)
    stream.adopt(views)
    return stream


def sent(stream: Stream) -> list[dict[str, Any]]:
    """Everything that waits to be sent."""

    async def drain() -> list[dict[str, Any]]:
        stream.close(GOING_AWAY)
        messages = []
        while (frame := await stream.next()) is not None:
            messages.append(json.loads(frame.text))
        return messages

    return asyncio.run(drain())


def versions(stream: Stream) -> list[int]:
    return [message["seq"] for message in sent(stream) if message["type"] == "job.state"]


def test_a_version_is_told_once_and_in_order() -> None:
    stream = following(view(1))
    for version in (2, 2, 4, 3, 4, 5):
        stream.tell_change(change(version))
    assert versions(stream) == [2, 4, 5]


def test_nothing_follows_the_end_of_a_job() -> None:
    stream = following(view(1))
    stream.tell_change(change(2, "succeeded"))
    stream.tell_change(change(2, "succeeded"))
    stream.tell_step(step(1), 0)
    assert versions(stream) == [2]


def test_a_job_that_is_not_followed_is_not_told() -> None:
    stream = following(view(1))
    stream.tell_change(change(1, job_id=OTHER))
    stream.tell_step(step(1, job_id=OTHER), 0)
    assert sent(stream) == []


def test_who_follows_everything_learns_of_new_jobs() -> None:
    stream = following()
    stream.follow_all(UUID(int=0))
    stream.adopt(())
    stream.tell_change(change(1, "queued", OTHER))
    stream.tell_change(change(2, "cancelled", OTHER))
    stream.tell_change(change(2, "cancelled", OTHER, first=False))
    assert versions(stream) == [1, 2]


def test_the_snapshot_comes_first_and_what_came_meanwhile_after_it() -> None:
    stream = Stream(TENANT, loading=True)
    stream.tell_change(change(2))
    stream.tell_change(change(3))
    stream.tell_step(step(7), 0)
    stream.tell_snapshot([view(2)])
    stream.adopt([view(2)])
    assert [message["type"] for message in sent(stream)] == ["snapshot", "job.state", "job.progress"]


def test_an_end_that_the_snapshot_shows_is_not_told_again() -> None:
    stream = Stream(TENANT, everything_since=UUID(int=0), loading=True)
    stream.tell_change(change(3, "failed"))
    stream.tell_snapshot([view(3, "failed")])
    stream.adopt([view(3, "failed")])
    assert versions(stream) == []


def test_a_job_that_was_not_seen_running_shows_its_steps_before_its_end() -> None:
    queued = JobView(JOB, TENANT, 1, 0, "queued", {"id": "2"})
    stream = following(queued)
    stream.tell_steps([step(1), step(2)], 1, 0)
    stream.tell_change(change(3, "succeeded"))
    assert [message["type"] for message in sent(stream)] == ["job.progress", "job.progress", "job.state"]


def test_progress_of_another_attempt_is_not_told() -> None:
    stream = following(view(1))
    stream.tell_step(step(1, attempt=2), 0)
    assert sent(stream) == []
    assert (stream.lags(JOB, 2), stream.lags(JOB, 1)) == (True, False)


async def waits(stream: Stream) -> bool:
    """Whether a frame waits to be sent; takes it."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0):
            return await stream.next() is not None
    return False


async def test_a_short_job_shows_every_step_and_a_long_flood_two_a_second() -> None:
    stream, told = following(view(1)), []
    for number in range(1000):  # 100 s of ten steps a second
        stream.tell_step(step(number), number / 10)
        if await waits(stream):
            told.append(number)
    assert told[: int(PROGRESS_BURST)] == list(range(int(PROGRESS_BURST)))
    assert PROGRESS_BURST + 195 <= len(told) <= PROGRESS_BURST + 205


def test_a_bucket_allows_its_burst_and_then_its_rate() -> None:
    bucket = Bucket(rate=10, burst=50)
    assert sum(bucket.take(100.0) for _ in range(100)) == 50
    assert sum(bucket.take(100.0 + number / 100) for number in range(1, 101)) == 10


def test_who_is_expelled_is_told_why_and_nothing_else() -> None:
    stream = following(view(1))
    stream.tell_change(change(2))
    stream.expel(4401, code="unauthenticated", message="revoked")
    stream.tell_change(change(3))
    assert stream.close_code == 4401
    assert sent(stream) == [{"type": "error", "code": "unauthenticated", "message": "revoked"}]


def test_the_job_in_an_event_is_the_body_that_was_read() -> None:
    seen = view(2, text='a "red" circle')
    assert json.loads(state_frame(seen).text)["job"] == seen.body


def test_a_slow_reader_misses_progress_and_no_state() -> None:
    stream = following(view(1))
    for version in range(2, 2 + MAX_UNREAD_FOR_PROGRESS):
        stream.tell_change(change(version))
    stream.tell_step(step(1), 0)
    stream.tell_change(change(1000, "succeeded"))
    messages = sent(stream)
    assert {message["type"] for message in messages} == {"job.state"}
    assert messages[-1]["seq"] == 1000


def test_a_reader_that_stands_still_is_closed() -> None:
    stream = following(view(1))
    huge = view(2, text="x" * (MAX_UNREAD_CHARS // 3))
    for version in range(2, 6):
        stream.tell_change(Change(view(version), Frame("job.state", state_frame(huge).text)))
    assert (stream.close_code, sent(stream)) == (TRY_LATER, [])


def test_a_long_snapshot_is_several_frames() -> None:
    views = [view(1, job_id=UUID(int=n), text="x" * (MAX_SNAPSHOT_CHARS // 2)) for n in range(5)]
    frames = snapshot_frames(views)
    assert [len(json.loads(frame.text)["jobs"]) for frame in frames] == [1, 1, 1, 1, 1]


def test_an_empty_snapshot_is_a_frame_too() -> None:
    assert [frame.text for frame in snapshot_frames([])] == ['{"type":"snapshot","jobs":[]}']


def test_the_snapshot_of_one_ended_job_is_its_last_frame() -> None:
    (frame,) = snapshot_frames([view(4, "succeeded")])
    assert (frame.seq, frame.last) == (4, True)


def test_a_missed_job_is_one_that_is_newer_than_the_subscription() -> None:
    stream = following(view(2))
    stream.everything_since = UUID(int=2)
    assert [stream.misses(JOB, 2), stream.misses(JOB, 3), stream.misses(OTHER, 1), stream.misses(UUID(int=1), 1)] == [
        False, True, True, False,
    ]  # fmt: skip
