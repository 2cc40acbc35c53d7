import re
from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy.exc import OperationalError

from api.app import create_app
from api.auth import new_key
from api.hub import Hub
from api.problems import problem_body
from common.domain.errors import (
    CATALOGUE,
    INVALID_PARAMETER,
    NOT_FOUND,
    TOO_MANY_STREAMS,
    FieldError,
    LatentmillError,
)
from common.domain.ids import new_id
from common.settings import ApiSettings

# Nothing listens on port 9 ("discard"), so these tests see the api without any of its servers.
SETTINGS = {
    "database_url": "postgresql://a:b@127.0.0.1:9/c",
    "amqp_url": "amqp://a:b@127.0.0.1:9/",
    "redis_url": "redis://127.0.0.1:9/0",
    "s3_endpoint": "http://127.0.0.1:9",
    "s3_access_key": "a",
    "s3_secret_key": "b",
    "edge_secret": "c",
    "max_sockets": 3,
    "max_sockets_per_tenant": 2,
}


@pytest.fixture
def app() -> FastAPI:
    return create_app(ApiSettings.model_validate(SETTINGS))


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api") as client:
        yield client


@pytest.fixture
def key() -> dict[str, str]:
    return {"Authorization": f"Bearer {new_key()}"}


async def test_the_process_is_alive_without_any_server(client: httpx.AsyncClient) -> None:
    assert (await client.get("/livez")).json() == {"status": "ok"}


async def test_it_is_not_ready_without_postgres(client: httpx.AsyncClient) -> None:
    answer = await client.get("/readyz")
    assert (answer.status_code, answer.json()["postgres"]) == (503, False)


async def test_an_error_is_a_problem_and_an_openai_envelope(client: httpx.AsyncClient) -> None:
    answer = await client.get("/v1/nothing")
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json() == {
        "type": "urn:latentmill:error:not_found",
        "title": "There is no such thing here",
        "status": 404,
        "detail": "GET /v1/nothing",
        "instance": "/v1/nothing",
        "error": {"message": "GET /v1/nothing", "type": "invalid_request_error", "param": None, "code": "not_found"},
    }


async def test_a_wrong_method_says_which_is_right(client: httpx.AsyncClient) -> None:
    answer = await client.delete("/v1/models")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET")
    assert answer.json()["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize("authorization", [None, "", "Bearer", "Bearer lm_abc", "Basic YTpi"])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/models"),
        ("GET", "/v1/jobs"),
        ("POST", "/v1/jobs"),
        ("GET", "/v1/jobs/job_1"),
        ("POST", "/v1/jobs/job_1/cancel"),
        ("GET", "/v1/jobs/job_1/events"),
    ],
)
async def test_nothing_is_shown_without_a_key(
    client: httpx.AsyncClient, method: str, path: str, authorization: str | None
) -> None:
    headers = {} if authorization is None else {"Authorization": authorization}
    answer = await client.request(method, path, headers=headers)
    assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
    assert answer.headers["www-authenticate"].startswith("Bearer")


async def test_without_postgres_a_caller_is_told_to_come_back(client: httpx.AsyncClient, key: dict[str, str]) -> None:
    answer = await client.get("/v1/models", headers=key)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "database_unavailable")
    assert 1 <= int(answer.headers["retry-after"]) <= 60


async def test_what_nobody_foresaw_is_a_500_without_its_trace(app: FastAPI, client: httpx.AsyncClient) -> None:
    @app.get("/broken")
    async def broken() -> None:
        message = "a secret"
        raise RuntimeError(message)

    answer = await client.get("/broken")
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert "secret" not in answer.text
    assert answer.headers["x-request-id"]


async def test_a_request_id_is_taken_over(client: httpx.AsyncClient) -> None:
    answer = await client.get("/livez", headers={"x-request-id": "a-1.b_2"})
    assert answer.headers["x-request-id"] == "a-1.b_2"


@pytest.mark.parametrize("bad", ["", "a b", "x" * 129, '"'])
async def test_a_bad_request_id_is_replaced(client: httpx.AsyncClient, bad: str) -> None:
    answer = await client.get("/livez", headers={"x-request-id": bad})
    assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"])


async def test_the_document_describes_jobs_and_no_422(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    assert {"Job", "Result", "JobList"} <= set(document["components"]["schemas"])
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    assert all("422" not in operation["responses"] for operation in operations)
    assert "/v1/jobs" in document["paths"]


@pytest.mark.parametrize("path", ["/v1/jobs/", "/livez/"])
async def test_no_address_redirects_to_a_host_that_the_caller_names(client: httpx.AsyncClient, path: str) -> None:
    answer = await client.get(path, headers={"host": "evil.example"})
    assert (answer.status_code, answer.headers.get("location")) == (404, None)


@pytest.mark.parametrize("path", ["/docs", "/redoc", "/docs/oauth2-redirect"])
async def test_no_page_loads_scripts_from_elsewhere(client: httpx.AsyncClient, path: str) -> None:
    assert (await client.get(path)).status_code == 404


@pytest.mark.parametrize("kind", CATALOGUE, ids=lambda kind: kind.code)
def test_every_error_of_the_catalogue_has_both_forms(kind: object) -> None:
    body = problem_body(kind, "why", "/here")  # type: ignore[arg-type]  # pytest's parameters have no type
    assert body["status"] == kind.status  # type: ignore[attr-defined]  # the same
    assert body["error"]["code"] == body["type"].rpartition(":")[2]


def test_field_errors_are_listed_and_the_first_is_the_param() -> None:
    body = problem_body(INVALID_PARAMETER, "why", "/here", [FieldError("seed", "no"), FieldError("fps", "no")])
    assert [error["field"] for error in body["errors"]] == ["seed", "fps"]
    assert body["error"]["param"] == "seed"
    assert "errors" not in problem_body(NOT_FOUND, "why", "/here")


def hub_of(app: FastAPI) -> Hub:
    hub: Hub = app.state.resources.hub
    return hub


def test_a_process_serves_so_many_streams_and_no_more(app: FastAPI) -> None:
    hub = hub_of(app)
    first, _, _ = hub.open(new_id()), hub.open(new_id()), hub.open(new_id())
    with pytest.raises(LatentmillError) as refused:
        hub.open(new_id())
    assert refused.value.kind is TOO_MANY_STREAMS
    hub.leave(first)
    hub.open(new_id())


def test_a_tenant_has_so_many_streams_and_leaves_room_for_others(app: FastAPI) -> None:
    hub, tenant = hub_of(app), new_id()
    first, _ = hub.open(tenant), hub.open(tenant)
    with pytest.raises(LatentmillError) as refused:
        hub.open(tenant)
    assert refused.value.kind is TOO_MANY_STREAMS
    hub.leave(hub.open(new_id()))
    hub.leave(first)
    hub.leave(first)  # leaving twice frees one place
    hub.open(tenant)
    with pytest.raises(LatentmillError):
        hub.open(tenant)


def test_a_leaving_process_ends_its_streams_and_takes_no_new_one(app: FastAPI) -> None:
    hub = hub_of(app)
    stream = hub.open(new_id())
    hub.close()
    assert stream.close_code == 1012
    with pytest.raises(LatentmillError):
        hub.open(new_id())


async def test_a_subscription_that_failed_follows_nothing(app: FastAPI) -> None:
    hub = hub_of(app)
    stream = hub.open(new_id())
    with pytest.raises(OperationalError):
        await hub.follow_all(stream)
    with pytest.raises(OperationalError):
        await hub.follow(stream, [new_id()])
    assert (stream.everything_since, stream.live, stream.loading) == (None, {}, False)
