"""Which jobs get a ticket, and when."""

import json
from typing import Any

from sqlalchemy import Row

from common.db.readings import MODEL_LOAD, ROOMS
from common.db.statements import RELEASE, TAKE_BACK
from common.db.upkeep import SET_WINDOW
from dispatcher.release import window_for
from tests.integration.conftest import MODEL, Store


def release(store: Store, room: int) -> list[Row[Any]]:
    return list(store.connection.execute(RELEASE, {"model": MODEL, "room": room}).all())


def test_a_submit_is_released_while_the_window_has_room(store: Store) -> None:
    added = store.submit(5, window=3)
    assert [row.released for row in added] == [True] * 3 + [False] * 2
    assert [row.position for row in added] == [1, 2, 3, 4, 5]


def test_nothing_overtakes_the_backlog(store: Store) -> None:
    store.submit(2, window=1)
    store.sql("UPDATE jobs SET dispatched_at = NULL")
    assert [row.released for row in store.submit(1, window=100)] == [False]


def test_a_window_without_bound_releases_everything(store: Store) -> None:
    store.connection.execute(SET_WINDOW, {"model": MODEL, "size": None, "jobs_per_s": None})
    assert all(row.released for row in store.submit(30, window=1))


def test_a_small_tenant_is_not_kept_behind_a_big_one(store: Store) -> None:
    store.submit(50, window=0)
    newcomer = store.add_tenant("newcomer")
    job = store.submit(1, tenant=newcomer, window=0)[0]
    assert job.id in {row.id for row in release(store, 2)}


def test_priority_orders_within_a_tenant(store: Store) -> None:
    store.submit(3, window=0, priority=5)
    urgent = store.submit(1, window=0, priority=9)[0]
    assert [row.id for row in release(store, 1)] == [urgent.id]


def test_waiting_raises_the_priority(store: Store) -> None:
    patient = store.submit(1, window=0, priority=1)[0]
    store.sql("UPDATE jobs SET created_at = now() - interval '2 hours'")
    store.submit(3, window=0, priority=9)
    assert [row.id for row in release(store, 1)] == [patient.id]


def test_a_retry_that_is_not_due_is_left_alone(store: Store) -> None:
    store.submit(1, window=0)
    store.sql("UPDATE jobs SET run_at = now() + interval '1 minute'")
    assert release(store, 5) == []


def test_a_release_is_taken_back_by_its_own_number_only(store: Store) -> None:
    store.submit(1, window=0)
    ticket = release(store, 1)[0]
    stale = json.dumps([{"id": str(ticket.id), "dispatch_seq": ticket.dispatch_seq - 1}])
    assert store.connection.execute(TAKE_BACK, {"rows": stale}).all() == []
    own = json.dumps([{"id": str(ticket.id), "dispatch_seq": ticket.dispatch_seq}])
    assert len(store.connection.execute(TAKE_BACK, {"rows": own}).all()) == 1
    assert release(store, 1)[0].dispatch_seq == ticket.dispatch_seq + 1


def test_the_room_is_the_window_less_what_is_out(store: Store) -> None:
    store.submit(6, window=2)
    store.connection.execute(SET_WINDOW, {"model": MODEL, "size": 5, "jobs_per_s": None})
    assert [(row.model, row.room) for row in store.connection.execute(ROOMS)] == [(MODEL, 3)]


def test_the_load_counts_what_is_out_what_waits_and_who_works(store: Store) -> None:
    store.submit(6, window=2)
    store.sql("INSERT INTO workers VALUES ('w1', :m, 'wan', 4, true), ('gone', :m, 'wan', 4, false)", m=MODEL)
    load = store.connection.execute(MODEL_LOAD, {"worker_silence_s": 30}).one()
    assert (load.released, load.waiting, load.capacity) == (2, 4, 4)


def test_a_window_is_twice_the_capacity_and_never_below_eight() -> None:
    assert [window_for(0, None), window_for(4, None), window_for(16, None)] == [8, 8, 32]
    assert [window_for(16, 5), window_for(16, 0)] == [5, None]
