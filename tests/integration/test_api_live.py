"""The whole api process against the real servers: keys, sockets, limits, and what it logs."""

import asyncio
import json
import socket
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from sqlalchemy.exc import IntegrityError
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from api import auth
from api.app import create_app
from api.auth import key_digest, new_key
from api.resources import Resources
from api.routes import callers
from api.submit import NewJob
from common import telemetry
from common.db.upkeep import ADD_KEY, WORKER_PRESENT
from common.domain.ids import format_job_id, new_id
from common.domain.parameters import resolve
from common.settings import ApiSettings
from tests.integration.conftest import MODEL, Store, read_settings

PROMPT = "a red circle nobody may read of"
BODY = {"model": MODEL, "prompt": PROMPT}


@dataclass(frozen=True)
class Site:
    """A running api and a key of the store's tenant."""

    url: str
    app: FastAPI
    key: str
    store: Store

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}

    @property
    def resources(self) -> Resources:
        resources: Resources = self.app.state.resources
        return resources

    def call(self, method: str, path: str, body: Any = None) -> httpx.Response:
        return httpx.request(method, f"{self.url}{path}", json=body, headers=self.headers, timeout=20)

    @contextmanager
    def open(self) -> Iterator[ClientConnection]:
        with connect(f"ws{self.url.removeprefix('http')}/v1/ws", additional_headers=self.headers) as opened:
            assert hear(opened)["type"] == "ready"
            yield opened

    def revoke(self) -> None:
        self.store.sql("UPDATE api_keys SET revoked_at = now()")


def say(opened: ClientConnection, **message: Any) -> None:
    opened.send(json.dumps(message))


def hear(opened: ClientConnection) -> dict[str, Any]:
    message: dict[str, Any] = json.loads(opened.recv(timeout=10))
    return message


def hear_the_end(opened: ClientConnection) -> tuple[list[dict[str, Any]], int]:
    """Everything up to the end, and the close code."""
    heard = []
    try:
        while True:
            heard.append(hear(opened))
    except ConnectionClosed as closed:
        return heard, closed.rcvd.code if closed.rcvd else 0


def add_key(store: Store) -> str:
    key = new_key()
    values = {"id": str(new_id()), "tenant_id": str(store.tenant), "name": "test", "sha256": key_digest(key)}
    store.connection.execute(ADD_KEY, {**values, "scopes": ["jobs:read", "jobs:write"]})
    return key


def add_worker(store: Store) -> None:
    values = {"id": "w", "model": MODEL, "engine": "wan", "max_batch": 1, "accepting": True}
    store.connection.execute(WORKER_PRESENT, values)


@pytest.fixture
def site(store: Store, environment: Mapping[str, str], empty_queues: None) -> Iterator[Site]:
    app = create_app(read_settings(ApiSettings, environment))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, ws="websockets-sansio"))
        thread = threading.Thread(target=asyncio.run, args=(server.serve([listener]),), daemon=True)
        thread.start()
        try:
            yield Site(f"http://127.0.0.1:{listener.getsockname()[1]}", app, add_key(store), store)
        finally:
            server.should_exit = True
            thread.join(20)


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are asked for anew each time."""
    monkeypatch.setattr(auth, "_KNOWN_FOR_S", 0.0)


@pytest.fixture
def watchful(forgetful: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Open streams are looked at often."""
    monkeypatch.setattr(callers, "_RECHECK_S", 0.05)


def test_a_revoked_key_cancels_nothing_through_its_open_socket(site: Site, forgetful: None) -> None:
    (job,) = site.store.submit(1)
    with site.open() as opened:
        site.revoke()
        say(opened, type="cancel", job_id=format_job_id(job.id))
        heard, code = hear_the_end(opened)
    assert ([message["code"] for message in heard], code) == (["unauthenticated"], 4401)
    assert site.store.row(job.id).state == "queued"


def test_a_revoked_key_loses_its_silent_socket(site: Site, watchful: None) -> None:
    with site.open() as opened:
        site.revoke()
        heard, code = hear_the_end(opened)
    assert ([message["type"] for message in heard], code) == (["error"], 4401)


def test_a_revoked_key_loses_its_event_stream(site: Site, watchful: None) -> None:
    (job,) = site.store.submit(1)
    address = f"{site.url}/v1/jobs/{format_job_id(job.id)}/events"
    with httpx.stream("GET", address, headers=site.headers, timeout=10) as response:
        lines = response.iter_lines()
        assert next(line for line in lines if line.startswith("event:")) == "event: snapshot"
        site.revoke()
        assert [line for line in lines if line.startswith("event:")] == ["event: error"]


def test_asking_for_everything_again_reads_nothing(site: Site) -> None:
    site.store.submit(2)
    with site.open() as opened:
        for _ in range(20):
            say(opened, type="subscribe", all=True)
        say(opened, type="ping")
        assert [hear(opened)["type"], hear(opened)["type"]] == ["snapshot", "pong"]


def test_a_socket_that_never_stops_asking_is_closed(site: Site) -> None:
    with site.open() as opened:
        for _ in range(80):
            say(opened, type="ping")
        heard, code = hear_the_end(opened)
    assert code == 4429
    assert heard[-1]["code"] == "rate_limited"
    assert 50 <= len(heard) < 80


def test_submits_go_on_while_readers_hold_every_connection(site: Site) -> None:
    assert site.call("GET", "/v1/models").status_code == 200  # the key is known from here on
    pool = site.resources.engine.sync_engine.pool
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "connect", lambda: pytest.fail("a submit asked for a reader's connection"))
        assert site.call("POST", "/v1/jobs", BODY).status_code == 202


def test_a_job_that_nobody_can_run_says_so_everywhere(site: Site) -> None:
    accepted = site.call("POST", "/v1/jobs", BODY).json()
    shown = site.call("GET", accepted["links"]["self"]).json()
    listed = site.call("GET", "/v1/jobs").json()["data"][0]
    assert {job["queue"]["note"] for job in (accepted, shown, listed)} == {"no worker serves this model now"}


def test_with_a_worker_there_is_nothing_to_note(site: Site) -> None:
    add_worker(site.store)
    accepted = site.call("POST", "/v1/jobs", BODY).json()
    shown = site.call("GET", accepted["links"]["self"]).json()
    assert [job["queue"]["note"] for job in (accepted, shown)] == [None, None]


def test_a_job_that_may_expire_says_so(site: Site) -> None:
    add_worker(site.store)
    site.store.sql("INSERT INTO release_windows (model, size, jobs_per_s) VALUES (:model, 8, 0.01)", model=MODEL)
    site.store.submit(3)
    accepted = site.call("POST", "/v1/jobs", {**BODY, "queue_deadline_s": 60}).json()
    shown = site.call("GET", accepted["links"]["self"]).json()
    assert {job["queue"]["note"] for job in (accepted, shown)} == {"it may expire before its start"}


def test_a_cancelled_queued_job_is_counted(site: Site) -> None:
    count = telemetry.finished.labels(MODEL, "cancelled")
    before = count._value.get()  # noqa: SLF001  prometheus_client has no other way to read one child
    job = site.call("POST", "/v1/jobs", BODY).json()
    assert site.call("POST", job["links"]["cancel"]).json()["status"] == "cancelled"
    assert site.call("POST", job["links"]["cancel"]).status_code == 200
    assert count._value.get() == before + 1  # noqa: SLF001


def test_a_row_that_postgres_refuses_is_logged_without_its_prompt(site: Site, capsys: Any) -> None:
    parameters = resolve(BODY, seed=1)

    @site.app.get("/refused")
    async def refused() -> None:
        await site.resources.submitter.submit(
            NewJob(new_id(), site.store.tenant, parameters, 99, {}, 60.0, 60.0)  # no such priority
        )

    answer = site.call("GET", "/refused")
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    logged = "".join(capsys.readouterr())
    assert "23514" in logged
    assert PROMPT not in logged


def test_an_error_of_postgres_does_not_show_the_statements_values(store: Store) -> None:
    with pytest.raises(IntegrityError) as refused:
        store.sql("INSERT INTO tenants (id, name, weight) VALUES (:id, :name, 0)", id=uuid.uuid4(), name=PROMPT)
    assert "parameters hidden" in str(refused.value)
