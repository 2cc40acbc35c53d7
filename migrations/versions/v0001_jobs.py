"""Tenants, keys, jobs, attempts, workers, and the trigger that guards the states."""

from alembic import op

revision = "0001"
down_revision = None

_TABLES = """
CREATE TABLE tenants (
    id uuid PRIMARY KEY,
    name text NOT NULL UNIQUE,
    weight double precision NOT NULL DEFAULT 1 CHECK (weight > 0),
    created_at timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE api_keys (
    id uuid PRIMARY KEY,
    tenant_id uuid NOT NULL REFERENCES tenants,
    name text NOT NULL,
    sha256 bytea NOT NULL UNIQUE CHECK (length(sha256) = 32),
    scopes text[] NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    expires_at timestamptz,
    revoked_at timestamptz
);

CREATE TABLE jobs (
    id uuid PRIMARY KEY,
    tenant_id uuid NOT NULL REFERENCES tenants,
    model text NOT NULL,
    state text NOT NULL DEFAULT 'queued'
        CHECK (state IN ('queued', 'running', 'succeeded', 'failed', 'cancelled', 'expired')),
    priority smallint NOT NULL CHECK (priority BETWEEN 0 AND 9),
    params jsonb NOT NULL,
    batch_key text NOT NULL,
    metadata jsonb NOT NULL,
    version integer NOT NULL DEFAULT 1,
    attempt integer NOT NULL DEFAULT 0,
    token uuid,
    dispatch_seq integer NOT NULL DEFAULT 0,
    dispatched_at timestamptz,
    run_at timestamptz NOT NULL DEFAULT now(),
    queue_deadline timestamptz NOT NULL,
    deadline timestamptz NOT NULL,
    cancel_requested_at timestamptz,
    failures jsonb NOT NULL DEFAULT '{}',
    error_code text,
    error_class text,
    error_message text,
    object_key text,
    object_sha256 text,
    object_bytes bigint,
    result jsonb,
    timings jsonb,
    batch_size integer,
    created_at timestamptz NOT NULL DEFAULT now(),
    started_at timestamptz,
    finished_at timestamptz,
    CHECK (state <> 'succeeded' OR (object_key IS NOT NULL AND object_sha256 IS NOT NULL AND object_bytes IS NOT NULL)),
    CHECK (state <> 'running' OR token IS NOT NULL),
    CHECK ((finished_at IS NOT NULL) = (state IN ('succeeded', 'failed', 'cancelled', 'expired')))
) WITH (fillfactor = 80);  -- a job is updated a handful of times: room for those updates on its own page

CREATE INDEX jobs_waiting ON jobs (model, tenant_id, priority DESC, id)
    WHERE state = 'queued' AND dispatched_at IS NULL;
CREATE INDEX jobs_released ON jobs (model, dispatched_at) WHERE state = 'queued' AND dispatched_at IS NOT NULL;
CREATE INDEX jobs_queued ON jobs (model, priority DESC, id) WHERE state = 'queued';
CREATE INDEX jobs_running ON jobs (model, tenant_id) WHERE state = 'running';
CREATE INDEX jobs_deadline ON jobs (deadline) WHERE state IN ('queued', 'running');
CREATE INDEX jobs_queue_deadline ON jobs (queue_deadline) WHERE state = 'queued' AND attempt = 0;
CREATE INDEX jobs_of_tenant ON jobs (tenant_id, id DESC);
CREATE INDEX jobs_live ON jobs (tenant_id, id) WHERE state IN ('queued', 'running');
CREATE INDEX jobs_finished ON jobs (model, finished_at) WHERE state = 'succeeded';

CREATE TABLE attempts (
    job_id uuid NOT NULL REFERENCES jobs ON DELETE CASCADE,
    attempt integer NOT NULL,
    token uuid NOT NULL,
    worker_id text NOT NULL,
    batch_id uuid NOT NULL,
    lease_expires_at timestamptz NOT NULL,
    phase text,
    step integer NOT NULL DEFAULT 0,
    started_at timestamptz NOT NULL DEFAULT now(),
    ended_at timestamptz,
    outcome text,
    error_detail text,
    PRIMARY KEY (job_id, attempt)
) WITH (fillfactor = 70);  -- the heartbeats write here, every few seconds for every running job

CREATE INDEX attempts_lease ON attempts (lease_expires_at) WHERE ended_at IS NULL;

CREATE TABLE workers (
    id text PRIMARY KEY,
    model text NOT NULL,
    engine text NOT NULL,
    max_batch integer NOT NULL,
    accepting boolean NOT NULL,
    started_at timestamptz NOT NULL DEFAULT now(),
    heartbeat_at timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE release_windows (
    model text PRIMARY KEY,
    size integer,
    jobs_per_s double precision,
    updated_at timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE leaders (
    role text PRIMARY KEY,
    holder text NOT NULL,
    expires_at timestamptz NOT NULL,
    last_scan_at timestamptz NOT NULL DEFAULT now(),
    expire_nothing_before timestamptz NOT NULL DEFAULT now()
);
"""

# The moves of common.domain.jobs.TRANSITIONS, frozen here; a test compares the two over all pairs of states.
_GUARD = """
CREATE FUNCTION guard_job_state() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.state IS DISTINCT FROM OLD.state AND (OLD.state, NEW.state) NOT IN (
        ('queued', 'running'), ('queued', 'succeeded'), ('queued', 'failed'), ('queued', 'cancelled'),
        ('queued', 'expired'),
        ('running', 'queued'), ('running', 'succeeded'), ('running', 'failed'), ('running', 'cancelled')
    ) THEN
        RAISE EXCEPTION 'job %: % -> % is not a move of the state graph', OLD.id, OLD.state, NEW.state
            USING ERRCODE = 'check_violation';
    END IF;
    IF NEW.attempt < OLD.attempt THEN
        RAISE EXCEPTION 'job %: attempt only grows', OLD.id USING ERRCODE = 'check_violation';
    END IF;
    IF NEW.state IS DISTINCT FROM OLD.state OR NEW.cancel_requested_at IS DISTINCT FROM OLD.cancel_requested_at THEN
        NEW.version := OLD.version + 1;
    END IF;
    RETURN NEW;
END
$$;

CREATE TRIGGER guard_job_state BEFORE UPDATE ON jobs FOR EACH ROW EXECUTE FUNCTION guard_job_state();
"""


def upgrade() -> None:
    """Create everything."""
    op.execute(_TABLES)
    op.execute(_GUARD)


def downgrade() -> None:
    """Drop everything."""
    op.execute("DROP TABLE leaders, release_windows, workers, attempts, jobs, api_keys, tenants")
    op.execute("DROP FUNCTION guard_job_state()")
