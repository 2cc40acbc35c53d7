"""The API as Python calls."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from ssl import SSLContext
from types import TracebackType
from typing import Any, Self, Unpack
from urllib.parse import quote

import httpx

from latentmill.download import fetch
from latentmill.errors import ApiError, BadAnswerError, NoVideoError
from latentmill.models import Document, Job, JobOptions, Result
from latentmill.progress import Event, Source, follow
from latentmill.transport import DEFAULT_RETRY, RetryPolicy, call

DEFAULT_URL = "http://127.0.0.1:8080"
# An answer takes milliseconds, a submit during an outage of the broker a quarter of a second more.
_TIMEOUT = httpx.Timeout(30, connect=5)
_PAGE = 100
_EXPIRED_ADDRESS = frozenset({403, 410})


class Client:
    """A latentmill server at `url`. `api_key` is sent to that server only; one client belongs to one thread.

    Every call raises ApiError when the server refuses and ConnectionFailedError when it cannot be reached. Reads are
    repeated after connection errors, 502, 503 and 504; a submit only when it certainly was not taken.
    """

    def __init__(self, url: str = DEFAULT_URL, api_key: str | None = None, retry: RetryPolicy = DEFAULT_RETRY) -> None:
        self.url = url.rstrip("/")
        if not self.url.startswith(("http://", "https://")):
            message = f"the server's address must start with http:// or https://, not {url!r}"
            raise ValueError(message)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._retry = retry
        try:
            self._http = httpx.Client(base_url=self.url, headers=self._headers, timeout=_TIMEOUT, verify=_trust())
        except httpx.InvalidURL as error:
            message = f"the server's address {url!r} is not valid: {error}"
            raise ValueError(message) from error
        # Videos come from another server: a client of its own, so that no header of ours can reach it.
        self._media = httpx.Client(headers={"Accept-Encoding": "identity"}, timeout=_TIMEOUT, verify=_trust())

    def __enter__(self) -> Self:
        """Keep the connections open until the block ends."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Close the connections. Jobs go on."""
        self.close()

    def close(self) -> None:
        """Close the connections. Jobs go on."""
        self._http.close()
        self._media.close()

    def submit(self, prompt: str, **options: Unpack[JobOptions]) -> Job:
        """Ask for a video. Bad values raise ApiError with status 400, which names each field in `fields`."""
        asked = {name: value for name, value in options.items() if value is not None}
        return Job.from_json(self._call("POST", "/v1/jobs", body={"prompt": prompt, **asked}))

    def get(self, job_id: str) -> Job:
        """Read a job as it is now; the address of its video is fresh."""
        return Job.from_json(self._call("GET", _path(job_id)))

    def list(self, *, status: str | None = None, model: str | None = None, limit: int | None = None) -> Iterator[Job]:
        """Yield jobs, the newest first, all or `limit` of them. Pages are read as they are needed."""
        left = limit
        cursor: str | None = None
        while left is None or left > 0:
            size = _PAGE if left is None else min(_PAGE, left)
            asked = {"limit": size, "cursor": cursor, "status": status, "model": model}
            page = self._call("GET", "/v1/jobs", params={key: value for key, value in asked.items() if value})
            jobs = [Job.from_json(raw) for raw in _data(page)][:size]
            yield from jobs
            left = None if left is None else left - len(jobs)
            cursor = page.get("next_cursor")
            if not cursor:
                return

    def cancel(self, job_id: str) -> Job:
        """Ask for a stop. A running job is cancelled at its next step; ApiError 409 when it is finished already."""
        return Job.from_json(self._call("POST", f"{_path(job_id)}/cancel"))

    def models(self) -> tuple[Document, ...]:
        """The models on offer, each with its sizes, ranges and defaults."""
        return tuple(_data(self._call("GET", "/v1/models")))

    def events(self, *job_ids: str, timeout_s: float | None = None) -> Iterator[Event]:
        """Yield what happens to the jobs, a snapshot first, until all are finished.

        A lost connection is restored. Raises WaitTimeoutError after `timeout_s` seconds.
        """
        address = f"ws{self.url.removeprefix('http')}/v1/ws"
        return follow(Source(address, self._headers, self.get, self._retry), job_ids, timeout_s)

    def wait(self, job_id: str, timeout_s: float | None = None) -> Job:
        """Block until the job is finished, however it ended. Raises WaitTimeoutError after `timeout_s` seconds."""
        for event in self.events(job_id, timeout_s=timeout_s):
            for job in event.jobs:
                if job.is_terminal:
                    return job
        return self.get(job_id)

    def download(self, job_id: str, target: Path) -> Path:
        """Fetch the video of a succeeded job to `target`, and give the file's path.

        A folder gets JOB_ID.mp4. The file appears under its name only when it is whole and its checksum right; what a
        broken download left is resumed. Raises NoVideoError when there is no video, DownloadError when it is damaged.
        """
        path = target / f"{quote(job_id, safe='')}.mp4" if target.is_dir() else target
        try:
            fetch(self._media, self._result(job_id), path, self._retry)
        except ApiError as error:
            if error.status not in _EXPIRED_ADDRESS:
                raise
            # The address ran out between the two requests, or during a long download: go on with a fresh one.
            fetch(self._media, self._result(job_id), path, self._retry)
        return path

    def _result(self, job_id: str) -> Result:
        job = self.get(job_id)
        if job.result is None:
            reason = f"{job.error.code}: {job.error.message}" if job.error else "it has no video yet"
            message = f"{job_id} is {job.status}; {reason}"
            raise NoVideoError(message)
        return job.result

    def _call(
        self, method: str, path: str, *, params: Document | None = None, body: Document | None = None
    ) -> Document:
        return call(self._http, self._http.build_request(method, path, params=params, json=body), self._retry)


@cache
def _trust() -> SSLContext:
    # Reading the certificates takes longer than a request: once a process is enough.
    return httpx.create_ssl_context()


def _path(job_id: str) -> str:
    return f"/v1/jobs/{quote(job_id, safe='')}"


def _data(page: Document) -> list[Any]:
    data = page.get("data")
    if not isinstance(data, list):
        message = "the server's answer is not a list"
        raise BadAnswerError(message)
    return data
