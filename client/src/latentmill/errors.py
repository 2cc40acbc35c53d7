"""What can go wrong between this program and a video."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FIRST_SERVER_ERROR = 500


class LatentmillError(Exception):
    """Base of every error that this package raises on purpose."""


@dataclass(frozen=True, slots=True)
class FieldError:
    """One field of the request that the API refused."""

    field: str
    message: str


class ApiError(LatentmillError):
    """The API answered, and refused. `status` is the HTTP status, `code` the stable name of the reason.

    `fields` names what is wrong with a request (status 400), `retry_after_s` is the wait in seconds that the server
    asks for, `request_id` finds the request in the server's logs.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        fields: tuple[FieldError, ...] = (),
        request_id: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.fields = fields
        self.request_id = request_id
        self.retry_after_s = retry_after_s

    @property
    def is_server_fault(self) -> bool:
        """Whether the same request may succeed later, unchanged."""
        return self.status >= FIRST_SERVER_ERROR


class ConnectionFailedError(LatentmillError):
    """No answer from `url`, after every retry."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(f"cannot reach {url}: {reason}")
        self.url = url


class BadAnswerError(LatentmillError):
    """What answered does not speak this API."""


class WaitTimeoutError(LatentmillError):
    """The job did not finish in the time given. It goes on."""


class NoVideoError(LatentmillError):
    """The job has no video to download: it is not finished, or did not succeed."""


class DownloadError(LatentmillError):
    """The video could not be fetched, or is not the file whose checksum the API told."""


def api_error(status: int, body: object, headers: Mapping[str, str]) -> ApiError:
    """Build the error from an answer whose body is meant to be a problem (RFC 9457), but may be anything."""
    problem: Mapping[str, Any] = body if isinstance(body, dict) else {}
    envelope = problem.get("error")
    code = envelope.get("code") if isinstance(envelope, dict) else None
    return ApiError(
        status,
        str(code or f"http_{status}"),
        str(problem.get("detail") or problem.get("title") or f"the server answered {status}"),
        fields=_field_errors(problem.get("errors")),
        request_id=headers.get("x-request-id"),
        retry_after_s=retry_after_s(headers),
    )


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds of a Retry-After header. Its date form, which the API does not use, counts as none."""
    value = headers.get("retry-after", "")
    return float(value) if value.isdecimal() else None


def _field_errors(listed: object) -> tuple[FieldError, ...]:
    if not isinstance(listed, list):
        return ()
    return tuple(
        FieldError(str(entry.get("field") or "body"), str(entry.get("message") or ""))
        for entry in listed
        if isinstance(entry, dict)
    )
