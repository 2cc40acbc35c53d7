"""Fetching a video: to a file beside the target, checked, and only then under its name."""

import hashlib
import re
import time
from pathlib import Path

import httpx

from latentmill.errors import ApiError, ConnectionFailedError, DownloadError, api_error
from latentmill.models import Result
from latentmill.transport import RetryPolicy

_SHA256 = re.compile(r"[0-9a-f]{64}")
_PARTIAL, _RANGE_NOT_SATISFIABLE = 206, 416


def fetch(http: httpx.Client, result: Result, target: Path, retry: RetryPolicy) -> None:
    """Write the video of `result` to `target`, whose folder must exist. What an earlier try left is resumed.

    `http` must carry no credentials: the address is signed, and may belong to another server. Raises ApiError when
    the address is refused (403, 410: expired), ConnectionFailedError, or DownloadError when the file is damaged.
    """
    _check(result)
    part = target.with_name(f".{target.name}.{result.sha256[:16]}.part")
    _complete(http, result, part, retry)
    with part.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != result.sha256:
        part.unlink()
        message = f"the file from {_bare(result.url)} is damaged (its SHA-256 is not the one the API told); try again"
        raise DownloadError(message)
    part.replace(target)


def _check(result: Result) -> None:
    """The checksum becomes a part of a file's name, and an empty video is none. Raises DownloadError."""
    if not _SHA256.fullmatch(result.sha256) or result.bytes < 1:
        message = "the server told no usable size and SHA-256 of the video"
        raise DownloadError(message)
    try:
        httpx.URL(result.url)
    except httpx.InvalidURL as error:
        message = "the server told an address of the video that is none"
        raise DownloadError(message) from error


def _complete(http: httpx.Client, result: Result, part: Path, retry: RetryPolicy) -> None:
    failures = 0
    while (have := _size(part)) != result.bytes:
        try:
            _receive(http, result, part, have if have < result.bytes else 0)
        except (httpx.RequestError, ApiError) as error:
            failures = 1 if _size(part) > have else failures + 1
            _raise_if_final(error, result.url, is_last=failures >= retry.attempts)
            time.sleep(retry.pause_s(failures))
        else:
            if _size(part) != result.bytes:
                part.unlink(missing_ok=True)
                message = f"{_bare(result.url)} is not the {result.bytes} bytes long that the API told; try again"
                raise DownloadError(message)


def _receive(http: httpx.Client, result: Result, part: Path, offset: int) -> None:
    headers = {"Range": f"bytes={offset}-"} if offset else {}
    with http.stream("GET", result.url, headers=headers) as response:
        if response.status_code == _RANGE_NOT_SATISFIABLE:
            part.unlink(missing_ok=True)
        if not response.is_success:
            raise api_error(response.status_code, None, response.headers)
        resumed = response.status_code == _PARTIAL and _starts_at(response, offset)
        with part.open("ab" if resumed else "wb") as file:
            written = offset if resumed else 0
            for chunk in response.iter_raw():  # as it comes: a chunk size would hold back what a break then loses
                file.write(chunk)
                written += len(chunk)
                if written > result.bytes:  # never fill the disk with what is not the video
                    return


def _starts_at(response: httpx.Response, offset: int) -> bool:
    return str(response.headers.get("content-range", "")).startswith(f"bytes {offset}-")


def _raise_if_final(error: httpx.RequestError | ApiError, url: str, *, is_last: bool) -> None:
    if isinstance(error, ApiError):
        if is_last or not (error.is_server_fault or error.status == _RANGE_NOT_SATISFIABLE):
            raise error
    elif is_last:
        raise ConnectionFailedError(_bare(url), str(error) or type(error).__name__) from error


def _size(part: Path) -> int:
    try:
        return part.stat().st_size
    except FileNotFoundError:
        return 0


def _bare(url: str) -> str:
    # The query is the signature: whoever reads a log must not be able to fetch the video.
    return url.partition("?")[0]
