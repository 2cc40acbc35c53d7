"""What is read for clients and for the control loop; nothing here changes a job."""

from sqlalchemy import text

# A position is exact up to here and stops here, so that what a read costs (a few ms) does not grow with the queue.
DEEPEST_POSITION = 10_000
# Who counts as there is as in the dispatcher: three missed heartbeats, and a worker's capacity counts no longer.
_SERVED = "SELECT DISTINCT model FROM workers WHERE accepting AND heartbeat_at > now() - interval '30 seconds'"
_SHOWN = """
    j.id, j.tenant_id, j.model, j.state, j.priority, j.params, j.metadata, j.version, j.attempt, j.cancel_requested_at,
    j.error_code, j.error_class, j.error_message, j.object_key, j.object_sha256, j.object_bytes, j.result, j.timings,
    j.batch_size, j.created_at, j.started_at, j.finished_at, a.phase, a.step, w.jobs_per_s,
    s.model IS NOT NULL AS served, extract(epoch FROM j.queue_deadline - now())::double precision AS expires_in_s
"""
_BESIDE = f"""
    LEFT JOIN attempts a ON a.job_id = j.id AND a.attempt = j.attempt AND j.state = 'running'
    LEFT JOIN release_windows w ON w.model = j.model AND j.state = 'queued'
    LEFT JOIN ({_SERVED}) s ON s.model = j.model
"""


def _with_places(chosen: str, order: str) -> str:
    """Jobs with their places in the queues. One pass over a model's queue, in its index's order, numbers all of them.

    To count what is ahead of each of a thousand jobs would be a thousand such passes. The full join is there because
    it can only be hashed or merged: statistics lag behind a queue that fills within seconds, and a plan that was made
    for two jobs would compare each of a thousand with each of the queue.
    """
    return f"""
    WITH chosen AS MATERIALIZED ({chosen}), places AS (
        SELECT q.id, q.place FROM (SELECT DISTINCT model FROM chosen WHERE state = 'queued') m CROSS JOIN LATERAL (
            SELECT n.id, row_number() OVER (ORDER BY n.priority DESC, n.id) AS place FROM (
                SELECT id, priority FROM jobs WHERE model = m.model AND state = 'queued'
                ORDER BY priority DESC, id LIMIT {DEEPEST_POSITION}
            ) n
        ) q
    ), j AS MATERIALIZED (SELECT c.*, p.place FROM chosen c FULL JOIN places p ON p.id = c.id)
    SELECT {_SHOWN}, CASE WHEN j.state = 'queued' THEN coalesce(j.place, {DEEPEST_POSITION}) END AS position
    FROM j {_BESIDE} WHERE j.state IS NOT NULL {order}
    """  # noqa: S608  the pieces are constants of this module


# One job of a tenant; another tenant's job is as good as none. Most reads are of this kind, and for one job it is
# cheaper to count what is ahead of it than to number the whole queue. Two ranges of the index instead of one condition
# with OR: that would visit what is behind the job as well.
JOB_BY_ID = text(f"""
SELECT {_SHOWN}, CASE WHEN j.state = 'queued' THEN (SELECT count(*) FROM (
        SELECT 1 FROM jobs q WHERE q.model = j.model AND q.state = 'queued' AND q.priority > j.priority
        UNION ALL
        SELECT 1 FROM jobs q WHERE q.model = j.model AND q.state = 'queued' AND q.priority = j.priority AND q.id <= j.id
        LIMIT {DEEPEST_POSITION}
    ) AS ahead) END AS position
FROM jobs j {_BESIDE}
WHERE j.id = CAST(:id AS uuid) AND j.tenant_id = CAST(:tenant_id AS uuid)
""")  # noqa: S608  the pieces are constants of this module

# Many jobs of one tenant.
JOBS_BY_ID = text(
    _with_places(
        "SELECT * FROM jobs WHERE id = ANY(CAST(:ids AS uuid[])) AND tenant_id = CAST(:tenant_id AS uuid)", order=""
    )
)

# One page of a tenant's jobs, newest first. Ids sort by time, so the id is the cursor.
JOBS_PAGE = text(
    _with_places(
        """
        SELECT * FROM jobs WHERE tenant_id = CAST(:tenant_id AS uuid)
            AND (CAST(:before AS uuid) IS NULL OR id < CAST(:before AS uuid))
            AND (CAST(:state AS text) IS NULL OR state = :state)
            AND (CAST(:model AS text) IS NULL OR model = :model)
        ORDER BY id DESC LIMIT :limit
        """,
        order="ORDER BY j.id DESC",
    )
)

# A tenant's jobs that have not ended, for a subscription to all of them.
LIVE_JOBS = text(
    _with_places(
        """
        SELECT * FROM jobs WHERE tenant_id = CAST(:tenant_id AS uuid) AND state IN ('queued', 'running')
        ORDER BY id LIMIT :limit
        """,
        order="ORDER BY j.id",
    )
)

# Where followed jobs stand, without what clients are shown of them: cheap enough to ask for all of them every few
# seconds. Given are jobs by id, and tenants of whom every live job is followed that is newer than an id.
JOB_MARKS = text("""
SELECT j.id, j.tenant_id, j.version, j.attempt, a.phase, a.step, (j.params ->> 'num_inference_steps')::integer AS steps
FROM jobs j LEFT JOIN attempts a ON a.job_id = j.id AND a.attempt = j.attempt AND j.state = 'running'
WHERE j.id = ANY(CAST(:ids AS uuid[]))
UNION
SELECT j.id, j.tenant_id, j.version, j.attempt, a.phase, a.step, (j.params ->> 'num_inference_steps')::integer AS steps
FROM unnest(CAST(:tenant_ids AS uuid[]), CAST(:sinces AS uuid[])) AS f(tenant_id, since)
JOIN jobs j ON j.tenant_id = f.tenant_id AND j.id > f.since AND j.state IN ('queued', 'running')
LEFT JOIN attempts a ON a.job_id = j.id AND a.attempt = j.attempt AND j.state = 'running'
""")

KEY_BY_HASH = text("""
SELECT k.id, k.tenant_id, k.scopes FROM api_keys k
WHERE k.sha256 = :sha256 AND k.revoked_at IS NULL AND (k.expires_at IS NULL OR k.expires_at > now())
""")

# Models with jobs that could be released now, and how many tickets more may be out; null: no bound.
ROOMS = text("""
SELECT w.model, w.size - (SELECT count(*) FROM jobs j
    WHERE j.model = w.model AND j.state = 'queued' AND j.dispatched_at IS NOT NULL) AS room
FROM release_windows w
WHERE EXISTS (SELECT 1 FROM jobs j WHERE j.model = w.model AND j.state = 'queued' AND j.dispatched_at IS NULL
    AND j.run_at <= now() AND j.cancel_requested_at IS NULL)
""")

# Per model: what is out, what waits, who serves it. The dispatcher sizes its windows by this.
MODEL_LOAD = text("""
SELECT model, sum(released)::integer AS released, sum(waiting)::integer AS waiting, sum(capacity)::integer AS capacity,
    max(oldest_s) AS oldest_s
FROM (
    SELECT model, count(*) FILTER (WHERE dispatched_at IS NOT NULL) AS released,
        count(*) FILTER (WHERE dispatched_at IS NULL AND run_at <= now()) AS waiting, 0 AS capacity,
        max(extract(epoch FROM now() - created_at)) AS oldest_s
    FROM jobs WHERE state = 'queued' GROUP BY model
    UNION ALL
    SELECT model, 0, 0, sum(max_batch), NULL FROM workers
    WHERE accepting AND heartbeat_at > now() - :worker_silence_s * interval '1 second' GROUP BY model
) AS load GROUP BY model
""")

# Finished jobs a second over the last ten minutes, or since the first of them when that is less.
SERVICE_RATE = text("""
SELECT model, count(*) / greatest(1.0, extract(epoch FROM now() - min(started_at)))::double precision AS jobs_per_s
FROM jobs WHERE state = 'succeeded' AND finished_at > now() - interval '10 minutes' GROUP BY model
""")

# Releases that may have lost their ticket, oldest first, and how many tickets of the model are out in all.
OLD_RELEASES = text("""
SELECT id, dispatch_seq, (SELECT count(*) FROM jobs o
    WHERE o.model = :model AND o.state = 'queued' AND o.dispatched_at IS NOT NULL) AS released
FROM jobs
WHERE model = :model AND state = 'queued' AND dispatched_at < now() - :older_than_s * interval '1 second'
ORDER BY dispatched_at LIMIT 500
""")
