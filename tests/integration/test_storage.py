"""Videos in the real bucket: who may read them, and that nothing else is open."""

import hashlib
import uuid
from pathlib import Path

import httpx
import pytest

from common.settings import StorageSettings
from common.storage import client, delete_object, prepare_bucket, presigner, upload_video, video_key
from common.urls import UrlSigner


@pytest.fixture
def video(tmp_path: Path, storage_settings: StorageSettings) -> tuple[str, bytes]:
    body = uuid.uuid4().bytes * 1000
    path = tmp_path / "v.mp4"
    path.write_bytes(body)
    sha256 = hashlib.sha256(body).hexdigest()
    key = video_key(uuid.uuid4(), 1, sha256)
    upload_video(client(storage_settings), storage_settings, path, key, sha256)
    return key, body


def object_url(settings: StorageSettings, key: str) -> str:
    return f"{settings.s3_endpoint}/{settings.s3_bucket}/{key}"


def test_an_uploaded_video_is_stored_whole(storage_settings: StorageSettings, video: tuple[str, bytes]) -> None:
    key, body = video
    stored = client(storage_settings).get_object(Bucket=storage_settings.s3_bucket, Key=key)
    assert stored["Body"].read() == body
    assert stored["ContentType"] == "video/mp4"


def test_the_edge_may_read_videos_without_a_key(storage_settings: StorageSettings, video: tuple[str, bytes]) -> None:
    assert httpx.get(object_url(storage_settings, video[0])).content == video[1]


def test_nothing_but_videos_is_open(storage_settings: StorageSettings, video: tuple[str, bytes]) -> None:
    client(storage_settings).put_object(Bucket=storage_settings.s3_bucket, Key="checkpoints/x", Body=b"secret")
    assert httpx.get(object_url(storage_settings, "checkpoints/x")).status_code == 403


@pytest.mark.parametrize(("method", "path"), [("GET", ""), ("GET", "?list-type=2"), ("PUT", "videos/mine.mp4")])
def test_nobody_lists_or_writes_without_a_key(storage_settings: StorageSettings, method: str, path: str) -> None:
    response = httpx.request(method, object_url(storage_settings, path), content=b"x" if method == "PUT" else None)
    assert response.status_code == 403


def test_nobody_deletes_without_a_key(storage_settings: StorageSettings, video: tuple[str, bytes]) -> None:
    assert httpx.delete(object_url(storage_settings, video[0])).status_code == 403


def test_a_presigned_address_works_until_it_is_changed(
    storage_settings: StorageSettings, video: tuple[str, bytes]
) -> None:
    settings = storage_settings.model_copy(update={"url_mode": "s3"})
    signed = UrlSigner(settings, presigner(settings)).sign(video[0]).url
    assert httpx.get(signed).content == video[1]
    assert httpx.get(signed.replace("X-Amz-Signature=", "X-Amz-Signature=0")).status_code == 403


def test_a_deleted_object_is_gone(storage_settings: StorageSettings, video: tuple[str, bytes]) -> None:
    delete_object(client(storage_settings), storage_settings, video[0])
    assert httpx.get(object_url(storage_settings, video[0])).status_code == 404


def test_preparing_a_bucket_again_changes_nothing(storage_settings: StorageSettings, video: tuple[str, bytes]) -> None:
    prepare_bucket(client(storage_settings), storage_settings)
    assert httpx.get(object_url(storage_settings, video[0])).status_code == 200
