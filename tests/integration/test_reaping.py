"""The dispatcher's scans: lost workers, lost tickets, deadlines, and patience after an outage."""

import asyncio
import random
from typing import Any

import pytest
from sqlalchemy import Row
from sqlalchemy.ext.asyncio import AsyncEngine

from common.broker.publisher import Publisher
from common.db.upkeep import NOTE_SCAN
from common.events import AsyncEvents
from common.settings import DispatcherSettings
from dispatcher.expire import expire_jobs
from dispatcher.lead import ROLE, Leadership
from dispatcher.reap import LostTickets, reap_leases
from dispatcher.release import refresh_windows, release_backlog
from tests.integration.conftest import MODEL, Store
from tests.integration.servers import Servers


@pytest.fixture
def events(settings: DispatcherSettings) -> AsyncEvents:
    return AsyncEvents(settings.redis_url.get_secret_value())


def run_out(store: Store) -> None:
    store.sql("UPDATE attempts SET lease_expires_at = now() - interval '1 second'")


async def reap(database: AsyncEngine, events: AsyncEvents) -> None:
    await reap_leases(database, events, random.Random(0))


async def test_a_job_whose_worker_was_lost_is_queued_at_once(
    store: Store, async_database: AsyncEngine, events: AsyncEvents
) -> None:
    claim = store.claim(store.submit()[0].id)[0]
    run_out(store)
    await reap(async_database, events)
    row = store.row(claim.id)
    assert (row.state, row.failures, row.token) == ("queued", {"worker_lost": 1}, claim.token)
    assert len(store.claim(claim.id)) == 1


async def test_a_job_that_lost_ten_workers_fails(
    store: Store, async_database: AsyncEngine, events: AsyncEvents
) -> None:
    claim = store.claim(store.submit()[0].id)[0]
    store.sql("""UPDATE jobs SET failures = '{"worker_lost": 9}'""")
    run_out(store)
    await reap(async_database, events)
    row = store.row(claim.id)
    assert (row.state, row.error_code) == ("failed", "worker_lost")


async def test_a_cancelled_job_whose_worker_was_lost_is_cancelled(
    store: Store, async_database: AsyncEngine, events: AsyncEvents
) -> None:
    claim = store.claim(store.submit()[0].id)[0]
    store.sql("UPDATE jobs SET cancel_requested_at = now()")
    run_out(store)
    await reap(async_database, events)
    assert store.row(claim.id).state == "cancelled"


def note_scan(store: Store) -> bool:
    values = {"role": ROLE, "gap_s": 15.0, "lease_s": 45.0}
    noted: bool = store.connection.execute(NOTE_SCAN, values).scalar_one()
    return noted


async def test_after_an_outage_nothing_expires_for_a_lease(store: Store, async_database: AsyncEngine) -> None:
    await Leadership(async_database, "me", 5.0).renew()
    assert note_scan(store) is False
    store.sql("UPDATE leaders SET last_scan_at = now() - interval '1 minute'")
    assert note_scan(store) is True
    assert note_scan(store) is True
    store.sql("UPDATE leaders SET expire_nothing_before = now() - interval '1 second'")
    assert note_scan(store) is False


async def test_one_leads_and_the_other_takes_over_when_the_lease_ends(
    store: Store, async_database: AsyncEngine
) -> None:
    first, second = (Leadership(async_database, name, 5.0) for name in ("first", "second"))
    await first.renew()
    await second.renew()
    assert (first.held, second.held) == (True, False)
    store.sql("UPDATE leaders SET expires_at = now() - interval '1 second'")
    await second.renew()
    assert second.held


async def test_a_leader_that_steps_down_is_followed_at_once(store: Store, async_database: AsyncEngine) -> None:
    first, second = (Leadership(async_database, name, 5.0) for name in ("first", "second"))
    await first.renew()
    await first.step_down()
    await second.renew()
    assert (first.held, second.held) == (False, True)


async def test_a_leader_may_leave_while_postgres_is_away(
    store: Store, async_database: AsyncEngine, stack: Servers
) -> None:
    leader = Leadership(async_database, "me", 60.0)
    await leader.renew()
    await asyncio.to_thread(stack.stop_part, "postgres")
    try:
        await leader.step_down()
    finally:
        await asyncio.to_thread(stack.start_part, "postgres")
    assert not leader.held


async def expire(database: AsyncEngine, events: AsyncEvents) -> None:
    await expire_jobs(database, events, backstop_s=30.0)


async def test_a_job_that_nobody_started_in_time_expires(
    store: Store, async_database: AsyncEngine, events: AsyncEvents
) -> None:
    job_id = store.submit(queue_deadline_s=-1)[0].id
    await expire(async_database, events)
    row = store.row(job_id)
    assert (row.state, row.error_code) == ("expired", "queue_deadline_exceeded")


async def test_a_job_that_was_started_once_does_not_expire(
    store: Store, async_database: AsyncEngine, events: AsyncEvents
) -> None:
    job_id = store.submit(queue_deadline_s=-1)[0].id
    store.sql("UPDATE jobs SET attempt = 1")
    await expire(async_database, events)
    assert store.row(job_id).state == "queued"


@pytest.mark.parametrize(("overdue_s", "state"), [(10, "running"), (40, "failed")])
async def test_a_running_job_is_left_to_its_worker_for_a_while(
    store: Store, async_database: AsyncEngine, events: AsyncEvents, overdue_s: int, state: str
) -> None:
    claim = store.claim(store.submit()[0].id)[0]
    store.sql("UPDATE jobs SET deadline = now() - :late * interval '1 second'", late=overdue_s)
    await expire(async_database, events)
    assert store.row(claim.id).state == state


def old_releases(store: Store, count: int) -> list[Row[Any]]:
    added = store.submit(count)
    store.sql("UPDATE jobs SET dispatched_at = now() - interval '2 minutes'")
    return added


async def test_lost_tickets_are_sent_again(
    store: Store,
    async_database: AsyncEngine,
    publisher: Publisher,
    empty_queues: None,
) -> None:
    old_releases(store, 3)
    scan = LostTickets(older_than_s=60.0, recheck_s=0.0)
    await scan.scan(async_database, publisher, [MODEL])
    await refresh_windows(async_database, None)
    await release_backlog(async_database, publisher)
    assert await publisher.depth(MODEL) == 3
    assert {row.dispatch_seq for row in store.sql("SELECT dispatch_seq FROM jobs")} == {2}


async def test_tickets_that_the_broker_still_holds_are_not_lost(
    store: Store,
    async_database: AsyncEngine,
    publisher: Publisher,
    empty_queues: None,
) -> None:
    store.submit(3, window=0)
    await refresh_windows(async_database, None)
    await release_backlog(async_database, publisher)
    store.sql("UPDATE jobs SET dispatched_at = now() - interval '2 minutes'")
    await LostTickets(older_than_s=60.0, recheck_s=0.0).scan(async_database, publisher, [MODEL])
    assert {row.dispatch_seq for row in store.sql("SELECT dispatch_seq FROM jobs")} == {1}


async def test_one_short_count_is_not_enough(
    store: Store,
    async_database: AsyncEngine,
    publisher: Publisher,
    empty_queues: None,
) -> None:
    old_releases(store, 3)
    await LostTickets(older_than_s=60.0, recheck_s=30.0).scan(async_database, publisher, [MODEL])
    assert len(store.sql("SELECT 1 FROM jobs WHERE dispatched_at IS NOT NULL")) == 3


async def test_without_a_broker_nothing_is_released(store: Store, async_database: AsyncEngine) -> None:
    store.submit(2, window=0)
    await refresh_windows(async_database, None)
    away = Publisher("amqp://nobody:nothing@127.0.0.1:1/%2F", "away", [MODEL])
    await release_backlog(async_database, away)
    assert len(store.sql("SELECT 1 FROM jobs WHERE dispatched_at IS NULL AND dispatch_seq = 0")) == 2


async def test_a_lost_ticket_is_missed_among_the_traffic_of_others(
    store: Store, async_database: AsyncEngine, publisher: Publisher, empty_queues: None
) -> None:
    lost = store.submit(1)[0]
    store.sql("UPDATE jobs SET dispatched_at = now() - interval '2 minutes'")
    store.submit(3, window=0)
    await refresh_windows(async_database, None)
    await release_backlog(async_database, publisher)
    await LostTickets(older_than_s=60.0, recheck_s=0.0).scan(async_database, publisher, [MODEL])
    waiting = store.sql("SELECT id FROM jobs WHERE dispatched_at IS NULL")
    assert [row.id for row in waiting] == [lost.id]


async def test_an_overdue_job_that_was_cancelled_ends_as_cancelled(
    store: Store, async_database: AsyncEngine, events: AsyncEvents
) -> None:
    claim = store.claim(store.submit()[0].id)[0]
    store.sql("UPDATE jobs SET cancel_requested_at = now(), deadline = now() - interval '1 hour'")
    await expire(async_database, events)
    assert store.row(claim.id).state == "cancelled"
    assert store.sql("SELECT ended_at FROM attempts")[0].ended_at is not None
