"""Jobs and videos outlive their containers: `down`, then `up` with other workers."""

import hashlib

import httpx

from latentmill import Client
from tests.compose.conftest import FirstVideo
from tests.compose.stack import ComposeStack


def test_a_job_is_still_there_after_down_and_up(
    synthetic_stack: ComposeStack, first_video: FirstVideo, client: Client
) -> None:
    before, after = first_video.job, client.get(first_video.job.id)
    assert before.result is not None
    assert after.result is not None
    assert (after.status, after.seq, after.result.sha256) == (before.status, before.seq, before.result.sha256)


def test_the_address_that_was_printed_before_still_works(
    synthetic_stack: ComposeStack, first_video: FirstVideo
) -> None:
    assert first_video.job.result is not None
    answer = httpx.get(first_video.address)
    assert hashlib.sha256(answer.content).hexdigest() == first_video.job.result.sha256


def test_a_video_that_nobody_has_read_comes_from_the_bucket(
    synthetic_stack: ComposeStack, first_video: FirstVideo, client: Client
) -> None:
    kept = client.get(first_video.unread.id).result
    assert first_video.unread.result is not None
    assert kept is not None
    answer = httpx.get(kept.url)
    assert answer.headers["X-Cache"] == "MISS"
    assert hashlib.sha256(answer.content).hexdigest() == first_video.unread.result.sha256


def test_every_task_of_a_start_ends_well_on_what_is_there_already(synthetic_stack: ComposeStack) -> None:
    assert synthetic_stack.exit_codes() == {"credentials": 0, "migrations": 0, "bucket": 0}
