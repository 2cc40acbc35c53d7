"""What the api's reads answer and cost, against the real Postgres."""

import time
from collections.abc import Iterator

import pytest
from sqlalchemy import text

from common.db import readings
from tests.integration.conftest import MODEL, Store

QUEUED = 50_000


def test_scratch(store: Store) -> None:
    first, = store.submit(1)
    store.sql(f"""INSERT INTO jobs (id, tenant_id, model, priority, params, batch_key, metadata, queue_deadline, deadline)
      SELECT gen_random_uuid(), tenant_id, model, 5, params || jsonb_build_object('prompt', repeat(md5(n::text), 20)), batch_key, metadata, queue_deadline, deadline
      FROM jobs, generate_series(1, {QUEUED}) n""")
    for analyzed in (0, 1):
        if analyzed:
            store.sql("VACUUM ANALYZE jobs")
        ids = [str(r.id) for r in store.sql("SELECT id FROM jobs ORDER BY id")]
        t = str(store.tenant)
        for name, values in {
            "JOB_BY_ID": {"id": ids[-1], "tenant_id": t},
            "JOBS_BY_ID": {"ids": ids[::100], "tenant_id": t},
            "JOBS_PAGE": {"tenant_id": t, "before": None, "state": None, "model": None, "limit": 100},
            "LIVE_JOBS": {"tenant_id": t, "limit": 1000},
        }.items():
            for _ in range(7):
                start = time.perf_counter()
                rows = store.connection.execute(getattr(readings, name), values).all()
                took = time.perf_counter() - start
                print(analyzed, name, len(rows), rows[0].position, rows[-1].position, f"{took:.4f}")
        for name, values in {"JOBS_PAGE": {"tenant_id": t, "before": None, "state": None, "model": None, "limit": 100},"JOB_BY_ID": {"id": ids[-1], "tenant_id": t}}.items():
            for r in store.connection.execute(text("EXPLAIN (ANALYZE, BUFFERS) " + str(getattr(readings, name))), values):
                print(r[0])
    assert 0
