"""Downloads: whole, checked, resumed, and without our credentials."""

from pathlib import Path

import pytest

from latentmill import ApiError, Client, ConnectionFailedError, DownloadError, NoVideoError
from tests.unit.client_support import KEY, VIDEO, Farm, job


@pytest.fixture
def done(farm: Farm) -> str:
    return farm.add(job(status="succeeded", result=farm.result()))


def _ranges(farm: Farm) -> list[str | None]:
    return [request.headers.get("range") for request in farm.requests if request.url.path.startswith("/v/")]


def test_the_file_is_the_video_and_nothing_else_is_left(client: Client, done: str, tmp_path: Path) -> None:
    target = tmp_path / "clip.mp4"
    assert client.download(done, target) == target
    assert target.read_bytes() == VIDEO
    assert list(tmp_path.iterdir()) == [target]


def test_a_folder_gets_a_file_named_by_the_id(client: Client, done: str, tmp_path: Path) -> None:
    assert client.download(done, tmp_path) == tmp_path / f"{done}.mp4"


def test_the_media_server_never_sees_the_key(farm: Farm, client: Client, done: str, tmp_path: Path) -> None:
    client.download(done, tmp_path)
    api, media = farm.requests
    assert "authorization" in api.headers
    assert "authorization" not in media.headers
    assert KEY not in str(media.headers)


def test_a_broken_download_goes_on_where_it_broke(farm: Farm, client: Client, done: str, tmp_path: Path) -> None:
    farm.media_cuts.append(1000)
    assert client.download(done, tmp_path).read_bytes() == VIDEO
    assert _ranges(farm) == [None, "bytes=1000-"]


def test_a_later_run_goes_on_where_an_earlier_one_ended(farm: Farm, client: Client, done: str, tmp_path: Path) -> None:
    farm.media_cuts.extend([5000, 0, 0, 0])
    with pytest.raises(ConnectionFailedError):
        client.download(done, tmp_path)
    assert client.download(done, tmp_path).read_bytes() == VIDEO
    assert _ranges(farm)[-1] == "bytes=5000-"


def test_a_wrong_checksum_leaves_no_file(farm: Farm, client: Client, done: str, tmp_path: Path) -> None:
    farm.video = bytes(len(VIDEO))
    with pytest.raises(DownloadError, match="SHA-256"):
        client.download(done, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("length", [10, len(VIDEO) + 10])
def test_a_wrong_length_leaves_no_file(farm: Farm, client: Client, done: str, tmp_path: Path, length: int) -> None:
    farm.video = bytes(length)
    with pytest.raises(DownloadError, match="long"):
        client.download(done, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "odd",
    [
        {"sha256": "../../evil"},
        {"sha256": "a/b" * 30},
        {"sha256": ""},
        {"sha256": "nul\0"},
        {"bytes": 0},
        {"bytes": -1},
        {"url": "http://farm:port/v"},
    ],
    ids=str,
)
def test_what_no_server_should_tell_is_no_download(
    farm: Farm, client: Client, tmp_path: Path, odd: dict[str, object]
) -> None:
    told = farm.add(job(status="succeeded", result=farm.result(**odd)))
    with pytest.raises(DownloadError, match="the server told"):
        client.download(told, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_older_file_is_kept_when_the_download_fails(farm: Farm, client: Client, done: str, tmp_path: Path) -> None:
    target = tmp_path / "clip.mp4"
    target.write_bytes(b"older")
    farm.video = bytes(len(VIDEO))
    with pytest.raises(DownloadError):
        client.download(done, target)
    assert target.read_bytes() == b"older"


def test_an_expired_address_is_replaced_by_a_fresh_one(farm: Farm, client: Client, done: str, tmp_path: Path) -> None:
    farm.media_refusals.append(410)
    assert client.download(done, tmp_path).read_bytes() == VIDEO
    assert farm.paths().count(f"GET /v1/jobs/{done}") == 2


def test_an_address_that_stays_refused_is_told(farm: Farm, client: Client, done: str, tmp_path: Path) -> None:
    farm.media_refusals.extend([403, 403])
    with pytest.raises(ApiError) as refused:
        client.download(done, tmp_path)
    assert refused.value.status == 403


def test_the_edge_may_be_down_for_a_moment(farm: Farm, client: Client, done: str, tmp_path: Path) -> None:
    farm.media_refusals.append(502)
    assert client.download(done, tmp_path).read_bytes() == VIDEO


def test_a_job_without_a_video_says_why(farm: Farm, client: Client, tmp_path: Path) -> None:
    failed = farm.add(job(status="failed", error={"code": "oom", "message": "too large", "class": "oom"}))
    with pytest.raises(NoVideoError, match="failed; oom: too large"):
        client.download(failed, tmp_path)
