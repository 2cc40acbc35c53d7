"""A bucket that answers with errors is a bucket that is away: the upload must be tried again, not given up."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from common.settings import StorageSettings
from common.storage import StorageError, client, prepare_bucket, upload_video


class Unavailable(BaseHTTPRequestHandler):
    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_error(503)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Unavailable)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def settings(endpoint: str | None) -> StorageSettings:
    return StorageSettings(s3_endpoint=endpoint, s3_access_key="key", s3_secret_key="secret")


def test_a_bucket_that_answers_503_counts_as_away(endpoint: str, tmp_path: Path) -> None:
    video = tmp_path / "v.mp4"
    video.write_bytes(b"video")
    with pytest.raises(StorageError):
        upload_video(client(settings(endpoint)), settings(endpoint), video, "videos/x.mp4", "0" * 64)


def test_the_edge_mode_never_publishes_a_bucket_of_aws() -> None:
    away = settings(None)
    with pytest.raises(ValueError, match="LATENTMILL_S3_ENDPOINT"):
        prepare_bucket(_HeadOnly(), away)


class _HeadOnly:
    def head_bucket(self, **_: object) -> None:
        pass
