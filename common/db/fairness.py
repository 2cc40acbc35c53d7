"""Which waiting jobs get the next tickets: fair shares of GPU time, bounds of tenants, and the fleet's retry budget."""

from sqlalchemy import text

from common.domain.jobs import ErrorClass

# Charged retries of the whole fleet that may start in five minutes while no dispatcher has said otherwise.
RETRIES_FLOOR = 10
# How an attempt has ended that is followed by a charged retry. Whoever was preempted has cost nobody a retry.
CHARGED_OUTCOMES = tuple(error.value for error in ErrorClass if error is not ErrorClass.PREEMPTED)
_OUTCOMES = ", ".join(f"'{outcome}'" for outcome in CHARGED_OUTCOMES)
_RETRIES_STARTED = f"""
    SELECT count(*) FROM attempts a JOIN attempts b ON b.job_id = a.job_id AND b.attempt = a.attempt - 1
    WHERE a.started_at > now() - interval '5 minutes' AND a.attempt > 1 AND b.outcome IN ({_OUTCOMES})"""

# Row 2. Release the next jobs of a model, fairly, in the order in which they shall start. Tenants go by the GPU seconds
# that they have in flight and have used in the last hour, over their weight, before the job in question: so whoever had
# nothing lately is next, and two busy tenants differ by one job at most. Inside a tenant it goes by priority, where ten
# minutes of waiting count as one level, so that low priority never starves. A tenant has at most max_running jobs
# released or running. A charged retry waits for the fleet's budget; this delays it and holds up nobody else. Two
# releases at the same moment may overshoot these two bounds and the window by one of them, but never take a job twice.
# Nothing here reads the backlog: each step is a probe of an index, and only as many tenants are looked at as can win.
RELEASE = text(f"""
WITH RECURSIVE heads AS (
    (SELECT tenant_id, id FROM jobs WHERE model = :model AND state = 'queued' AND dispatched_at IS NULL
    ORDER BY tenant_id, priority DESC, id LIMIT 1)
    UNION ALL
    SELECT following.tenant_id, following.id FROM heads CROSS JOIN LATERAL (
        SELECT tenant_id, id FROM jobs WHERE model = :model AND state = 'queued' AND dispatched_at IS NULL
            AND tenant_id > heads.tenant_id
        ORDER BY tenant_id, priority DESC, id LIMIT 1) following
), costs AS MATERIALIZED (
    SELECT model, coalesce(gpu_seconds_per_work, avg(gpu_seconds_per_work) OVER (), 1) AS per_work FROM release_windows
), in_flight AS MATERIALIZED (
    SELECT j.tenant_id, count(*) AS jobs, sum(j.work * c.per_work) AS gpu_seconds
    FROM costs c CROSS JOIN LATERAL (
        SELECT tenant_id, work FROM jobs WHERE model = c.model AND state = 'running'
        UNION ALL
        SELECT tenant_id, work FROM jobs
        WHERE model = c.model AND state = 'queued' AND dispatched_at > '-infinity'
    ) j GROUP BY j.tenant_id
), retries AS MATERIALIZED (
    SELECT CASE WHEN EXISTS (SELECT 1 FROM jobs WHERE model = :model AND state = 'queued' AND dispatched_at IS NULL
            AND error_class IS NOT NULL)
        THEN greatest(0, coalesce((SELECT max(retries_allowed) FROM release_windows), {RETRIES_FLOOR})
            - (SELECT count(*) FROM jobs
                WHERE state = 'queued' AND dispatched_at IS NOT NULL AND error_class IS NOT NULL)
            - ({_RETRIES_STARTED}))
        ELSE 0 END AS room
), tenants_next AS MATERIALIZED (
    SELECT h.tenant_id, t.weight, least(:room, t.max_running - coalesce(f.jobs, 0)) AS room,
        (coalesce(f.gpu_seconds, 0) + coalesce((
            SELECT sum(u.gpu_seconds * least(1, 2 - extract(epoch FROM now() - u.hour)::double precision / 3600))
            FROM tenant_usage u WHERE u.tenant_id = h.tenant_id AND u.hour > now() - interval '2 hours'
        ), 0)) / t.weight AS share
    FROM heads h JOIN tenants t ON t.id = h.tenant_id LEFT JOIN in_flight f ON f.tenant_id = h.tenant_id
    CROSS JOIN LATERAL (
        SELECT 1 FROM jobs j
        WHERE j.model = :model AND j.tenant_id = h.tenant_id AND j.state = 'queued' AND j.dispatched_at IS NULL
            AND j.run_at <= now() AND j.cancel_requested_at IS NULL
            AND (j.error_class IS NULL OR (SELECT room FROM retries) > 0)
        ORDER BY j.priority DESC, j.id LIMIT 1
    ) due
    WHERE t.max_running IS NULL OR t.max_running > coalesce(f.jobs, 0)
    ORDER BY share, h.id LIMIT :room
), candidates AS (
    SELECT c.id, c.retry, n.share + c.work_before * coalesce((SELECT per_work FROM costs WHERE model = :model), 1)
        / n.weight AS share
    FROM tenants_next n CROSS JOIN LATERAL (
        SELECT w.id, w.retry, sum(w.work) OVER by_turn - w.work AS work_before, row_number() OVER by_turn AS turn
        FROM (
            SELECT first.* FROM unnest(CAST('{{0,1,2,3,4,5,6,7,8,9}}' AS smallint[])) AS level CROSS JOIN LATERAL (
                SELECT j.id, j.work, j.priority, j.created_at, false AS retry FROM jobs j
                WHERE j.model = :model AND j.tenant_id = n.tenant_id AND j.priority BETWEEN level AND level
                    AND j.state = 'queued' AND j.dispatched_at IS NULL AND j.run_at <= now()
                    AND j.cancel_requested_at IS NULL AND j.error_class IS NULL
                ORDER BY j.priority DESC, j.id LIMIT :room
            ) first
            UNION ALL
            SELECT j.id, j.work, j.priority, j.created_at, true FROM jobs j
            WHERE j.model = :model AND j.tenant_id = n.tenant_id AND j.state = 'queued' AND j.dispatched_at IS NULL
                AND j.run_at <= now() AND j.cancel_requested_at IS NULL AND j.error_class IS NOT NULL
                AND (SELECT room FROM retries) > 0
        ) w
        WINDOW by_turn AS (
            ORDER BY w.priority + floor(extract(epoch FROM now() - w.created_at) / 600) DESC, w.id)
        ORDER BY turn LIMIT n.room
    ) c
), ranked AS (
    SELECT id, retry, share, row_number() OVER (PARTITION BY retry ORDER BY share, id) AS place FROM candidates
), picked AS (
    SELECT id, row_number() OVER (ORDER BY share, id) AS turn FROM ranked
    WHERE NOT retry OR place <= (SELECT room FROM retries)
    ORDER BY turn LIMIT :room
), locked AS (
    SELECT j.id, j.state = 'queued' AND j.dispatched_at IS NULL AND j.cancel_requested_at IS NULL AS waits
    FROM jobs j WHERE j.id = ANY(ARRAY(SELECT id FROM picked))
    ORDER BY j.id FOR UPDATE OF j SKIP LOCKED
), released AS (
    UPDATE jobs j SET dispatched_at = now(), dispatch_seq = j.dispatch_seq + 1
    FROM locked WHERE j.id = locked.id AND locked.waits
    RETURNING j.id, j.dispatch_seq, j.model, j.batch_key
)
SELECT released.* FROM released JOIN picked USING (id) ORDER BY picked.turn
""")  # noqa: S608  the pieces are constants of this module

# How many charged retries the fleet may start in five minutes: a share of the first attempts of the last five, at least
# a floor. With it: how many were started, how many wait although they are due.
RETRY_BUDGET = text(f"""
SELECT greatest(:floor, floor(:share * (SELECT count(*) FROM attempts
        WHERE started_at > now() - interval '5 minutes' AND attempt = 1)))::integer AS allowed,
    ({_RETRIES_STARTED}) AS started,
    (SELECT count(*) FROM jobs WHERE state = 'queued' AND dispatched_at IS NULL AND error_class IS NOT NULL
        AND run_at <= now() AND cancel_requested_at IS NULL) AS waiting
""")  # noqa: S608  the pieces are constants of this module

SET_RETRIES_ALLOWED = text("""
UPDATE release_windows SET retries_allowed = :allowed WHERE retries_allowed IS DISTINCT FROM :allowed
""")

# What a unit of work costs, by the last successes of each model. A sum over a sum: long jobs tell more than short ones.
REFIT_COSTS = text("""
UPDATE release_windows w SET gpu_seconds_per_work = fit.per_work
FROM (
    SELECT m.model, sum(l.gpu_seconds) / sum(l.work) AS per_work
    FROM release_windows m CROSS JOIN LATERAL (
        SELECT a.gpu_seconds, j.work FROM (
            SELECT id, attempt, work FROM jobs
            WHERE model = m.model AND state = 'succeeded' AND finished_at > now() - interval '1 day'
            ORDER BY finished_at DESC LIMIT 200
        ) j JOIN attempts a ON a.job_id = j.id AND a.attempt = j.attempt
        WHERE a.gpu_seconds > 0
    ) l GROUP BY m.model
) fit
WHERE w.model = fit.model AND w.gpu_seconds_per_work IS DISTINCT FROM fit.per_work
""")
