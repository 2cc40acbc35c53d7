"""The catalogue of errors: one stable code each, its HTTP status and whether the same call may succeed later."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """One line of the catalogue; `code` is what programs match on and never changes."""

    code: str
    status: int
    title: str
    retryable: bool = False


INVALID_PARAMETER = ErrorKind("invalid_parameter", 400, "A parameter is not legal")
INVALID_JSON = ErrorKind("invalid_json", 400, "The body is not valid JSON")
UNAUTHENTICATED = ErrorKind("unauthenticated", 401, "No valid API key")
INSUFFICIENT_SCOPE = ErrorKind("insufficient_scope", 403, "The API key lacks a scope")
NOT_FOUND = ErrorKind("not_found", 404, "There is no such thing here")
METHOD_NOT_ALLOWED = ErrorKind("method_not_allowed", 405, "This address does not take this method")
JOB_TERMINAL = ErrorKind("job_terminal", 409, "The job has already ended")
BODY_TOO_LARGE = ErrorKind("body_too_large", 413, "The body is too large")
TOO_MANY_STREAMS = ErrorKind("too_many_streams", 503, "This process serves as many streams as it can", retryable=True)
OVERLOADED = ErrorKind("overloaded", 503, "More submits wait than this process takes", retryable=True)
DATABASE_UNAVAILABLE = ErrorKind("database_unavailable", 503, "The job store cannot be reached", retryable=True)
INTERNAL = ErrorKind("internal_error", 500, "Something failed on our side", retryable=True)

CATALOGUE: tuple[ErrorKind, ...] = (
    INVALID_PARAMETER,
    INVALID_JSON,
    UNAUTHENTICATED,
    INSUFFICIENT_SCOPE,
    NOT_FOUND,
    METHOD_NOT_ALLOWED,
    JOB_TERMINAL,
    BODY_TOO_LARGE,
    TOO_MANY_STREAMS,
    OVERLOADED,
    DATABASE_UNAVAILABLE,
    INTERNAL,
)


class LatentmillError(Exception):
    """Base of every error that reaches a caller on purpose."""

    kind: ErrorKind = INTERNAL

    def __init__(self, detail: str, *, kind: ErrorKind | None = None) -> None:
        super().__init__(detail)
        self.detail = detail
        if kind is not None:
            self.kind = kind


@dataclass(frozen=True, slots=True)
class FieldError:
    """What is wrong with one field, in words that say what would be legal."""

    field: str
    message: str


class InvalidParametersError(LatentmillError):
    """One or more fields of a request are not legal for the model."""

    kind = INVALID_PARAMETER

    def __init__(self, errors: list[FieldError]) -> None:
        super().__init__("; ".join(f"{error.field}: {error.message}" for error in errors))
        self.errors = errors
