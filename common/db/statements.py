"""What api, dispatcher and worker ask of Postgres about a job: every move of the state graph is one statement here.

The statements are values: asyncio services and threads execute the same ones. Lists travel as one JSON parameter, so
a batch of any size is one round trip and one prepared statement. Where several jobs are locked, it is in the order of
their ids, so that no two statements can wait for each other. The rows named here are those of the table of moves
in docs/explanation/lifecycle.md.
"""

from sqlalchemy import text

# Tickets that may be out for a model while no dispatcher has said otherwise; the floor of the window as well.
DEFAULT_WINDOW = 8

# Row 1. Insert a flush of submits. A job is released at once while the window has room and nothing older waits.
# Two flushes at the same time may overshoot the window by one of them, which is harmless and needs no lock.
INSERT_JOBS = text("""
WITH asked AS (
    SELECT * FROM jsonb_to_recordset(CAST(:rows AS jsonb)) AS r(
        id uuid, tenant_id uuid, model text, priority smallint, params jsonb, batch_key text, metadata jsonb,
        queue_deadline_s double precision, deadline_s double precision)
), placed AS (
    SELECT asked.*, row_number() OVER (PARTITION BY model ORDER BY id) AS place FROM asked
), room AS (
    SELECT m.model,
        (SELECT count(*) FROM jobs j WHERE j.model = m.model AND j.state = 'queued') AS ahead,
        CASE
            WHEN EXISTS (SELECT 1 FROM jobs j WHERE j.model = m.model AND j.state = 'queued'
                AND j.dispatched_at IS NULL AND j.run_at <= now() AND j.cancel_requested_at IS NULL) THEN 0
            WHEN w.model IS NOT NULL AND w.size IS NULL THEN 2147483647
            ELSE coalesce(w.size, :default_window) - (SELECT count(*) FROM jobs j
                WHERE j.model = m.model AND j.state = 'queued' AND j.dispatched_at IS NOT NULL)
        END AS free,
        EXISTS (SELECT 1 FROM workers s
            WHERE s.model = m.model AND s.accepting AND s.heartbeat_at > now() - interval '30 seconds') AS served
    FROM (SELECT DISTINCT model FROM asked) m LEFT JOIN release_windows w USING (model)
), added AS (
    INSERT INTO jobs (id, tenant_id, model, priority, params, batch_key, metadata, queue_deadline, deadline,
        dispatched_at, dispatch_seq)
    SELECT id, tenant_id, model, priority, params, batch_key, metadata,
        now() + queue_deadline_s * interval '1 second', now() + deadline_s * interval '1 second',
        CASE WHEN place <= free THEN now() END, CASE WHEN place <= free THEN 1 ELSE 0 END
    FROM placed JOIN room USING (model)
    RETURNING id, version, created_at, dispatch_seq, dispatched_at IS NOT NULL AS released
)
SELECT added.*, room.ahead + placed.place AS position, w.jobs_per_s, room.served
FROM added JOIN placed USING (id) JOIN room USING (model) LEFT JOIN release_windows w USING (model)
""")

# Row 2. Release the next jobs of a model, fairly: tenants take turns, those with less in flight for their weight first;
# inside a tenant by priority, where ten minutes of waiting count as one level so that low priority never starves.
RELEASE = text("""
WITH waiting AS (
    SELECT DISTINCT tenant_id FROM jobs
    WHERE model = :model AND state = 'queued' AND dispatched_at IS NULL AND run_at <= now()
        AND cancel_requested_at IS NULL
), in_flight AS (
    SELECT tenant_id, count(*) AS jobs FROM jobs
    WHERE model = :model AND (state = 'running' OR (state = 'queued' AND dispatched_at IS NOT NULL))
    GROUP BY tenant_id
), candidates AS (
    SELECT c.id, (coalesce(f.jobs, 0) + c.turn) / t.weight AS share
    FROM waiting w JOIN tenants t ON t.id = w.tenant_id LEFT JOIN in_flight f ON f.tenant_id = w.tenant_id
    CROSS JOIN LATERAL (
        SELECT j.id, row_number() OVER (
            ORDER BY j.priority + floor(extract(epoch FROM now() - j.created_at) / 600) DESC, j.id) AS turn
        FROM jobs j
        WHERE j.model = :model AND j.tenant_id = w.tenant_id AND j.state = 'queued' AND j.dispatched_at IS NULL
            AND j.run_at <= now() AND j.cancel_requested_at IS NULL
        ORDER BY turn LIMIT :room
    ) c
), picked AS (SELECT id FROM candidates ORDER BY share, id LIMIT :room
), locked AS (
    SELECT j.id FROM jobs j JOIN picked USING (id)
    WHERE j.state = 'queued' AND j.dispatched_at IS NULL AND j.cancel_requested_at IS NULL
    ORDER BY j.id FOR UPDATE OF j
)
UPDATE jobs j SET dispatched_at = now(), dispatch_seq = j.dispatch_seq + 1
FROM locked WHERE j.id = locked.id
RETURNING j.id, j.dispatch_seq, j.model, j.batch_key
""")

# Row 3. Take releases back: the ticket did not fit a batch, could not be published, or was lost.
TAKE_BACK = text("""
WITH locked AS (
    SELECT j.id FROM jobs j
    JOIN jsonb_to_recordset(CAST(:rows AS jsonb)) AS r(id uuid, dispatch_seq integer) USING (id)
    WHERE j.state = 'queued' AND j.dispatch_seq = r.dispatch_seq AND j.dispatched_at IS NOT NULL
    ORDER BY j.id FOR UPDATE OF j
)
UPDATE jobs j SET dispatched_at = NULL FROM locked WHERE j.id = locked.id
RETURNING j.id
""")

# Row 4. Claim a batch. The worker makes the tokens beforehand, so that it can recognise its own claim when the reply
# to the commit is lost. An old ticket whose job must run alone by now does not bring it into a batch.
CLAIM = text("""
WITH asked AS (
    SELECT * FROM jsonb_to_recordset(CAST(:rows AS jsonb)) AS r(id uuid, token uuid, batch_key text)
), free AS (
    SELECT j.id, asked.token AS new_token FROM jobs j JOIN asked USING (id)
    WHERE j.state = 'queued' AND j.batch_key = asked.batch_key AND j.run_at <= now()
        AND j.cancel_requested_at IS NULL AND j.deadline > now()
        AND (j.attempt > 0 OR j.queue_deadline > now())
    ORDER BY j.id FOR UPDATE OF j
), claimed AS (
    UPDATE jobs j SET state = 'running', attempt = j.attempt + 1, token = free.new_token, dispatched_at = NULL,
        started_at = coalesce(j.started_at, now())
    FROM free WHERE j.id = free.id
    RETURNING j.*
), leased AS (
    INSERT INTO attempts (job_id, attempt, token, worker_id, batch_id, lease_expires_at)
    SELECT id, attempt, token, :worker_id, CAST(:batch_id AS uuid), now() + :lease_s * interval '1 second'
    FROM claimed
)
SELECT id, tenant_id, version, attempt, token, params, failures,
    extract(epoch FROM now() - created_at) AS waited_s, extract(epoch FROM deadline - now()) AS remaining_s
FROM claimed ORDER BY id
""")

# The rows behind tokens that a worker made: which of its claims happened although the reply was lost.
CLAIMS_BY_TOKEN = text("""
SELECT id, tenant_id, version, attempt, token, params, failures,
    extract(epoch FROM now() - created_at) AS waited_s, extract(epoch FROM deadline - now()) AS remaining_s
FROM jobs WHERE token = ANY(CAST(:tokens AS uuid[])) AND state = 'running' ORDER BY id
""")

# Renew the leases of a worker's attempts and learn which are still its own, and which of those shall stop. An attempt
# whose lease ran out but that nobody else has claimed is still welcome: its result will be taken.
HEARTBEAT = text("""
WITH mine AS (
    SELECT * FROM jsonb_to_recordset(CAST(:rows AS jsonb)) AS r(
        id uuid, attempt integer, token uuid, phase text, step integer)
), renewed AS (
    UPDATE attempts a SET lease_expires_at = now() + :lease_s * interval '1 second', phase = mine.phase,
        step = mine.step
    FROM mine
    WHERE a.job_id = mine.id AND a.attempt = mine.attempt AND a.token = mine.token AND a.ended_at IS NULL
)
SELECT j.id, j.cancel_requested_at IS NOT NULL AS cancel
FROM jobs j JOIN mine ON j.id = mine.id AND j.attempt = mine.attempt AND j.token = mine.token
WHERE j.state IN ('queued', 'running')
""")

# Row 5. Accept a result of the last attempt, also when its lease has run out meanwhile.
COMPLETE = text("""
WITH done AS (
    UPDATE jobs SET state = 'succeeded', finished_at = now(), dispatched_at = NULL, object_key = :object_key,
        object_sha256 = :object_sha256, object_bytes = :object_bytes, result = CAST(:result AS jsonb),
        timings = CAST(:timings AS jsonb), batch_size = :batch_size,
        error_code = NULL, error_class = NULL, error_message = NULL
    WHERE id = CAST(:id AS uuid) AND attempt = :attempt AND token = CAST(:token AS uuid)
        AND state IN ('queued', 'running') AND cancel_requested_at IS NULL
    RETURNING id, tenant_id, version
), ended AS (
    UPDATE attempts SET ended_at = now(), outcome = 'succeeded'
    WHERE job_id IN (SELECT id FROM done) AND attempt = :attempt
)
SELECT id, tenant_id, version FROM done
""")

# Rows 6 to 9. End an attempt without a result: back to the queue, failed, or cancelled when that was asked for.
# :expired_only makes it the reaper's: it spares an attempt whose worker renewed the lease in the meantime.
END_ATTEMPT = text("""
WITH ended AS (
    UPDATE jobs j SET
        state = CASE WHEN j.cancel_requested_at IS NOT NULL THEN 'cancelled' ELSE CAST(:state AS text) END,
        finished_at = CASE WHEN j.cancel_requested_at IS NOT NULL OR CAST(:state AS text) <> 'queued' THEN now() END,
        run_at = now() + :delay_s * interval '1 second', dispatched_at = NULL,
        failures = CAST(:failures AS jsonb), error_class = :error_class,
        error_code = CASE WHEN j.cancel_requested_at IS NOT NULL THEN 'cancelled' ELSE CAST(:error_code AS text) END,
        error_message = :error_message,
        -- A key of its own keeps the job out of every batch: a crash must not take mates along again.
        batch_key = CASE WHEN CAST(:alone AS boolean) THEN 'alone-' || j.id ELSE j.batch_key END
    WHERE j.id = CAST(:id AS uuid) AND j.attempt = :attempt AND j.token = CAST(:token AS uuid)
        AND j.state = 'running'
        AND (NOT CAST(:expired_only AS boolean) OR EXISTS (SELECT 1 FROM attempts a
            WHERE a.job_id = j.id AND a.attempt = j.attempt AND a.lease_expires_at < now()))
    RETURNING j.id, j.tenant_id, j.version, j.state
), closed AS (
    UPDATE attempts SET ended_at = now(), outcome = :outcome, error_detail = :detail
    WHERE job_id IN (SELECT id FROM ended) AND attempt = :attempt AND ended_at IS NULL
)
SELECT id, tenant_id, version, state FROM ended
""")

# Row 9, the api's half: a queued job ends at once, a running one is asked to stop.
CANCEL = text("""
UPDATE jobs SET
    state = CASE WHEN state = 'queued' THEN 'cancelled' ELSE state END,
    finished_at = CASE WHEN state = 'queued' THEN now() END,
    error_code = CASE WHEN state = 'queued' THEN 'cancelled' END,
    cancel_requested_at = coalesce(cancel_requested_at, now())
WHERE id = CAST(:id AS uuid) AND tenant_id = CAST(:tenant_id AS uuid) AND state IN ('queued', 'running')
RETURNING id, version, state, model
""")

# Row 10. A job that nobody ever started by its queue deadline.
EXPIRE_QUEUED = text("""
UPDATE jobs SET state = 'expired', finished_at = now(), dispatched_at = NULL, error_code = 'queue_deadline_exceeded',
    error_message = 'no worker started the job in time'
WHERE id IN (SELECT id FROM jobs WHERE state = 'queued' AND attempt = 0 AND queue_deadline < now() LIMIT 500)
    AND state = 'queued' AND attempt = 0
RETURNING id, tenant_id, version, state, model
""")

# Row 11. A job past its total deadline; a running one is left to its worker for a while longer.
FAIL_OVERDUE = text("""
WITH late AS (
    SELECT id FROM jobs
    WHERE state IN ('queued', 'running') AND deadline < now()
        AND (state = 'queued' OR deadline < now() - :backstop_s * interval '1 second')
    LIMIT 500
), ended AS (
    UPDATE jobs j SET
        state = CASE WHEN j.cancel_requested_at IS NOT NULL THEN 'cancelled' ELSE 'failed' END,
        error_code = CASE WHEN j.cancel_requested_at IS NOT NULL THEN 'cancelled' ELSE 'deadline_exceeded' END,
        error_message = 'the job was not done by its deadline', finished_at = now(), dispatched_at = NULL
    FROM late WHERE j.id = late.id AND j.state IN ('queued', 'running')
    RETURNING j.id, j.tenant_id, j.version, j.state, j.model, j.attempt
), closed AS (
    UPDATE attempts a SET ended_at = now(), outcome = 'deadline_exceeded'
    FROM ended WHERE a.job_id = ended.id AND a.attempt = ended.attempt AND a.ended_at IS NULL
)
SELECT id, tenant_id, version, state, model FROM ended
""")

# Running attempts whose lease has run out, for the reaper.
EXPIRED_LEASES = text("""
SELECT j.id, j.attempt, j.token, j.failures, j.model, a.worker_id
FROM attempts a JOIN jobs j ON j.id = a.job_id AND j.attempt = a.attempt
WHERE a.ended_at IS NULL AND a.lease_expires_at < now() AND j.state = 'running'
ORDER BY a.lease_expires_at LIMIT 200
""")

# How a job stands after a completion that touched no row.
FENCE = text("SELECT state, attempt, token, cancel_requested_at FROM jobs WHERE id = CAST(:id AS uuid)")
