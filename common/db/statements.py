"""What api, dispatcher and worker ask of Postgres about a job: every move of the state graph is one statement here.

The statements are values: asyncio services and threads execute the same ones. Lists travel as one JSON parameter, so
a batch of any size is one round trip and one prepared statement. Where several jobs are locked, it is in the order of
their ids, so that no two statements can wait for each other. The rows named here are those of the table of moves
in docs/explanation/lifecycle.md.
"""

from sqlalchemy import BindParameter, bindparam, text

# Tickets that may be out for a model while no dispatcher has said otherwise; the floor of the window as well.
DEFAULT_WINDOW = 8

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

# Row 3 by a worker that may not have the job just now: released again, and not before :delay_s seconds have passed.
DEFER = text("""
WITH locked AS (
    SELECT j.id FROM jobs j
    JOIN jsonb_to_recordset(CAST(:rows AS jsonb)) AS r(id uuid, dispatch_seq integer) USING (id)
    WHERE j.state = 'queued' AND j.dispatch_seq = r.dispatch_seq AND j.dispatched_at IS NOT NULL
    ORDER BY j.id FOR UPDATE OF j
)
UPDATE jobs j SET dispatched_at = NULL, run_at = greatest(j.run_at, now() + :delay_s * interval '1 second')
FROM locked WHERE j.id = locked.id
RETURNING j.id
""")

# Jobs whose tickets lie in a broker that a worker cannot reach. It claims them without; the ticket finds nothing then.
RELEASED = text("""
SELECT id, dispatch_seq, model, batch_key FROM jobs
WHERE model = :model AND state = 'queued' AND dispatched_at IS NOT NULL AND run_at <= now()
    AND cancel_requested_at IS NULL
ORDER BY dispatched_at, id LIMIT :limit
""")

# Row 4. Claim a batch. The worker makes the tokens beforehand, so that it can recognise its own claim when the reply
# to the commit is lost. An old ticket whose job must run alone by now does not bring it into a batch.
# A job that failed on this very worker is left to another one: to an idle one for a moment, and after two crashes of
# the engine, when the next one decides whether it is the job's fault, to any live one for some minutes.
CLAIM = text("""
WITH asked AS (
    SELECT * FROM jsonb_to_recordset(CAST(:rows AS jsonb)) AS r(id uuid, token uuid, batch_key text)
), free AS (
    SELECT j.id, asked.token AS new_token FROM jobs j JOIN asked USING (id)
    WHERE j.state = 'queued' AND j.batch_key = asked.batch_key AND j.run_at <= now()
        AND j.cancel_requested_at IS NULL AND j.deadline > now()
        AND (j.attempt > 0 OR j.queue_deadline > now())
        AND NOT EXISTS (
            SELECT 1 FROM attempts a JOIN workers w ON w.model = j.model AND w.id <> a.worker_id
            WHERE a.job_id = j.id AND a.attempt = j.attempt AND a.worker_id = :worker_id
                AND a.outcome IN ('child_crash', 'timeout', 'nan_output', 'internal', 'infrastructure')
                AND w.accepting AND w.heartbeat_at > now() - interval '30 seconds'
                AND CASE WHEN coalesce(CAST(j.failures ->> 'child_crash' AS integer), 0) >= 2
                    THEN a.ended_at > now() - interval '5 minutes'
                    ELSE a.ended_at > now() - interval '15 seconds' AND NOT EXISTS (
                        SELECT 1 FROM attempts b WHERE b.worker_id = w.id AND b.ended_at IS NULL)
                END
        )
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
# whose lease ran out but that nobody else has claimed is still welcome: its result will be taken. While its finished
# video waits for the upload, the queued job is kept from being run again.
HEARTBEAT = text("""
WITH mine AS (
    SELECT * FROM jsonb_to_recordset(CAST(:rows AS jsonb)) AS r(
        id uuid, attempt integer, token uuid, phase text, step integer, finished boolean)
), renewed AS (
    UPDATE attempts a SET lease_expires_at = now() + :lease_s * interval '1 second', phase = mine.phase,
        step = mine.step
    FROM mine
    WHERE a.job_id = mine.id AND a.attempt = mine.attempt AND a.token = mine.token AND a.ended_at IS NULL
), late AS (
    SELECT j.id FROM jobs j JOIN mine ON j.id = mine.id AND j.attempt = mine.attempt AND j.token = mine.token
    WHERE mine.finished AND j.state = 'queued' AND j.cancel_requested_at IS NULL
    ORDER BY j.id FOR UPDATE OF j SKIP LOCKED
), kept AS (
    UPDATE jobs j SET dispatched_at = NULL, run_at = greatest(j.run_at, now() + :lease_s * interval '1 second')
    FROM late WHERE j.id = late.id
)
SELECT j.id, j.cancel_requested_at IS NOT NULL AS cancel
FROM jobs j JOIN mine ON j.id = mine.id AND j.attempt = mine.attempt AND j.token = mine.token
WHERE j.state IN ('queued', 'running')
""")

# How jobs stand whose finished videos a worker has found in a spool. One that is not among them belongs to a later
# attempt, or is gone.
SPOOLED = text("""
SELECT j.id, j.state, j.version, j.cancel_requested_at IS NOT NULL AS cancel,
    extract(epoch FROM j.deadline - now()) AS remaining_s
FROM jobs j JOIN jsonb_to_recordset(CAST(:rows AS jsonb)) AS r(id uuid, attempt integer, token uuid)
    ON j.id = r.id AND j.attempt = r.attempt AND j.token = r.token
""")

# What an attempt took of the GPU: the worker's figure, else its time under a lease, shared with its batch. All attempts
# of a batch start at the same instant, by which they are found in an index.
_GPU_SECONDS = """coalesce(CAST(:gpu_seconds AS double precision),
            greatest(0, extract(epoch FROM least(now(), a.lease_expires_at) - a.started_at))
            / (SELECT count(*) FROM attempts b WHERE b.started_at = a.started_at AND b.batch_id = a.batch_id))"""
# Add it to what the tenant has used, once for each attempt.
_USAGE = """
    INSERT INTO tenant_usage AS u (tenant_id, hour, gpu_seconds)
    SELECT tenant_id, date_trunc('hour', now()), sum(gpu_seconds) FROM spent GROUP BY tenant_id ORDER BY tenant_id
    ON CONFLICT (tenant_id, hour) DO UPDATE SET gpu_seconds = u.gpu_seconds + excluded.gpu_seconds"""
_NO_FIGURE: BindParameter[float | None] = bindparam("gpu_seconds", None)

# Row 5. Accept a result of the last attempt, also when its lease has run out meanwhile. The time of such an attempt was
# counted when it was given up.
COMPLETE = text(f"""
WITH done AS (
    UPDATE jobs SET state = 'succeeded', finished_at = now(), dispatched_at = NULL, object_key = :object_key,
        object_sha256 = :object_sha256, object_bytes = :object_bytes, result = CAST(:result AS jsonb),
        timings = CAST(:timings AS jsonb), batch_size = :batch_size,
        error_code = NULL, error_class = NULL, error_message = NULL
    WHERE id = CAST(:id AS uuid) AND attempt = :attempt AND token = CAST(:token AS uuid)
        AND state IN ('queued', 'running') AND cancel_requested_at IS NULL
    RETURNING id, tenant_id, version
), last AS (
    SELECT a.job_id, a.attempt, a.gpu_seconds, done.tenant_id FROM attempts a JOIN done ON done.id = a.job_id
    WHERE a.attempt = :attempt FOR UPDATE OF a
), ended AS (
    UPDATE attempts a SET ended_at = now(), outcome = 'succeeded',
        gpu_seconds = coalesce(last.gpu_seconds, {_GPU_SECONDS})
    FROM last WHERE a.job_id = last.job_id AND a.attempt = last.attempt
    RETURNING last.tenant_id, a.gpu_seconds, last.gpu_seconds IS NULL AS new
), spent AS (SELECT tenant_id, gpu_seconds FROM ended WHERE new
), used AS ({_USAGE}
)
SELECT id, tenant_id, version FROM done
""").bindparams(_NO_FIGURE)  # noqa: S608  the pieces are constants of this module

# Rows 6 to 9. End an attempt without a result: back to the queue, failed, or cancelled when that was asked for.
# :expired_only makes it the reaper's: it spares an attempt whose worker renewed the lease in the meantime.
END_ATTEMPT = text(f"""
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
), spent AS (
    UPDATE attempts a SET ended_at = now(), outcome = :outcome, error_detail = :detail, gpu_seconds = {_GPU_SECONDS}
    FROM ended WHERE a.job_id = ended.id AND a.attempt = :attempt AND a.ended_at IS NULL
    RETURNING ended.tenant_id, a.gpu_seconds
), used AS ({_USAGE}
)
SELECT id, tenant_id, version, state FROM ended
""").bindparams(_NO_FIGURE)  # noqa: S608  the pieces are constants of this module

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
FAIL_OVERDUE = text(f"""
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
), spent AS (
    UPDATE attempts a SET ended_at = now(), outcome = 'deadline_exceeded', gpu_seconds = {_GPU_SECONDS}
    FROM ended WHERE a.job_id = ended.id AND a.attempt = ended.attempt AND a.ended_at IS NULL
    RETURNING ended.tenant_id, a.gpu_seconds
), used AS ({_USAGE}
)
SELECT id, tenant_id, version, state, model FROM ended
""").bindparams(_NO_FIGURE)  # noqa: S608  the pieces are constants of this module

# Running attempts whose lease has run out, for the reaper.
EXPIRED_LEASES = text("""
SELECT j.id, j.attempt, j.token, j.failures, j.model, a.worker_id
FROM attempts a JOIN jobs j ON j.id = a.job_id AND j.attempt = a.attempt
WHERE a.ended_at IS NULL AND a.lease_expires_at < now() AND j.state = 'running'
ORDER BY a.lease_expires_at LIMIT 200
""")

# How a job stands after a completion that touched no row.
FENCE = text("SELECT state, attempt, token, cancel_requested_at FROM jobs WHERE id = CAST(:id AS uuid)")

# Whether another worker of the model takes jobs now.
OTHER_WORKERS = text("""
SELECT EXISTS (SELECT 1 FROM workers w WHERE w.model = :model AND w.id <> :worker_id AND w.accepting
    AND w.heartbeat_at > now() - interval '30 seconds') AS live
""")
