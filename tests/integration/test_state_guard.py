"""The schema guards the state graph by itself, whatever a faulty build asks for."""

import itertools
from uuid import UUID

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from common.db.tables import metadata
from common.domain.jobs import TERMINAL_STATES, TRANSITIONS, JobState
from tests.integration.conftest import Store

_MAKE = """
UPDATE jobs SET state = :state, token = gen_random_uuid(), object_key = 'k', object_sha256 = 's', object_bytes = 1,
    finished_at = CASE WHEN :terminal THEN now() END WHERE id = :id
"""


def _put(store: Store, job_id: UUID, state: JobState) -> None:
    store.sql(_MAKE, id=job_id, state=state, terminal=state in TERMINAL_STATES)


def _job_in(store: Store, state: JobState) -> UUID:
    job_id: UUID = store.submit()[0].id
    if state is not JobState.QUEUED:
        _put(store, job_id, state)
    return job_id


@pytest.mark.parametrize(("before", "after"), list(itertools.permutations(JobState, 2)))
def test_the_trigger_allows_exactly_the_moves_of_the_table(store: Store, before: JobState, after: JobState) -> None:
    job_id = _job_in(store, before)
    if after in TRANSITIONS[before]:
        _put(store, job_id, after)
        assert store.row(job_id).state == after
    else:
        with pytest.raises(IntegrityError, match="not a move of the state graph"):
            _put(store, job_id, after)


def test_every_state_change_raises_the_version(store: Store) -> None:
    job_id = store.submit()[0].id
    store.claim(job_id)
    assert store.row(job_id).version == 2


def test_attempt_only_grows(store: Store) -> None:
    job_id = store.submit()[0].id
    store.claim(job_id)
    with pytest.raises(IntegrityError, match="attempt only grows"):
        store.sql("UPDATE jobs SET attempt = 0 WHERE id = :id", id=job_id)


def test_the_tables_in_code_are_those_of_the_migrations(store: Store) -> None:
    context = MigrationContext.configure(store.connection)
    differences = [d for d in compare_metadata(context, metadata) if d[0] != "remove_index"]
    assert differences == []


def test_a_job_cannot_succeed_without_its_object(store: Store) -> None:
    job_id = store.submit()[0].id
    with pytest.raises(IntegrityError):
        store.connection.execute(
            text("UPDATE jobs SET state = 'succeeded', finished_at = now() WHERE id = :id"), {"id": job_id}
        )
