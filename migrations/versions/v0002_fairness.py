"""What fair queues, quotas, repeated submits, replay and retention need to know."""

from alembic import op

revision = "0002"
down_revision = "0001"

_UP = """
-- Null: no limit.
ALTER TABLE tenants
    ADD COLUMN max_queued integer CHECK (max_queued >= 0),
    ADD COLUMN max_running integer CHECK (max_running >= 1),
    ADD COLUMN gpu_seconds_per_day double precision CHECK (gpu_seconds_per_day >= 0),
    ADD COLUMN submits_per_minute integer CHECK (submits_per_minute >= 1);

ALTER TABLE jobs
    ADD COLUMN idempotency_key text,
    ADD COLUMN body_sha256 text,
    ADD COLUMN replay_of uuid REFERENCES jobs ON DELETE SET NULL,
    -- Steps x frames x pixels: what jobs of one model cost, up to a factor that release_windows knows.
    ADD COLUMN work double precision NOT NULL DEFAULT 1 CHECK (work > 0),
    ADD COLUMN object_removed_at timestamptz;
CREATE UNIQUE INDEX jobs_idempotency ON jobs (tenant_id, idempotency_key) WHERE idempotency_key IS NOT NULL;
CREATE INDEX jobs_idempotency_age ON jobs (created_at) WHERE idempotency_key IS NOT NULL;
CREATE INDEX jobs_replay ON jobs (replay_of) WHERE replay_of IS NOT NULL;
CREATE INDEX jobs_retention ON jobs (finished_at) WHERE object_key IS NOT NULL AND object_removed_at IS NULL;
CREATE INDEX jobs_finished_at ON jobs (finished_at) WHERE finished_at IS NOT NULL;
-- Charged retries that wait for their release: few, and found without reading a backlog.
CREATE INDEX jobs_retrying ON jobs (model, tenant_id)
    WHERE state = 'queued' AND dispatched_at IS NULL AND error_class IS NOT NULL;

-- The time of the GPU that an attempt took, a batch's shared among its members; null until it has ended.
ALTER TABLE attempts ADD COLUMN gpu_seconds double precision;
CREATE INDEX attempts_started ON attempts (started_at);

-- Sums by the hour, so that a quota or a share need not read every attempt of a day.
CREATE TABLE tenant_usage (
    tenant_id uuid NOT NULL REFERENCES tenants ON DELETE CASCADE,
    hour timestamptz NOT NULL,
    gpu_seconds double precision NOT NULL,
    PRIMARY KEY (tenant_id, hour)
);

ALTER TABLE release_windows
    ADD COLUMN gpu_seconds_per_work double precision,
    -- How many charged retries the whole fleet may start in five minutes; the same in every row.
    ADD COLUMN retries_allowed integer;
"""

_DOWN = """
ALTER TABLE release_windows DROP COLUMN gpu_seconds_per_work, DROP COLUMN retries_allowed;
DROP TABLE tenant_usage;
DROP INDEX attempts_started;
ALTER TABLE attempts DROP COLUMN gpu_seconds;
DROP INDEX jobs_retrying, jobs_finished_at, jobs_retention, jobs_replay, jobs_idempotency_age, jobs_idempotency;
ALTER TABLE jobs DROP COLUMN idempotency_key, DROP COLUMN body_sha256, DROP COLUMN replay_of, DROP COLUMN work,
    DROP COLUMN object_removed_at;
ALTER TABLE tenants DROP COLUMN max_queued, DROP COLUMN max_running, DROP COLUMN gpu_seconds_per_day,
    DROP COLUMN submits_per_minute;
"""


def upgrade() -> None:
    """Add everything."""
    op.execute(_UP)


def downgrade() -> None:
    """Drop everything."""
    op.execute(_DOWN)
