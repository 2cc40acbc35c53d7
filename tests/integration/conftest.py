"""The real servers, and a job store that is empty at the start of every test."""

import asyncio
import json
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from uuid import UUID

import pika
import pytest
from pydantic_settings import BaseSettings
from sqlalchemy import Connection, Engine, Row, text
from sqlalchemy.ext.asyncio import AsyncEngine

from common.broker.publisher import Publisher
from common.broker.topology import DEAD_QUEUE, declare_blocking, queue_name
from common.db.sessions import async_engine, sync_engine
from common.db.statements import CLAIM
from common.db.submits import INSERT_JOBS
from common.db.upkeep import ADD_TENANT
from common.domain.ids import new_id
from common.domain.parameters import resolve
from common.domain.profiles import PROFILES
from common.settings import DispatcherSettings, StorageSettings
from infra.local.stack import LocalStack
from tests.conftest import REPOSITORY
from tests.integration.engine import EngineError
from tests.integration.servers import Servers, chosen_servers

MODEL = "tiny-wan2.2-t2v"
Settings = TypeVar("Settings", bound=BaseSettings)


@pytest.fixture(scope="session")
def stack() -> Iterator[Servers]:
    try:
        servers = chosen_servers()
    except (ValueError, EngineError) as error:
        pytest.exit(str(error), returncode=2)
    try:
        servers.start()
        for module in (["migrations", "upgrade"], ["common.storage"]):
            subprocess.run(
                [sys.executable, "-m", *module], env=dict(servers.environment), cwd=REPOSITORY, check=True, timeout=60
            )
        yield servers
    finally:
        servers.destroy()


@pytest.fixture
def local_stack(stack: Servers) -> LocalStack:
    if not isinstance(stack, LocalStack):
        pytest.skip("tells of the local stack itself")
    return stack


@pytest.fixture(scope="session")
def environment(stack: Servers) -> Mapping[str, str]:
    return stack.environment


def read_settings(kind: type[Settings], environment: Mapping[str, str]) -> Settings:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        return kind()


@pytest.fixture(scope="session")
def settings(environment: Mapping[str, str]) -> DispatcherSettings:
    return read_settings(DispatcherSettings, environment)


@pytest.fixture(scope="session")
def storage_settings(environment: Mapping[str, str]) -> StorageSettings:
    return read_settings(StorageSettings, environment)


@pytest.fixture(scope="session")
def database(settings: DispatcherSettings) -> Iterator[Engine]:
    engine = sync_engine(settings, pool_size=20)
    yield engine
    engine.dispose()


@pytest.fixture
async def async_database(settings: DispatcherSettings) -> AsyncIterator[AsyncEngine]:
    engine = async_engine(settings, pool_size=5)
    yield engine
    await engine.dispose()


@dataclass(frozen=True)
class Store:
    """The job store of one test."""

    connection: Connection
    tenant: UUID

    def add_tenant(self, name: str) -> UUID:
        added: UUID = self.connection.execute(ADD_TENANT, {"id": str(uuid.uuid4()), "name": name}).scalar_one()
        return added

    def submit(
        self,
        count: int = 1,
        *,
        tenant: UUID | None = None,
        window: int = 1000,
        priority: int = 5,
        queue_deadline_s: float = 3600.0,
        deadline_s: float = 86_400.0,
    ) -> list[Row[Any]]:
        rows = []
        for number in range(count):
            parameters = resolve({"model": MODEL, "prompt": f"job {number}"}, seed=number)
            job_id = new_id()
            rows.append(
                {
                    "id": str(job_id),
                    "tenant_id": str(tenant or self.tenant),
                    "model": MODEL,
                    "priority": priority,
                    "params": parameters.as_dict(),
                    "batch_key": parameters.batch_key(job_id),
                    "metadata": {},
                    "queue_deadline_s": queue_deadline_s,
                    "deadline_s": deadline_s,
                }
            )
        added = self.connection.execute(INSERT_JOBS, {"rows": json.dumps(rows), "default_window": window}).all()
        return sorted(added, key=lambda row: row.id)

    def claim(self, *job_ids: UUID, worker: str = "w1", lease_s: float = 45.0) -> list[Row[Any]]:
        rows = [
            {"id": str(job_id), "token": str(uuid.uuid4()), "batch_key": self.row(job_id).batch_key}
            for job_id in job_ids
        ]
        values = {"rows": json.dumps(rows), "worker_id": worker, "batch_id": str(uuid.uuid4()), "lease_s": lease_s}
        return list(self.connection.execute(CLAIM, values).all())

    def row(self, job_id: UUID) -> Row[Any]:
        return self.connection.execute(text("SELECT * FROM jobs WHERE id = :id"), {"id": job_id}).one()

    def sql(self, statement: str, **values: object) -> list[Row[Any]]:
        result = self.connection.execute(text(statement), values)
        return list(result.all()) if result.returns_rows else []


@pytest.fixture
def store(database: Engine) -> Iterator[Store]:
    with database.connect() as connection:
        connection.execute(
            text("TRUNCATE tenants, api_keys, jobs, attempts, workers, release_windows, leaders CASCADE")
        )
        tenant = connection.execute(ADD_TENANT, {"id": str(uuid.uuid4()), "name": "first"}).scalar_one()
        yield Store(connection, tenant)


@pytest.fixture
async def publisher(settings: DispatcherSettings) -> AsyncIterator[Publisher]:
    publisher = Publisher(settings.amqp_url.get_secret_value(), "tests", list(PROFILES))
    running = asyncio.create_task(publisher.run())
    async with asyncio.timeout(10):
        while not publisher.connected:
            await asyncio.sleep(0.01)
    yield publisher
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.fixture
def empty_queues(settings: DispatcherSettings) -> None:
    with pika.BlockingConnection(pika.URLParameters(settings.amqp_url.get_secret_value())) as connection:
        channel = connection.channel()
        declare_blocking(channel, [MODEL])
        for queue in (queue_name(MODEL), DEAD_QUEUE):
            channel.queue_purge(queue)
