"""One request and its retries. What may be sent twice is decided here and nowhere else."""

import random
import time
from dataclasses import dataclass
from typing import Any

import httpx

from latentmill.errors import BadAnswerError, ConnectionFailedError, api_error, retry_after_s

# What a proxy answers while the servers behind it restart.
_RETRIED_STATUSES = frozenset({502, 503, 504})
_UNAVAILABLE = 503
# A server that asks for a longer pause gets none: a person would take the command for hung.
_LONGEST_RETRY_AFTER_S = 15


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often a request is sent at most, and the pauses between, in seconds.

    The defaults bridge a restart behind a proxy (about 2 s) and tell soon enough that nothing listens.
    """

    attempts: int = 4
    base_s: float = 0.3
    cap_s: float = 2.0

    def pause_s(self, failures: int) -> float:
        """Seconds to wait after so many failures in a row: doubled each time, and spread so that clients part."""
        longest = min(self.cap_s, self.base_s * 2 ** (failures - 1))
        return random.uniform(longest / 2, longest)  # noqa: S311  # no secret depends on it


DEFAULT_RETRY = RetryPolicy()


def call(http: httpx.Client, request: httpx.Request, retry: RetryPolicy) -> dict[str, Any]:
    """Send a request and give the JSON object of the answer.

    Raises ApiError when the server refuses, ConnectionFailedError when it cannot be reached, BadAnswerError when the
    answer is not a JSON object.
    """
    for failures in range(1, retry.attempts + 1):
        is_last = failures == retry.attempts
        try:
            response = http.send(request)
        except httpx.RequestError as error:
            if is_last or not _may_resend(request, error):
                raise ConnectionFailedError(_origin(request), _reason(error)) from error
            pause = retry.pause_s(failures)
        else:
            wanted = None if is_last else _retry_pause_s(request, response, retry.pause_s(failures))
            if wanted is None:
                return _read(response)
            pause = wanted
        time.sleep(pause)
    message = "a retry policy needs at least one attempt"
    raise ValueError(message)


def _may_resend(request: httpx.Request, error: httpx.RequestError) -> bool:
    # Without a connection nothing was sent. After that only the server knows, and a second POST is a second job.
    return request.method == "GET" or isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)


def _retry_pause_s(request: httpx.Request, response: httpx.Response, backoff_s: float) -> float | None:
    if response.status_code not in _RETRIED_STATUSES:
        return None
    asked = retry_after_s(response.headers)
    if asked is not None and asked > _LONGEST_RETRY_AFTER_S:
        return None
    if request.method == "GET":
        return max(asked or 0, backoff_s)
    # The server that says when to come back did not take the job; a proxy's bare 502 or 504 leaves that open.
    return asked if response.status_code == _UNAVAILABLE else None


def _read(response: httpx.Response) -> dict[str, Any]:
    try:
        body = response.json()
    except ValueError:
        body = None
    if not response.is_success:
        raise api_error(response.status_code, body, response.headers)
    if not isinstance(body, dict):
        message = f"{response.url} did not answer with a JSON object: is this the address of a latentmill server?"
        raise BadAnswerError(message)
    return body


def _origin(request: httpx.Request) -> str:
    return f"{request.url.scheme}://{request.url.netloc.decode('ascii')}"


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
