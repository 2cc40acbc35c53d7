"""What the api's reads answer and cost, against the real Postgres."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from uuid import UUID

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from api.reads import JobReads
from common.db.readings import DEEPEST_POSITION
from common.events import AsyncEvents
from common.settings import DispatcherSettings
from common.urls import SignedUrl
from tests.integration.conftest import Store

_QUEUED = 50_000
# The event loop and Postgres share two cores here; without one pass for all positions a list takes a minute.
_LONGEST_READ_S = 0.5


@pytest.fixture
async def reads(async_database: AsyncEngine, settings: DispatcherSettings) -> AsyncIterator[JobReads]:
    events = AsyncEvents(settings.redis_url.get_secret_value())
    yield JobReads(async_database, lambda key: SignedUrl(key, 0), events)
    await events.close()


def crowd(store: Store) -> UUID:
    """Fill the model's queue, and give the first job."""
    (first,) = store.submit(1)
    store.sql(
        """
        INSERT INTO jobs (id, tenant_id, model, priority, params, batch_key, metadata, queue_deadline, deadline)
        SELECT ('ffffffff-0000-7000-8000-' || lpad(to_hex(n), 12, '0'))::uuid, tenant_id, model, 5, params,
            batch_key, metadata, queue_deadline, deadline
        FROM jobs, generate_series(1, :jobs) n
        """,
        jobs=_QUEUED,
    )
    return UUID(str(first.id))


async def best_s(read: Callable[[], Awaitable[object]]) -> float:
    """Seconds that the read takes when nothing else keeps the machine busy: the best of three."""
    took = []
    for _ in range(3):
        started = time.perf_counter()
        assert await read()
        took.append(time.perf_counter() - started)
    return min(took)


async def test_no_read_is_slow_with_a_long_queue(store: Store, reads: JobReads) -> None:
    first = crowd(store)
    ids = [row.id for row in store.sql("SELECT id FROM jobs ORDER BY id DESC LIMIT 400")]
    took = {
        "many": await best_s(lambda: reads.jobs(store.tenant, ids)),
        "last": await best_s(lambda: reads.job(store.tenant, ids[0])),
        "first": await best_s(lambda: reads.job(store.tenant, first)),
        "page": await best_s(lambda: reads.page(store.tenant, None, None, None, 101)),
        "live": await best_s(lambda: reads.live(store.tenant, 1000)),
    }
    assert {name: seconds for name, seconds in took.items() if seconds > _LONGEST_READ_S} == {}


async def test_every_read_tells_the_same_positions(store: Store, reads: JobReads) -> None:
    low = store.submit(2, priority=1)
    high = store.submit(2, priority=9)
    expected = {row.id: place for place, row in enumerate([*high, *low], start=1)}
    one_by_one = [await reads.job(store.tenant, job_id) for job_id in expected]
    together = await reads.jobs(store.tenant, expected)
    page = await reads.page(store.tenant, None, None, None, 10)
    live = await reads.live(store.tenant, 10)
    for views in (one_by_one, together.values(), page, live):
        assert {view.job_id: view.body["queue"]["position"] for view in views if view} == expected
    assert [view.job_id for view in page] == sorted(expected, reverse=True)
    assert [view.job_id for view in live] == sorted(expected)


async def test_positions_end_where_counting_does(store: Store, reads: JobReads) -> None:
    crowd(store)
    (newest, *_), one = await asyncio.gather(
        reads.page(store.tenant, None, None, None, 2),
        reads.job(store.tenant, store.sql("SELECT id FROM jobs ORDER BY id DESC LIMIT 1")[0].id),
    )
    assert one is not None
    assert newest.body["queue"] == one.body["queue"]
    assert one.body["queue"]["position"] == DEEPEST_POSITION


async def test_a_crowd_that_asks_for_all_live_jobs_shares_few_reads(store: Store, reads: JobReads) -> None:
    store.submit(3)
    answers = await asyncio.gather(*(reads.live(store.tenant, 1000) for _ in range(200)))
    assert len({id(answer) for answer in answers}) <= 2


async def test_a_tenant_that_lists_without_end_waits_for_itself(store: Store, reads: JobReads) -> None:
    other = store.add_tenant("other")
    store.submit(1)
    store.submit(1, tenant=other)
    done: list[UUID] = []

    async def list_jobs(tenant: UUID) -> None:
        await reads.page(tenant, None, None, None, 100)
        done.append(tenant)

    await asyncio.gather(*(list_jobs(tenant) for tenant in [store.tenant] * 30 + [other]))
    assert done.index(other) < 5
