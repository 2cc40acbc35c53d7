"""From nothing to a first video, by the commands of the documentation."""

import hashlib
from pathlib import Path

import httpx
import pytest

from models.pixel_test import expected_from_prompt, read_clip, verdict
from models.video_file import read_mp4
from tests.compose.conftest import PROMPT, FirstVideo
from tests.compose.stack import ComposeStack


@pytest.fixture(scope="module")
def downloaded(first_video: FirstVideo) -> httpx.Response:
    """The first read of the video."""
    return httpx.get(first_video.address)


def test_everything_gets_healthy_from_nothing(first_stack: ComposeStack) -> None:
    health = {c.name: c.facts["State"].get("Health", {}).get("Status") for c in first_stack.containers()}
    assert set(health.values()) == {"healthy"}
    assert len(health) == 11


def test_every_task_of_a_start_ends_well(first_stack: ComposeStack) -> None:
    assert first_stack.exit_codes() == {"credentials": 0, "migrations": 0, "bucket": 0}


def test_the_video_shows_what_the_prompt_said(downloaded: httpx.Response, tmp_path: Path) -> None:
    video = tmp_path / "video.mp4"
    video.write_bytes(downloaded.content)
    expected = expected_from_prompt(PROMPT)
    assert expected is not None
    frames, _ = read_mp4(video)
    assert verdict(expected, read_clip(frames)).wrong == ()


def test_the_job_names_the_real_object(first_video: FirstVideo, downloaded: httpx.Response) -> None:
    result = first_video.job.result
    assert result is not None
    assert (result.sha256, result.bytes) == (hashlib.sha256(downloaded.content).hexdigest(), len(downloaded.content))


def test_the_edge_fetches_a_video_once(first_video: FirstVideo, downloaded: httpx.Response) -> None:
    again = httpx.get(first_video.address)
    assert [answer.headers["X-Cache"] for answer in (downloaded, again)] == ["MISS", "HIT"]
    assert again.content == downloaded.content


def test_a_range_is_answered_from_the_cache(first_video: FirstVideo, downloaded: httpx.Response) -> None:
    answer = httpx.get(first_video.address, headers={"Range": "bytes=100-199"})
    assert (answer.status_code, answer.headers["X-Cache"]) == (206, "HIT")
    assert answer.content == downloaded.content[100:200]


def test_a_changed_signature_is_refused(first_video: FirstVideo) -> None:
    address, signature = first_video.address.split("&s=")
    changed = ("A" if signature[0] != "A" else "B") + signature[1:]
    assert httpx.get(f"{address}&s={changed}").status_code == 403
