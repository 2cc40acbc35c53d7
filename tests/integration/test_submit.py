"""The group commit of the api, against the real Postgres and RabbitMQ."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine

from api.announce import Announcer
from api.submit import Accepted, NewJob, Submitter
from common.broker.publisher import Publisher
from common.domain.ids import new_id
from common.domain.parameters import resolve
from common.events import AsyncEvents
from common.settings import DispatcherSettings
from tests.integration.conftest import MODEL, Store

AWAY = "amqp://nobody:nothing@127.0.0.1:1/%2F"


def new_job(store: Store, *, priority: int = 5) -> NewJob:
    parameters = resolve({"model": MODEL, "prompt": "a red circle"}, seed=1)
    return NewJob(new_id(), store.tenant, parameters, priority, {}, 3600.0, 86_400.0)


async def submit_all(submitter: Submitter, jobs: list[NewJob]) -> list[Accepted | BaseException]:
    return await asyncio.gather(*(submitter.submit(job) for job in jobs), return_exceptions=True)


@pytest.fixture
async def announcer(settings: DispatcherSettings) -> AsyncIterator[Announcer]:
    events = AsyncEvents(settings.redis_url.get_secret_value())
    yield Announcer(events)
    await events.close()


@pytest.fixture
async def submitter(
    async_database: AsyncEngine, publisher: Publisher, announcer: Announcer, empty_queues: None
) -> AsyncIterator[Submitter]:
    submitter = Submitter(async_database, publisher, announcer, publish_timeout_s=5.0)
    running = asyncio.create_task(submitter.run())
    yield submitter
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_jobs_of_one_flush_are_stored_and_those_with_room_have_tickets(
    store: Store, submitter: Submitter, publisher: Publisher
) -> None:
    accepted = await submit_all(submitter, [new_job(store) for _ in range(40)])
    assert all(isinstance(answer, Accepted) for answer in accepted)
    out = store.sql("SELECT count(*) FROM jobs WHERE dispatched_at IS NOT NULL")[0][0]
    assert 8 <= out < 40
    assert await publisher.depth(MODEL) == out


async def test_one_bad_row_fails_alone(store: Store, submitter: Submitter) -> None:
    jobs = [new_job(store) for _ in range(33)]
    jobs[20] = new_job(store, priority=99)
    answers = await submit_all(submitter, jobs)
    assert [index for index, answer in enumerate(answers) if isinstance(answer, IntegrityError)] == [20]
    assert store.sql("SELECT count(*) FROM jobs")[0][0] == 32


async def test_without_a_broker_jobs_are_accepted_and_wait_for_the_dispatcher(
    store: Store, async_database: AsyncEngine, announcer: Announcer
) -> None:
    submitter = Submitter(async_database, Publisher(AWAY, "away", [MODEL]), announcer, publish_timeout_s=0.25)
    running = asyncio.create_task(submitter.run())
    answers = await submit_all(submitter, [new_job(store) for _ in range(3)])
    assert all(isinstance(answer, Accepted) for answer in answers)
    assert store.sql("SELECT count(*) FROM jobs WHERE dispatched_at IS NULL")[0][0] == 3
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
