"""Claims, completions and their fence: no attempt but the last one is ever believed."""

import json
import threading
import uuid
from typing import Any

import pytest
from sqlalchemy import Engine, Row

from common.db.statements import CANCEL, CLAIM, CLAIMS_BY_TOKEN, COMPLETE, END_ATTEMPT, HEARTBEAT
from tests.integration.conftest import Store


def complete(store: Store, claim: Row[Any]) -> Row[Any] | None:
    values = {
        "id": str(claim.id),
        "attempt": claim.attempt,
        "token": str(claim.token),
        "object_key": f"videos/{claim.id}/{claim.attempt}-x.mp4",
        "object_sha256": "x" * 64,
        "object_bytes": 10,
        "result": json.dumps({"attempt": claim.attempt}),
        "timings": "{}",
        "batch_size": 1,
    }
    return store.connection.execute(COMPLETE, values).first()


def lose_lease(store: Store, claim: Row[Any]) -> Row[Any] | None:
    store.sql("UPDATE attempts SET lease_expires_at = now() - interval '1 second' WHERE job_id = :id", id=claim.id)
    return end(store, claim, "queued", expired_only=True)


def end(store: Store, claim: Row[Any], state: str, *, expired_only: bool = False) -> Row[Any] | None:
    values = {
        "id": str(claim.id),
        "attempt": claim.attempt,
        "token": str(claim.token),
        "state": state,
        "delay_s": 0.0,
        "failures": "{}",
        "error_class": "internal",
        "error_code": "internal_error" if state == "failed" else None,
        "error_message": "why",
        "detail": "why exactly",
        "outcome": "internal",
        "alone": False,
        "expired_only": expired_only,
    }
    return store.connection.execute(END_ATTEMPT, values).first()


def cancel(store: Store, job_id: uuid.UUID) -> Row[Any] | None:
    return store.connection.execute(CANCEL, {"id": str(job_id), "tenant_id": str(store.tenant)}).first()


def test_a_doubled_ticket_is_a_claim_that_finds_nothing(store: Store) -> None:
    job_id = store.submit()[0].id
    assert len(store.claim(job_id)) == 1
    assert store.claim(job_id) == []


def test_of_many_racing_workers_each_job_has_one(store: Store, database: Engine) -> None:
    ids = [str(row.id) for row in store.submit(50)]
    key = store.row(uuid.UUID(ids[0])).batch_key
    won: list[uuid.UUID] = []

    def race() -> None:
        rows = json.dumps([{"id": job_id, "token": str(uuid.uuid4()), "batch_key": key} for job_id in ids])
        values = {"rows": rows, "worker_id": "w", "batch_id": str(uuid.uuid4()), "lease_s": 45}
        with database.connect() as connection:
            won.extend(row.id for row in connection.execute(CLAIM, values))

    threads = [threading.Thread(target=race) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(str, won)) == sorted(ids)


def test_a_claim_whose_reply_was_lost_is_found_by_its_token(store: Store) -> None:
    claim = store.claim(store.submit()[0].id)[0]
    found = store.connection.execute(CLAIMS_BY_TOKEN, {"tokens": [str(claim.token)]}).one()
    assert (found.id, found.attempt) == (claim.id, 1)


def test_a_late_result_is_accepted_while_nobody_else_has_claimed(store: Store) -> None:
    claim = store.claim(store.submit()[0].id)[0]
    assert lose_lease(store, claim) is not None
    assert complete(store, claim) is not None
    assert store.row(claim.id).state == "succeeded"


def test_a_superseded_result_is_refused(store: Store) -> None:
    first = store.claim(store.submit()[0].id)[0]
    lose_lease(store, first)
    second = store.claim(first.id, worker="w2")[0]
    assert complete(store, first) is None
    assert complete(store, second) is not None
    assert store.row(first.id).result["attempt"] == 2


def test_a_cancelled_job_never_succeeds(store: Store) -> None:
    claim = store.claim(store.submit()[0].id)[0]
    cancel(store, claim.id)
    assert complete(store, claim) is None
    ended = end(store, claim, "queued")
    assert ended is not None
    assert ended.state == "cancelled"


def test_a_queued_job_is_cancelled_at_once_and_not_claimed(store: Store) -> None:
    job_id = store.submit()[0].id
    cancel(store, job_id)
    assert store.row(job_id).state == "cancelled"
    assert store.claim(job_id) == []


def test_another_tenant_cannot_cancel(store: Store) -> None:
    job_id = store.submit()[0].id
    stranger = store.add_tenant("stranger")
    assert store.connection.execute(CANCEL, {"id": str(job_id), "tenant_id": str(stranger)}).first() is None


def test_the_reaper_spares_a_lease_that_was_renewed(store: Store) -> None:
    claim = store.claim(store.submit()[0].id)[0]
    assert end(store, claim, "queued", expired_only=True) is None
    assert store.row(claim.id).state == "running"


def test_a_retry_is_not_claimed_before_its_time(store: Store) -> None:
    claim = store.claim(store.submit()[0].id)[0]
    end(store, claim, "queued")
    store.sql("UPDATE jobs SET run_at = now() + interval '1 hour' WHERE id = :id", id=claim.id)
    assert store.claim(claim.id) == []


@pytest.mark.parametrize(("attempt", "claimed"), [(0, 0), (1, 1)])
def test_the_queue_deadline_counts_for_the_first_start_only(store: Store, attempt: int, claimed: int) -> None:
    job_id = store.submit(queue_deadline_s=-1)[0].id
    store.sql("UPDATE jobs SET attempt = :attempt WHERE id = :id", attempt=attempt, id=job_id)
    assert len(store.claim(job_id)) == claimed


def beat(store: Store, *claims: Row[Any]) -> dict[uuid.UUID, bool]:
    rows = [
        {"id": str(c.id), "attempt": c.attempt, "token": str(c.token), "phase": "denoise", "step": 3} for c in claims
    ]
    answer = store.connection.execute(HEARTBEAT, {"rows": json.dumps(rows), "lease_s": 45})
    return {row.id: row.cancel for row in answer}


def test_a_heartbeat_renews_the_lease_and_notes_the_step(store: Store) -> None:
    claim = store.claim(store.submit()[0].id, lease_s=1)[0]
    beat(store, claim)
    attempt = store.sql("SELECT lease_expires_at > now() + interval '30 seconds' AS ok, step FROM attempts")[0]
    assert (attempt.ok, attempt.step) == (True, 3)


def test_a_heartbeat_tells_what_is_cancelled_and_what_is_lost(store: Store) -> None:
    kept, cancelled, lost = (store.claim(row.id)[0] for row in store.submit(3))
    cancel(store, cancelled.id)
    lose_lease(store, lost)
    store.claim(lost.id, worker="w2")
    assert beat(store, kept, cancelled, lost) == {kept.id: False, cancelled.id: True}
