"""The worker's side of a claim: certainty about it, and what goes back."""

from sqlalchemy import Engine

from common.domain.tickets import Ticket
from tests.integration.conftest import MODEL, Store
from worker.claim import claim, claimed_already, give_back, intend


def tickets(store: Store, count: int) -> list[Ticket]:
    return [Ticket(row.id, row.dispatch_seq, MODEL, store.row(row.id).batch_key) for row in store.submit(count)]


def test_a_claim_whose_reply_was_lost_is_found_again(store: Store, database: Engine) -> None:
    intent = intend(tickets(store, 3))
    first = claim(database, intent, "w1", 45.0)
    again = claimed_already(database, intent)
    assert [a.fence() for a in again] == [a.fence() for a in first]
    assert len(again) == 3


def test_a_claim_that_did_not_happen_is_not_found(store: Store, database: Engine) -> None:
    assert claimed_already(database, intend(tickets(store, 3))) == []


def test_an_old_ticket_brings_no_job_into_a_batch_that_must_run_alone(store: Store, database: Engine) -> None:
    held = tickets(store, 2)
    store.sql("UPDATE jobs SET batch_key = 'alone-1' WHERE id = :id", id=held[0].job_id)
    claimed = claim(database, intend(held), "w1", 45.0)
    assert [attempt.job_id for attempt in claimed] == [held[1].job_id]


def test_what_was_taken_by_another_worker_is_left_out(store: Store, database: Engine) -> None:
    held = tickets(store, 2)
    store.claim(held[0].job_id, worker="w2")
    claimed = claim(database, intend(held), "w1", 45.0)
    assert [attempt.job_id for attempt in claimed] == [held[1].job_id]


def test_what_does_not_fit_waits_for_its_next_release(store: Store, database: Engine) -> None:
    held = tickets(store, 2)
    give_back(database, held[1:])
    waiting = store.sql("SELECT id FROM jobs WHERE dispatched_at IS NULL")
    assert [row.id for row in waiting] == [held[1].job_id]
