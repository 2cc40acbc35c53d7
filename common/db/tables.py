"""The tables as SQLAlchemy Core sees them. The schema itself is made by migrations/."""

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Double,
    ForeignKey,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    Table,
    Text,
    Uuid,
    func,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

metadata = MetaData()
_Time = DateTime(timezone=True)
_now = func.now()

tenants = Table(
    "tenants",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("name", Text, nullable=False, unique=True),
    Column("weight", Double, nullable=False, server_default="1"),
    # Null: no limit.
    Column("max_queued", Integer),
    Column("max_running", Integer),
    Column("gpu_seconds_per_day", Double),
    Column("submits_per_minute", Integer),
    Column("created_at", _Time, nullable=False, server_default=_now),
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("tenant_id", Uuid, ForeignKey("tenants.id"), nullable=False),
    Column("name", Text, nullable=False),
    # The key has 256 bits of randomness, so a plain fast hash is enough: there is nothing to guess.
    Column("sha256", LargeBinary, nullable=False, unique=True),
    Column("scopes", ARRAY(Text), nullable=False),
    Column("created_at", _Time, nullable=False, server_default=_now),
    Column("expires_at", _Time),
    Column("revoked_at", _Time),
)

jobs = Table(
    "jobs",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("tenant_id", Uuid, ForeignKey("tenants.id"), nullable=False),
    Column("model", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("priority", SmallInteger, nullable=False),
    Column("params", JSONB, nullable=False),
    Column("batch_key", Text, nullable=False),
    Column("metadata", JSONB, nullable=False),
    Column("version", Integer, nullable=False, server_default="1"),
    # The fence: both are replaced by a claim and by nothing else.
    Column("attempt", Integer, nullable=False, server_default="0"),
    Column("token", Uuid),
    # The outbox: dispatched_at null means "waits for its release".
    Column("dispatch_seq", Integer, nullable=False, server_default="0"),
    Column("dispatched_at", _Time),
    Column("run_at", _Time, nullable=False, server_default=_now),
    Column("queue_deadline", _Time, nullable=False),
    Column("deadline", _Time, nullable=False),
    Column("cancel_requested_at", _Time),
    Column("failures", JSONB, nullable=False, server_default="{}"),
    Column("error_code", Text),
    Column("error_class", Text),
    Column("error_message", Text),
    Column("object_key", Text),
    Column("object_sha256", Text),
    Column("object_bytes", BigInteger),
    Column("result", JSONB),
    Column("timings", JSONB),
    Column("batch_size", Integer),
    Column("created_at", _Time, nullable=False, server_default=_now),
    Column("started_at", _Time),
    Column("finished_at", _Time),
    Column("idempotency_key", Text),
    Column("body_sha256", Text),
    Column("replay_of", Uuid, ForeignKey("jobs.id", ondelete="SET NULL")),
    Column("work", Double, nullable=False, server_default="1"),  # steps x frames x pixels
    Column("object_removed_at", _Time),  # the row is kept for longer than the video
)

attempts = Table(
    "attempts",
    metadata,
    Column("job_id", Uuid, ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    Column("attempt", Integer, primary_key=True),
    Column("token", Uuid, nullable=False),
    Column("worker_id", Text, nullable=False),
    Column("batch_id", Uuid, nullable=False),
    Column("lease_expires_at", _Time, nullable=False),
    Column("phase", Text),
    Column("step", Integer, nullable=False, server_default="0"),
    Column("started_at", _Time, nullable=False, server_default=_now),
    Column("ended_at", _Time),
    Column("outcome", Text),
    Column("error_detail", Text),
    Column("gpu_seconds", Double),  # a batch's shared among its members
)

tenant_usage = Table(
    "tenant_usage",
    metadata,
    Column("tenant_id", Uuid, ForeignKey("tenants.id", ondelete="CASCADE"), primary_key=True),
    Column("hour", _Time, primary_key=True),
    Column("gpu_seconds", Double, nullable=False),
)

workers = Table(
    "workers",
    metadata,
    Column("id", Text, primary_key=True),
    Column("model", Text, nullable=False),
    Column("engine", Text, nullable=False),
    Column("max_batch", Integer, nullable=False),
    Column("accepting", Boolean, nullable=False),
    Column("started_at", _Time, nullable=False, server_default=_now),
    Column("heartbeat_at", _Time, nullable=False, server_default=_now),
)

release_windows = Table(
    "release_windows",
    metadata,
    Column("model", Text, primary_key=True),
    Column("size", Integer),  # null: no bound
    Column("jobs_per_s", Double),  # null: nothing finished lately, so no estimate can be given
    Column("updated_at", _Time, nullable=False, server_default=_now),
    Column("gpu_seconds_per_work", Double),  # null: not measured yet
    Column("retries_allowed", Integer),  # of the whole fleet in five minutes, the same in every row
)

leaders = Table(
    "leaders",
    metadata,
    Column("role", Text, primary_key=True),
    Column("holder", Text, nullable=False),
    Column("expires_at", _Time, nullable=False),
    Column("last_scan_at", _Time, nullable=False, server_default=_now),
    Column("expire_nothing_before", _Time, nullable=False, server_default=_now),
)
