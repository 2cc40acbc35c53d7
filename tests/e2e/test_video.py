"""From a prompt to a video that came down from the edge."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import av
import httpx
import pytest

from common.settings import StorageSettings
from common.urls import edge_url
from infra.local.stack import LocalStack
from latentmill import Client
from latentmill.models import Job
from models.pixel_test import expected_from_prompt, read_clip, verdict
from models.video_file import read_mp4
from tests.e2e.conftest import PROMPT, TINY

FRAMES, STEPS = 13, 6


@pytest.fixture(scope="module")
def followed(stack: LocalStack, api_key: str) -> Iterator[tuple[Job, list[dict[str, object]]]]:
    """One job, made while a WebSocket watched it: the finished job and every message."""
    with Client(stack.public_url, api_key) as client:
        job = client.submit(PROMPT, model=TINY, num_frames=FRAMES, num_inference_steps=STEPS, seed=3)
        messages = [dict(event.raw) for event in client.events(job.id, timeout_s=120)]
        yield client.get(job.id), messages


@pytest.fixture(scope="module")
def video(followed: tuple[Job, object], tmp_path_factory: pytest.TempPathFactory) -> Path:
    result = followed[0].result
    assert result is not None
    path = tmp_path_factory.mktemp("video") / "video.mp4"
    path.write_bytes(httpx.get(result.url).content)
    return path


def test_the_video_shows_what_the_prompt_said(video: Path) -> None:
    expected = expected_from_prompt(PROMPT)
    assert expected is not None
    frames, _ = read_mp4(video)
    assert verdict(expected, read_clip(frames)).wrong == ()


def test_the_row_names_the_real_object(followed: tuple[Job, object], video: Path) -> None:
    job = followed[0]
    assert job.status == "succeeded"
    assert job.result is not None
    assert job.result.sha256 == hashlib.sha256(video.read_bytes()).hexdigest()
    assert job.result.bytes == video.stat().st_size


def test_the_file_is_h264_of_the_asked_shape(video: Path) -> None:
    with av.open(str(video)) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.pix_fmt) == ("h264", "yuv420p")
        assert (stream.width, stream.height, stream.frames, stream.average_rate) == (64, 64, FRAMES, 8)


def test_the_index_comes_before_the_frames(video: Path) -> None:
    body = video.read_bytes()
    assert 0 < body.index(b"moov") < body.index(b"mdat")


def test_every_step_was_told_over_the_socket(followed: tuple[Job, list[dict[str, object]]]) -> None:
    steps = {m["step"] for m in followed[1] if m["type"] == "job.progress" and m["phase"] == "denoise"}
    assert steps >= set(range(1, STEPS + 1))


def test_the_socket_begins_with_a_snapshot_and_ends_with_the_result(
    followed: tuple[Job, list[dict[str, object]]],
) -> None:
    types = [message["type"] for message in followed[1]]
    assert types[0] == "snapshot"
    assert types[-1] == "job.state"
    assert followed[1][-1]["status"] == "succeeded"


def test_the_job_tells_how_long_each_stage_took(followed: tuple[Job, object]) -> None:
    timings = followed[0].raw["timings_ms"]
    assert set(timings) == {"queue", "text", "denoise", "decode", "encode", "upload"}


def test_a_range_is_answered_from_the_cache(followed: tuple[Job, object], video: Path) -> None:
    assert followed[0].result is not None
    answers = [
        httpx.get(followed[0].result.url, headers={"Range": f"bytes={start}-{start + 99}"}) for start in (0, 100)
    ]
    assert [answer.status_code for answer in answers] == [206, 206]
    assert answers[1].headers["X-Cache"] == "HIT"
    assert answers[1].content == video.read_bytes()[100:200]


def test_a_changed_signature_is_refused(followed: tuple[Job, object]) -> None:
    assert followed[0].result is not None
    address, signature = followed[0].result.url.split("&s=")
    changed = ("A" if signature[0] != "A" else "B") + signature[1:]
    assert httpx.get(f"{address}&s={changed}").status_code == 403


def test_an_expired_address_is_gone(followed: tuple[Job, object], stack: LocalStack) -> None:
    assert followed[0].result is not None
    key = followed[0].result.url.split("/v/")[1].split("?")[0]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in stack.environment.items():
            patch.setenv(name, value)
        settings = StorageSettings()  # type: ignore[call-arg]  # read from the environment
    assert httpx.get(edge_url(settings, key, expires=1_700_000_000)).status_code == 410


def test_the_same_seed_gives_the_same_file(followed: tuple[Job, object], client: Client) -> None:
    again = client.submit(PROMPT, model=TINY, num_frames=FRAMES, num_inference_steps=STEPS, seed=3)
    first, second = followed[0].result, client.wait(again.id, timeout_s=60).result
    assert first is not None
    assert second is not None
    assert first.sha256 == second.sha256


def test_sse_tells_the_same_story(http: httpx.Client) -> None:
    job = http.post("/v1/jobs", json={"model": TINY, "prompt": PROMPT, "num_inference_steps": 4}).json()
    with http.stream("GET", job["links"]["events"], timeout=60) as stream:
        lines = list(stream.iter_lines())
    events = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    last = json.loads([line for line in lines if line.startswith("data: ")][-1].removeprefix("data: "))
    assert events[0] == "snapshot"
    assert "job.progress" in events
    assert last["status"] == "succeeded"
