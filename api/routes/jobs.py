"""Jobs: take them, show them, cancel them."""

import base64
import binascii
import secrets
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from uuid import UUID

from fastapi import APIRouter
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from api.auth import Principal
from api.cancel import cancel_job
from api.problems import refusal
from api.reads import JobView
from api.render import Job, JobList, render_job, to_json
from api.resources import Resources, resources_of
from api.routes.callers import caller
from api.schemas import DEFAULT_PRIORITY, JobRequest, parameters_of, read_job_request
from api.submit import Accepted, NewJob
from common.domain.errors import BODY_TOO_LARGE, NOT_FOUND, FieldError, InvalidParametersError, LatentmillError
from common.domain.ids import new_id, parse_job_id
from common.domain.jobs import JobState
from common.domain.profiles import PROFILES

MAX_BODY_BYTES = 1024 * 1024
# Clients keep numbers as doubles more often than not, and show a seed to be used again: stay where those are exact.
_SEEDS = 2**31
# Asking again at the estimated start is soon enough; never later than what SDKs will sleep.
_MAX_RETRY_AFTER_S = 30
_DEFAULT_PAGE = 20
_MAX_PAGE = 100
_PAGE_FIELDS = frozenset({"limit", "cursor", "status", "model"})

router = APIRouter(tags=["jobs"])


def _body_of(model: type[Any]) -> dict[str, Any]:
    """OpenAPI's description of a body that the route reads by itself."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


@router.post(
    "/v1/jobs",
    status_code=HTTPStatus.ACCEPTED,
    summary="Submit a job",
    responses={202: {"model": Job, "description": "Stored; poll `links.self` or follow `links.events`."}},
    openapi_extra=_body_of(JobRequest),
)
async def submit(request: Request) -> Response:
    """Answers once the job is safely stored."""
    resources = resources_of(request)
    principal = await caller(request, "jobs:write")
    job = _new_job(read_job_request(await _body(request)), principal, resources)
    return _accepted(await resources.submitter.submit(job), resources)


@router.get("/v1/jobs", summary="List jobs, newest first", responses={200: {"model": JobList}})
async def list_jobs(request: Request) -> Response:
    """`limit` (1 to 100), `cursor` (of the page before), `status` and `model` may be given."""
    principal = await caller(request, "jobs:read")
    page = _page(request.query_params)
    reads = resources_of(request).reads
    views = await reads.page(principal.tenant_id, page.before, page.state, page.model, page.limit + 1)
    shown = views[: page.limit]
    cursor = _cursor(shown[-1].job_id) if len(views) > page.limit else None
    data = ",".join(view.text for view in shown)
    return _json_text(f'{{"object":"list","data":[{data}],"next_cursor":{to_json(cursor)}}}')


@router.get("/v1/jobs/{job_id}", summary="Show a job", responses={200: {"model": Job}})
async def get_job(request: Request, job_id: str) -> Response:
    """An ended job has an ETag and is answered with 304 while its result's address stays the same."""
    principal = await caller(request, "jobs:read")
    view = await resources_of(request).reads.job(principal.tenant_id, asked_job(job_id))
    if view is None:
        raise _no_such_job()
    etag = _etag(view)
    headers = {"Cache-Control": "private, no-cache", **({"ETag": etag} if etag else {})}
    if etag and etag in request.headers.get("if-none-match", ""):
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
    return _json_text(view.text, headers=headers)


@router.post(
    "/v1/jobs/{job_id}/cancel",
    status_code=HTTPStatus.ACCEPTED,
    summary="Cancel a job",
    responses={
        202: {"model": Job, "description": "Asked for"},
        200: {"model": Job, "description": "Was cancelled already"},
    },
)
async def cancel(request: Request, job_id: str) -> Response:
    """A queued job ends at once, a running one within a step. A job that has ended otherwise is a conflict."""
    principal = await caller(request, "jobs:write")
    r = resources_of(request)
    cancelled = await cancel_job(r.engine, r.reads, r.announcer, principal.tenant_id, asked_job(job_id))
    return _json_text(cancelled.view.text, HTTPStatus.OK if cancelled.already else HTTPStatus.ACCEPTED)


def asked_job(text: str) -> UUID:
    """The id in an address. Raises LatentmillError (not_found)."""
    job_id = parse_job_id(text)
    if job_id is None:
        raise _no_such_job()
    return job_id


def _no_such_job() -> LatentmillError:
    return refusal(NOT_FOUND, "there is no such job")


async def _body(request: Request) -> bytes:
    too_large = refusal(BODY_TOO_LARGE, f"at most {MAX_BODY_BYTES} bytes are taken")
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > MAX_BODY_BYTES:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise too_large
    return bytes(body)


def _new_job(asked: JobRequest, principal: Principal, resources: Resources) -> NewJob:
    settings = resources.settings
    parameters = parameters_of(asked, secrets.randbelow(_SEEDS))
    if asked.queue_deadline_s is not None and asked.queue_deadline_s > settings.total_deadline_s:
        message = f"must be at most {settings.total_deadline_s:g}, when the job is given up anyway"
        raise InvalidParametersError([FieldError("queue_deadline_s", message)])
    return NewJob(
        id=new_id(),
        tenant_id=principal.tenant_id,
        parameters=parameters,
        priority=DEFAULT_PRIORITY if asked.priority is None else asked.priority,
        metadata=asked.metadata or {},
        queue_deadline_s=settings.queue_deadline_s if asked.queue_deadline_s is None else asked.queue_deadline_s,
        deadline_s=settings.total_deadline_s,
    )


def _accepted(accepted: Accepted, resources: Resources) -> Response:
    body = render_job(accepted.as_row(), None, resources.sign)
    queue = body["queue"]
    # Where no start can be estimated, no job ahead takes less than about a second.
    wait = queue["ahead"] if queue["est_start_s"] is None else queue["est_start_s"]
    retry_after = max(1, min(_MAX_RETRY_AFTER_S, round(wait)))
    headers = {"Location": body["links"]["self"], "Retry-After": str(retry_after)}
    return _json_text(to_json(body), HTTPStatus.ACCEPTED, headers)


@dataclass(frozen=True, slots=True)
class _Page:
    before: UUID | None
    state: str | None
    model: str | None
    limit: int


def _page(query: QueryParams) -> _Page:
    errors = [FieldError(name[:100], "is not a known parameter") for name in query if name not in _PAGE_FIELDS][:1]
    limit, cursor = query.get("limit", str(_DEFAULT_PAGE)), query.get("cursor")
    before = None if cursor is None else _read_cursor(cursor)
    if not (limit.isascii() and limit.isdecimal() and len(limit) <= 3 and 1 <= int(limit) <= _MAX_PAGE):
        errors.append(FieldError("limit", f"must be from 1 to {_MAX_PAGE}"))
    if cursor is not None and before is None:
        errors.append(FieldError("cursor", "must be the next_cursor of an earlier page"))
    for name, legal in (("status", [state.value for state in JobState]), ("model", list(PROFILES))):
        if query.get(name, legal[0]) not in legal:
            errors.append(FieldError(name, f"must be one of {', '.join(legal)}"))
    if errors:
        raise InvalidParametersError(errors)
    return _Page(before, query.get("status"), query.get("model"), int(limit))


def _cursor(job_id: UUID) -> str:
    return base64.urlsafe_b64encode(job_id.bytes).rstrip(b"=").decode()


def _read_cursor(cursor: str) -> UUID | None:
    try:
        return UUID(bytes=base64.urlsafe_b64decode(cursor + "=="))
    except (ValueError, binascii.Error):
        return None


def _etag(view: JobView) -> str | None:
    if not view.terminal:
        return None
    result = view.body["result"]
    return f'W/"{view.version}-{result["expires_at"] if result else ""}"'


def _json_text(text: str, status: int = HTTPStatus.OK, headers: dict[str, str] | None = None) -> Response:
    return Response(text, status, headers, "application/json")
