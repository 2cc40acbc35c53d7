"""What a submit asks of Postgres: its row, the one that was stored before, what its tenant has and what waits ahead."""

from sqlalchemy import bindparam, text

from common.db.readings import DEEPEST_POSITION

# How long a repeated Idempotency-Key finds its job. Older keys mean nothing, whether they were removed yet or not.
KEYS_KEPT_S = 86_400
# A tenant's queue is counted up to here, or to its limit when that is more.
_DEEPEST_COUNT = 10_000

# Row 1. Insert a flush of submits, one row of the answer for each. One that was stored before, by its tenant's key, is
# found and not stored again; one whose tenant has used up a quota is not stored; neither is one with `refused`, which
# is only looked for. Two flushes at the same time do not see each other: together they may overshoot a quota or the
# window by one of them, which needs no lock. Of two with the same key the later one waits for the earlier to be stored
# and then stores nothing: it has neither a version nor a known_id in the answer and is to be asked again. Rows go in by
# their keys, so that no two flushes wait for each other.
# A job is released at once while the window has room and nothing older waits. The jobs of a tenant with max_running
# are left to the dispatcher, which counts them.
INSERT_JOBS = text(f"""
WITH asked AS (
    SELECT * FROM jsonb_to_recordset(CAST(:rows AS jsonb)) AS r(
        id uuid, tenant_id uuid, model text, priority smallint, params jsonb, batch_key text, metadata jsonb,
        queue_deadline_s double precision, deadline_s double precision, work double precision, idempotency_key text,
        body_sha256 text, replay_of uuid, refused boolean)
), known AS (
    SELECT asked.id, k.id AS known_id, k.body_sha256 AS known_sha256,
        k.created_at > now() - {KEYS_KEPT_S} * interval '1 second' AS known_fresh
    FROM asked CROSS JOIN LATERAL (SELECT j.id, j.body_sha256, j.created_at FROM jobs j
        WHERE j.tenant_id = asked.tenant_id AND j.idempotency_key = asked.idempotency_key LIMIT 1) k
), owners AS (
    SELECT t.id AS tenant_id, t.max_queued, t.max_running, t.gpu_seconds_per_day,
        CASE WHEN t.max_queued IS NOT NULL THEN (SELECT count(*) FROM (
            SELECT 1 FROM jobs j WHERE j.tenant_id = t.id AND j.state = 'queued'
            LIMIT greatest(t.max_queued, {_DEEPEST_COUNT})) q) END AS queued,
        CASE WHEN t.gpu_seconds_per_day IS NOT NULL THEN (
            SELECT coalesce(sum(u.gpu_seconds), 0) FROM tenant_usage u
            WHERE u.tenant_id = t.id AND u.hour > now() - interval '1 day') END AS gpu_seconds
    FROM tenants t WHERE t.id IN (SELECT tenant_id FROM asked)
), wanted AS (
    SELECT asked.*, o.max_queued, o.max_running, o.queued, o.gpu_seconds, o.gpu_seconds_per_day,
        row_number() OVER (PARTITION BY asked.tenant_id ORDER BY asked.id) AS turn
    FROM asked LEFT JOIN owners o USING (tenant_id)
    WHERE refused IS NOT TRUE AND NOT EXISTS (SELECT 1 FROM known WHERE known.id = asked.id)
), judged AS (
    SELECT wanted.*, CASE WHEN gpu_seconds >= gpu_seconds_per_day THEN 'gpu_seconds'
        WHEN queued + turn > max_queued THEN 'queued' END AS over
    FROM wanted
), placed AS (
    SELECT judged.*, row_number() OVER (PARTITION BY model ORDER BY priority DESC, id) AS place
    FROM judged WHERE over IS NULL
), ahead AS (
    SELECT m.model, m.priority, (SELECT count(*) FROM (
        SELECT 1 FROM jobs j WHERE j.model = m.model AND j.state = 'queued' AND j.priority >= m.priority
        LIMIT {DEEPEST_POSITION}) q) AS jobs
    FROM (SELECT DISTINCT model, priority FROM placed) m
), room AS (
    SELECT m.model, w.jobs_per_s,
        CASE
            WHEN EXISTS (SELECT 1 FROM jobs j WHERE j.model = m.model AND j.state = 'queued'
                AND j.dispatched_at IS NULL AND j.run_at <= now() AND j.cancel_requested_at IS NULL) THEN 0
            WHEN w.model IS NOT NULL AND w.size IS NULL THEN 2147483647
            ELSE coalesce(w.size, :default_window) - (SELECT count(*) FROM jobs j
                WHERE j.model = m.model AND j.state = 'queued' AND j.dispatched_at IS NOT NULL)
        END AS free,
        EXISTS (SELECT 1 FROM workers s
            WHERE s.model = m.model AND s.accepting AND s.heartbeat_at > now() - interval '30 seconds') AS served
    FROM (SELECT DISTINCT model FROM placed) m LEFT JOIN release_windows w USING (model)
), released AS (
    SELECT placed.*, place <= free AND max_running IS NULL AS at_once FROM placed JOIN room USING (model)
), added AS (
    INSERT INTO jobs (id, tenant_id, model, priority, params, batch_key, metadata, queue_deadline, deadline, work,
        idempotency_key, body_sha256, replay_of, dispatched_at, dispatch_seq)
    SELECT id, tenant_id, model, priority, params, batch_key, metadata,
        now() + queue_deadline_s * interval '1 second', now() + deadline_s * interval '1 second', coalesce(work, 1),
        idempotency_key, body_sha256, replay_of, CASE WHEN at_once THEN now() END, CASE WHEN at_once THEN 1 ELSE 0 END
    FROM released ORDER BY tenant_id, idempotency_key, id
    ON CONFLICT (tenant_id, idempotency_key) WHERE idempotency_key IS NOT NULL DO NOTHING
    RETURNING id, version, created_at, dispatch_seq, dispatched_at IS NOT NULL AS released
)
SELECT asked.id, added.version, added.created_at, added.dispatch_seq, added.released,
    ahead.jobs + placed.place AS position, room.jobs_per_s, room.served,
    known.known_id, known.known_sha256, known.known_fresh,
    judged.over, judged.queued, judged.max_queued, judged.gpu_seconds, judged.gpu_seconds_per_day
FROM asked LEFT JOIN known USING (id) LEFT JOIN judged USING (id) LEFT JOIN added USING (id)
    LEFT JOIN placed USING (id) LEFT JOIN room ON room.model = placed.model
    LEFT JOIN ahead ON ahead.model = placed.model AND ahead.priority = placed.priority
""")  # noqa: S608  the pieces are constants of this module

# Take keys that mean nothing any more from their jobs, so that new jobs may have them.
FORGET_KEYS = text(f"""
WITH locked AS (
    SELECT id FROM jobs WHERE id = ANY(CAST(:ids AS uuid[]))
        AND created_at <= now() - {KEYS_KEPT_S} * interval '1 second'
    ORDER BY id FOR UPDATE
)
UPDATE jobs j SET idempotency_key = NULL, body_sha256 = NULL FROM locked WHERE j.id = locked.id
""")  # noqa: S608  a constant of this module

# How fast a tenant's jobs have ended in the last ten minutes, null when none has, and what it used by the hour.
TENANT_PACE = text("""
SELECT (SELECT count(*) / nullif(greatest(1.0, extract(epoch FROM now() - min(j.started_at))), 0)::double precision
        FROM jobs j WHERE j.tenant_id = CAST(:tenant_id AS uuid) AND j.started_at IS NOT NULL
            AND j.finished_at > now() - interval '10 minutes') AS jobs_per_s,
    ARRAY(SELECT u.gpu_seconds FROM tenant_usage u WHERE u.tenant_id = CAST(:tenant_id AS uuid)
        AND u.hour > now() - interval '1 day' ORDER BY u.hour) AS gpu_seconds,
    ARRAY(SELECT extract(epoch FROM u.hour + interval '1 day' - now())::double precision FROM tenant_usage u
        WHERE u.tenant_id = CAST(:tenant_id AS uuid) AND u.hour > now() - interval '1 day' ORDER BY u.hour) AS falls_out_s
""")

# How fast each model's jobs are done: measured, and by what a unit of work costs the workers that live now. A pace that
# no dispatcher has confirmed for a minute is none.
PACES = text("""
SELECT w.model, w.jobs_per_s, w.gpu_seconds_per_work, s.workers
FROM release_windows w CROSS JOIN LATERAL (SELECT count(*) AS workers FROM workers s
    WHERE s.model = w.model AND s.accepting AND s.heartbeat_at > now() - interval '30 seconds') s
WHERE w.updated_at > now() - interval '1 minute' AND s.workers > 0
    AND (w.jobs_per_s > 0 OR w.gpu_seconds_per_work > 0)
""")

# What waits of these models, by tenant and priority.
QUEUES = text("""
SELECT j.model, j.tenant_id, j.priority, min(t.weight) AS weight, count(*) AS jobs, sum(j.work) AS work
FROM jobs j JOIN tenants t ON t.id = j.tenant_id
WHERE j.state = 'queued' AND j.model = ANY(CAST(:models AS text[]))
GROUP BY j.model, j.tenant_id, j.priority
""")

# A tenant's bounds; null is none. SET_TENANT changes those whose flag is true.
LIST_TENANTS = text("""
SELECT t.name, t.weight, t.max_queued, t.max_running, t.gpu_seconds_per_day, t.submits_per_minute,
    (SELECT count(*) FROM jobs j WHERE j.tenant_id = t.id AND j.state = 'queued') AS queued,
    (SELECT count(*) FROM jobs j WHERE j.tenant_id = t.id AND j.state = 'running') AS running,
    (SELECT coalesce(sum(u.gpu_seconds), 0) FROM tenant_usage u
        WHERE u.tenant_id = t.id AND u.hour > now() - interval '1 day') AS gpu_seconds
FROM tenants t ORDER BY t.name
""")
_BOUNDS = ("weight", "max_queued", "max_running", "gpu_seconds_per_day", "submits_per_minute")
SET_TENANT = text(
    "UPDATE tenants SET "  # noqa: S608  the names are constants of this module
    + ", ".join(f"{name} = CASE WHEN :set_{name} THEN :{name} ELSE {name} END" for name in _BOUNDS)
    + " WHERE name = :name RETURNING id"
).bindparams(*(bindparam(name, None) for name in _BOUNDS))
