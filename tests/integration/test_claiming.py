"""The worker's side of a claim: certainty about it, and what goes back."""

import uuid

from sqlalchemy import Engine

from common.domain.tickets import Ticket
from tests.integration.conftest import MODEL, Store
from worker.claim import claim, give_back, make_tokens


def tickets(store: Store, count: int) -> list[Ticket]:
    return [Ticket(row.id, row.dispatch_seq, MODEL, "k") for row in store.submit(count)]


def test_a_claim_that_is_repeated_with_its_tokens_is_the_same_claim(store: Store, database: Engine) -> None:
    tokens = make_tokens(tickets(store, 3))
    first = claim(database, tokens, "w1", uuid.uuid4(), 45.0)
    again = claim(database, tokens, "w1", uuid.uuid4(), 45.0)
    assert [a.fence() for a in again] == [a.fence() for a in first]
    assert {a.attempt for a in again} == {1}


def test_what_was_taken_by_another_worker_is_left_out(store: Store, database: Engine) -> None:
    held = tickets(store, 2)
    store.claim(held[0].job_id, worker="w2")
    claimed = claim(database, make_tokens(held), "w1", uuid.uuid4(), 45.0)
    assert [attempt.job_id for attempt in claimed] == [held[1].job_id]


def test_what_does_not_fit_waits_for_its_next_release(store: Store, database: Engine) -> None:
    held = tickets(store, 2)
    give_back(database, held[1:])
    waiting = store.sql("SELECT id FROM jobs WHERE dispatched_at IS NULL")
    assert [row.id for row in waiting] == [held[1].job_id]
