"""What is read for clients and for the control loop; nothing here changes a job."""

from sqlalchemy import text

_JOB_COLUMNS = """
    j.id, j.tenant_id, j.model, j.state, j.priority, j.params, j.metadata, j.version, j.attempt, j.cancel_requested_at,
    j.error_code, j.error_class, j.error_message, j.object_key, j.object_sha256, j.object_bytes, j.result, j.timings,
    j.batch_size, j.created_at, j.started_at, j.finished_at, a.phase, a.step,
    CASE WHEN j.state = 'queued' THEN (
        SELECT count(*) FROM jobs q WHERE q.model = j.model AND q.state = 'queued'
            AND (q.priority > j.priority OR (q.priority = j.priority AND q.id <= j.id))
    ) END AS position,
    w.jobs_per_s
"""
_JOB_SOURCES = """
    jobs j LEFT JOIN attempts a ON a.job_id = j.id AND a.attempt = j.attempt AND j.state = 'running'
    LEFT JOIN release_windows w ON w.model = j.model AND j.state = 'queued'
"""

# Jobs of one tenant by id: another tenant's job is as good as none.
JOBS_BY_ID = text(f"""
SELECT {_JOB_COLUMNS} FROM {_JOB_SOURCES}
WHERE j.id = ANY(CAST(:ids AS uuid[])) AND j.tenant_id = CAST(:tenant_id AS uuid)
""")  # noqa: S608  the pieces are constants of this module

# One page of a tenant's jobs, newest first. Ids sort by time, so the id is the cursor.
JOBS_PAGE = text(f"""
SELECT {_JOB_COLUMNS} FROM {_JOB_SOURCES}
WHERE j.tenant_id = CAST(:tenant_id AS uuid)
    AND (CAST(:before AS uuid) IS NULL OR j.id < CAST(:before AS uuid))
    AND (CAST(:state AS text) IS NULL OR j.state = :state)
    AND (CAST(:model AS text) IS NULL OR j.model = :model)
ORDER BY j.id DESC LIMIT :limit
""")  # noqa: S608  the pieces are constants of this module

# A tenant's jobs that have not ended, for a subscription to all of them.
LIVE_JOBS = text(f"""
SELECT {_JOB_COLUMNS} FROM {_JOB_SOURCES}
WHERE j.tenant_id = CAST(:tenant_id AS uuid) AND j.state IN ('queued', 'running') ORDER BY j.id LIMIT :limit
""")  # noqa: S608  the pieces are constants of this module

# Where followed jobs stand, without what clients are shown of them: cheap enough to ask for all of them every few
# seconds. Given are jobs by id, and tenants of whom every live job is followed.
JOB_MARKS = text("""
SELECT j.id, j.tenant_id, j.version, j.attempt, a.phase, a.step, (j.params ->> 'num_inference_steps')::integer AS steps
FROM jobs j LEFT JOIN attempts a ON a.job_id = j.id AND a.attempt = j.attempt AND j.state = 'running'
WHERE j.id = ANY(CAST(:ids AS uuid[]))
UNION
SELECT j.id, j.tenant_id, j.version, j.attempt, a.phase, a.step, (j.params ->> 'num_inference_steps')::integer AS steps
FROM jobs j LEFT JOIN attempts a ON a.job_id = j.id AND a.attempt = j.attempt AND j.state = 'running'
WHERE j.tenant_id = ANY(CAST(:tenant_ids AS uuid[])) AND j.state IN ('queued', 'running')
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

# Releases that may have lost their ticket, oldest first.
OLD_RELEASES = text("""
SELECT id, dispatch_seq FROM jobs
WHERE model = :model AND state = 'queued' AND dispatched_at < now() - :older_than_s * interval '1 second'
ORDER BY dispatched_at LIMIT 500
""")
