"""Errors on the wire: one body that is a problem of RFC 9457 and OpenAI's error envelope at once.

All four families of client SDKs that exist for such APIs show the message and the code of this body.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import Response

from api.render import to_json
from common import telemetry
from common.domain.errors import (
    INVALID_JSON,
    JOB_TERMINAL,
    UNAUTHENTICATED,
    ErrorKind,
    FieldError,
    InvalidParametersError,
    LatentmillError,
)

MEDIA_TYPE = "application/problem+json"
# An outage of Postgres or a burst is over within seconds more often than not; SDKs double it on their own.
RETRY_AFTER_S = 2
_ENVELOPE_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_FIRST_SERVER_ERROR = 500


def refusal(kind: ErrorKind, detail: str) -> LatentmillError:
    """An error to raise: `kind` says what happened, `detail` what about this request."""
    return LatentmillError(detail, kind=kind)


def problem(error: LatentmillError, instance: str, headers: Mapping[str, str] | None = None) -> Response:
    """The answer for an error on the address `instance`."""
    telemetry.refused.labels(error.kind.code).inc()
    errors = error.errors if isinstance(error, InvalidParametersError) else ()
    return Response(
        to_json(problem_body(error.kind, error.detail, instance, errors)).encode(errors="replace"),
        error.kind.status,
        {**_headers(error.kind), **(headers or {})},
        MEDIA_TYPE,
    )


def problem_body(kind: ErrorKind, detail: str, instance: str, errors: Sequence[FieldError] = ()) -> dict[str, Any]:
    """Both formats in one object; `errors` is there for a bad request only."""
    body: dict[str, Any] = {
        "type": f"urn:latentmill:error:{kind.code}",
        "title": kind.title,
        "status": kind.status,
        "detail": detail,
        "instance": instance,
    }
    if kind.status == INVALID_JSON.status:
        listed = errors or (FieldError("body", detail),)
        body["errors"] = [{"field": error.field, "message": error.message} for error in listed]
    body["error"] = {
        "message": detail,
        "type": _envelope_type(kind.status),
        "param": errors[0].field if errors else None,
        "code": kind.code,
    }
    return body


def _envelope_type(status: int) -> str:
    if status >= _FIRST_SERVER_ERROR:
        return "server_error"
    return _ENVELOPE_TYPES.get(status, "invalid_request_error")


def _headers(kind: ErrorKind) -> dict[str, str]:
    if kind is UNAUTHENTICATED:
        return {"WWW-Authenticate": 'Bearer realm="latentmill", error="invalid_token"'}
    if kind is JOB_TERMINAL:
        # Both OpenAI SDKs try a 409 twice more unless they are told that it is no use.
        return {"x-should-retry": "false"}
    if kind.retryable and kind.status > _FIRST_SERVER_ERROR:
        return {"Retry-After": str(RETRY_AFTER_S)}
    return {}
